"""The Dockerfile: what it copies, installs and sets, and as `make torture PART=image` the image, built and run.

There is no Docker here: buildah builds the image in a chroot, from a Debian that debootstrap makes in place of BASE.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.kubernetes.conftest import skip_or_fail
from tests.kubernetes.desk import Desk
from tests.kubernetes.test_manifest import pod_of, rendered
from tests.suites import in_torture

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("Dockerfile", "docs/kubernetes.md", "docs/start.md", "slurm/README.md")
USERS_OWN = {"HOME", "HF_HOME", "HF_TOKEN", "TMPDIR", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "WANDB_API_KEY"}
"""Variables that users export before they submit a job, or that schedulers set."""
PINNED = re.compile(r"([\w.-]+)==([^+\s]+)(\+\S+)?")
UNKNOWN_USER = "12345:100"
"""User and group ids that the image has no name for, as those of a pod are by default."""


def instructions() -> list[tuple[str, list[str]]]:
    """Return the instructions of the Dockerfile in order, each with its words."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if line and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", "")
    return [(line.split()[0], shlex.split(line)[1:]) for line in joined.splitlines()]


def is_ignored(name: str) -> bool:
    """Return whether .dockerignore excludes a file: the last pattern that matches it or one of its folders decides."""
    ignored, folders = False, [name, *map(str, Path(name).parents)]
    for line in filter(lambda line: not line.startswith("#"), _ignore_lines()):
        pattern = line.removeprefix("!")
        patterns = {pattern, pattern.removeprefix("**/")}
        if any(fnmatch.fnmatchcase(each, one) for each in folders for one in patterns):
            ignored = not line.startswith("!")
    return ignored


@cache
def _ignore_lines() -> list[str]:
    return (ROOT / ".dockerignore").read_text().splitlines()


