"""The wheel: `components`, and a package `meshbook` that also carries the recipes, scripts, conf, slurm and k8s.

Everything else about the package is in pyproject.toml. An editable install maps the folders of the checkout instead.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PACKAGES = ("components", "meshbook")
"""Packages at the top level of the wheel; `recipes` or `scripts` there would collide with folders of users."""
CARRIED = ("recipes", "scripts", "conf", "slurm", "k8s")
SUFFIXES = {".py", ".yaml", ".j2", ".md", ".sh"}
LEFT_OUT = {"__pycache__", "local", "dev", "_docs", "benchmark", "_gpu", "gpu.py"}
"""Names in CARRIED that are a user's own, or tools for Meshbook's developers: benchmarks and checks of GPUs too."""


class BuildPackages(build_py):
    """Copy the packages, and for a wheel the folders of the project into the package `meshbook`."""

    def run(self) -> None:
        if not self.editable_mode:
            self.packages = [name for name in self.packages if name.partition(".")[0] in PACKAGES]
        super().run()
        if self.editable_mode:
            return
        for source in (file for folder in CARRIED for file in sorted(Path(folder).rglob("*"))):
            if source.suffix in SUFFIXES and LEFT_OUT.isdisjoint(source.parts):
                target = Path(self.build_lib, "meshbook", source)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)


setup(cmdclass={"build_py": BuildPackages})
