"""Refuse to build a wheel. Everything else about the package is in pyproject.toml."""

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel


class RefusedWheel(bdist_wheel):
    """A wheel would lack conf/ and slurm/, which every recipe reads; editable installs do not run this command."""

    def run(self) -> None:
        raise SystemExit(
            "Meshbook runs from its checkout: a wheel would not contain conf/ and slurm/, which every recipe reads. "
            "Install it with: pip install -e . (or make install)"
        )


setup(cmdclass={"bdist_wheel": RefusedWheel})