def tracked() -> list[str]:
    """Return the tracked files that the image contains."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file() and not is_ignored(name)]


def copied() -> list[list[str]]:
    """Return the sources of each COPY."""
    return [words[:-1] for name, words in instructions() if name == "COPY"]


def test_image_has_the_code_and_nothing_personal() -> None:
    *before, last = copied()
    names = set(tracked())
    assert last == ["."]
    assert {source for sources in before for source in sources} <= names
    assert {name.partition("/")[0] for name in names if "/" in name} == {
        *("components", "conf", "examples", "k8s", "meshbook", "recipes", "scripts", "slurm")
    }
    own = ("mine.jsonl", ".env", "key.pem", ".git/config", "outputs/finetune/run/log", ".venv/bin/python")
    for name in (*own, "conf/local/user.yaml", "conf/local/gpu/h100.yaml", "scripts/__pycache__/plan.pyc"):
        assert is_ignored(name), name


def test_image_overrides_no_variable_of_a_job_or_its_user() -> None:
    """pyxis keeps the value of the image where the image and the job set the same variable."""
    ours = {word.partition("=")[0] for name, words in instructions() if name == "ENV" for word in words}
    assert ours >= {"PATH", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"}
    script = (ROOT / "tests/unit/golden/pyxis.sbatch").read_text()
    exported = {each for line in re.findall(r"export (.*)", script) for each in re.findall(r"(\w+)=|(\w+)$", line)}
    jobs = {name for pair in exported for name in pair if name}
    assert jobs >= {"PYTHONPATH", "OMP_NUM_THREADS", "MASTER_ADDR"}
    pods = {each["name"] for each in pod_of(rendered()[0])["containers"][0]["env"]}
    assert ours.isdisjoint(jobs | pods | USERS_OWN)


def test_image_is_pinned_and_its_user_is_a_number() -> None:
    """Kubernetes cannot verify runAsNonRoot by a name."""
    found, text = dict(instructions()), (ROOT / "Dockerfile").read_text()
    base = next(words[0] for name, words in instructions() if name == "ARG")
    assert re.fullmatch(r"BASE=[a-z/]+:[\w.-]+@sha256:[0-9a-f]{64}", base)
    assert int(found["USER"][0]) > 0
    assert all(line.split(maxsplit=1)[1].startswith("[") for line in re.findall(r"(?m)^(?:ENTRYPOINT|CMD) .*", text))


def test_documented_build_arguments_exist() -> None:
    declared = {words[0].partition("=")[0] for name, words in instructions() if name == "ARG"}
    used = {name: set(re.findall(r"--build-arg (\w+)=", (ROOT / name).read_text())) for name in DOCUMENTS}
    assert used["Dockerfile"]
    assert set().union(*used.values()) <= declared, used


def test_environment_is_installed_before_the_code(tmp_path: Path) -> None:
    """The packages come from the files of the first two COPYs; then the code is copied, and other users run it."""
    folder, bin_folder = tmp_path / "meshbook", tmp_path / "venv" / "bin"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bin_folder.parent], check=True)
    packages = Path(sysconfig.get_path("purelib"))
    inside = next(bin_folder.parent.glob("lib/*/site-packages"))
    (inside / "packages.pth").write_text(f"{packages}\n")  # in place of the packages that install.sh downloads
    for name in [source for sources in copied()[:-1] for source in sources]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    install = ["install", "-q", "--no-deps", "--no-build-isolation", "--no-index", "--editable", str(folder)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "HOME": str(tmp_path)}
    command = [str(bin_folder / "python"), "-m", "pip", *install]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)

    def run(*words: str) -> str:
        done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment, cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    python = str(bin_folder / "python")
    assert run(python, "-c", "import components; print(components.__path__[0])") == f"{folder}/components\n"
    assert "Recipes:" in run(str(bin_folder / "meshbook"), "--help")
    assert run(python, "recipes/finetune.py", "--cfg", "job").startswith("run:\n")
    assert "  k8s_8node: " in run(str(bin_folder / "meshbook"), "help", "cluster")


@dataclass(frozen=True)
class Image:
    """A built image, of which each container is a folder."""

    options: list[str]
    """Options of buildah."""
    name: str

    def buildah(self, *arguments: str) -> str:
        """Run a command of buildah, and return its output."""
        done = subprocess.run(["buildah", *self.options, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    def container(self) -> tuple[str, Path]:
        """Return the name and the folder of a new container."""
        name = self.buildah("from", self.name).strip()
        return name, Path(self.buildah("mount", name).strip())

    def run(self, *command: str) -> str:
        """Run a command in a new container as the image's user, and return its output."""
        return self.buildah("run", "--isolation=chroot", self.container()[0], "--", *command)

    def as_process_1(self, root: Path, log: Path, *command: str, **variables: str) -> subprocess.Popen[bytes]:
        """Start a command as process 1 of a container, by a user that the image has no name for."""
        path = json.loads(self.buildah("inspect", "--type=image", self.name))["OCIv1"]["config"]["Env"][0]
        isolated = ["unshare", "--pid", "--uts", "--mount", "--fork", "--kill-child", f"--mount-proc={root}/proc"]
        shell = f"cd {variables.pop('FOLDER', '/meshbook')} && exec {shlex.join(command)}"
        values = [path, *(f"{name}={value}" for name, value in variables.items())]
        inside = ["chroot", f"--userspec={UNKNOWN_USER}", str(root), "/usr/bin/env", "-i", *values, "sh", "-c", shell]
        setup = f"mount --rbind /dev {root}/dev && hostname image && exec {shlex.join(inside)}"
        with log.open("wb") as output:
            return subprocess.Popen([*isolated, "sh", "-c", setup], stdout=output, stderr=output)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    """The image for CPUs; removed with its containers at the end."""
    missing = [name for name in ("buildah", "debootstrap") if shutil.which(name) is None]
    skip_or_fail(f"there is no {' and no '.join(missing)} (Debian packages of these names)" if missing else None)
    skip_or_fail("containers in a chroot need root" if os.geteuid() else None)
    folder = tmp_path_factory.mktemp("image")
    options = [f"--root={folder}/store", f"--runroot={folder}/state"]
    built = Image(options, "localhost/meshbook:cpu")
    debian = folder / "debian"
    make = ["debootstrap", "--variant=minbase", "--include=ca-certificates", "bookworm", str(debian)]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["tar", "-C", str(debian), "-cf", str(folder / "debian.tar"), "."], check=True)
    (folder / "base").write_text("FROM scratch\nADD debian.tar /\n")
    built.buildah("build", "--isolation=chroot", f"--file={folder}/base", "--tag=localhost/debian", str(folder))
    shutil.rmtree(debian)
    (folder / "debian.tar").unlink()
    # pip's settings of this machine, such as a mirror and its certificate, which are no part of the image.
    volumes, lines = [f"--volume={folder}/pip.conf:/etc/pip.conf:ro"], ["[global]"]
    for key in ("cert", "find-links", "index-url", "extra-index-url"):
        if value := os.environ.get(f"PIP_{key.replace('-', '_').upper()}"):
            lines.append(f"{key} = {value}")
            volumes += [f"--volume={value}:{value}:ro"] if Path(value).exists() else []
    (folder / "pip.conf").write_text("\n".join(lines) + "\n")
    try:
        arguments = ["--build-arg=BASE=localhost/debian", "--build-arg=TORCH=cpu", f"--tag={built.name}"]
        built.buildah("build", "--isolation=chroot", *arguments, *volumes, str(ROOT))
        yield built
    finally:
        built.buildah("rm", "--all")
        built.buildah("rmi", "--all", "--force")


@in_torture
def test_image_trains_as_its_user(image: Image) -> None:
    assert image.run("id", "-u") == "1000\n"
    version = image.run("python", "-c", "import torch, components; print(torch.__version__, components.__file__)")
    assert version == "2.13.0+cpu /meshbook/components/__init__.py\n"
    assert "Recipes:" in image.run("meshbook", "--help")
    assert image.run("python", "recipes/finetune.py", "--cfg", "job").startswith("run:\n")
    assert "ok: 2 steps on 2 processes" in image.run("meshbook", "finetune", "experiment=smoke", "cluster=local_2proc")


@in_torture
def test_image_has_the_files_of_the_checkout_and_the_pinned_packages(image: Image) -> None:
    _, root = image.container()
    made = {"__pycache__", "meshbook.egg-info"}
    files = [file.relative_to(root / "meshbook") for file in (root / "meshbook").rglob("*") if file.is_file()]
    assert sorted(str(file) for file in files if made.isdisjoint(file.parts)) == sorted(tracked())
    pins = {match[1].lower(): match[2] for match in PINNED.finditer((ROOT / "constraints.txt").read_text())}
    frozen = [match for match in map(PINNED.fullmatch, image.run("pip", "freeze").splitlines()) if match]
    assert len(frozen) > 40
    assert {match[1]: match[2] for match in frozen if pins.get(match[1].lower()) != match[2]} == {}


@in_torture
@pytest.mark.parametrize("init", [["tini", "--"], []], ids=["entrypoint", "command"])
def test_sigterm_to_process_1_saves(image: Image, init: list[str], tmp_path: Path) -> None:
    _, root = image.container()
    command = ["python", "recipes/finetune.py", "experiment=smoke", "training.max_steps=100000", "run.dir=/tmp/run"]
    log = tmp_path / "log"
    process = image.as_process_1(root, log, *init, *command, "cluster=local_2proc", HOME="/tmp")
    try:
        deadline = time.monotonic() + 120
        while "loss" not in (_read(root / "tmp/run/metrics.jsonl")) and time.monotonic() < deadline:
            time.sleep(0.2)
        first = int(_read(Path(f"/proc/{process.pid}/task/{process.pid}/children")).split()[0])
        os.kill(first, signal.SIGTERM)
        assert process.wait(timeout=60) == 0, _read(log)
    finally:
        process.kill()
    result = json.loads(_read(root / "tmp/run/result.json"))
    assert result["status"] == "preempted", _read(log)
    assert list((root / "tmp/run/checkpoints").glob("step_*/"))


@in_torture
def test_pod_of_a_submitted_job_runs_in_the_image(image: Image, desk: Desk) -> None:
    """With the command, the variables and the folder of the manifest, on a volume that the user owns."""
    submitted = desk.run("cluster.nodes=1", "training.max_steps=3")
    spec = pod_of(submitted.objects[0])
    container, name = spec["containers"][0], submitted.objects[0]["metadata"]["name"]
    _, root = image.container()
    volume = root / str(desk.folder).lstrip("/")
    volume.mkdir(parents=True)
    for folder in volume.parents:
        if folder.is_relative_to(root):
            folder.chmod(0o755)
    subprocess.run(["cp", "-a", f"{desk.folder}/.", str(volume)], check=True)
    subprocess.run(["chown", "-R", UNKNOWN_USER, str(volume)], check=True)
    (root / "etc/hosts").write_text(f"127.0.0.1 localhost {name}-0.{name}\n")
    variables = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    variables |= {"JOB_COMPLETION_INDEX": "0", "MESHBOOK_POD_UID": "uid", "FOLDER": container["workingDir"]}
    log = desk.folder / "pod.log"
    process = image.as_process_1(root, log, *container["command"], **variables)
    assert process.wait(timeout=180) == 0, _read(log)
    run = root / str(submitted.run_dir).lstrip("/")
    assert json.loads(_read(run / "result.json"))["status"] == "ok", _read(log)


def _read(file: Path) -> str:
    return file.read_text() if file.exists() else ""
