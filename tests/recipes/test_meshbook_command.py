"""The meshbook command, installed from a wheel and used in a folder with recipes/ and scripts/ of the user's own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

from meshbook.programs import tools

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    *("components", "meshbook", "recipes", "scripts", "conf", "slurm"),
    *("pyproject.toml", "setup.py", "README.md", "LICENSE"),
)
BUILD = "import setuptools.build_meta as build; build.build_wheel('..')"
BUILD_EDITABLE = "import setuptools.build_meta as build; print(build.build_editable('.'))"
TINY = (
    *("model=tiny", "experiment=smoke", "cluster.device=cpu", "data=jsonl", "data.path=data.jsonl"),
    *("training.seq_len=32", "checkpoint.export=false"),
)

pytestmark = pytest.mark.new_interpreter


class Installed:
    """An environment with the wheel and the packages that it needs, and a user's folder."""

    def __init__(self, folder: Path) -> None:
        self.wheel = build_wheel(folder / "source")
        self.python = folder / "venv" / "bin" / "python"
        venv.create(folder / "venv")
        self.packages = next((folder / "venv" / "lib").glob("python*/site-packages"))
        needed = [sysconfig.get_path("purelib"), str(ROOT / ".venv" / "optional")]
        (self.packages / "needed.pth").write_text(
            "\n".join(needed)
        )  # their .pth files, such as a checkout's, are ignored
        install = ["--no-deps", "--no-index", "--disable-pip-version-check", "--quiet", str(self.wheel)]
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "install", *install]
        subprocess.run(command, check=True, timeout=120)
        self.folder = folder / "work"
        for name in ("recipes", "scripts"):
            package = self.folder / name
            package.mkdir(parents=True)
            for file in ("__init__", "finetune", "plan", "_plan"):
                (package / f"{file}.py").write_text("raise SystemExit('this is not a file of Meshbook')\n")

    def run(self, *arguments: str, expect: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.python.parent / "meshbook"), *arguments]
        return self.start(command, expect, **environment)

    def start(self, command: list[str], expect: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        ended = subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, timeout=300, check=False,
            env=variables | {"COLUMNS": "80", "HF_HUB_OFFLINE": "1"} | environment,
        )  # fmt: skip
        assert ended.returncode == expect, f"{command}: {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
        return ended


def build_wheel(source: Path) -> Path:
    """Build the wheel of a copy of the project that has settings of its user."""
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / name, source / name)
    (source / "conf" / "local" / "user.yaml").write_text("optimizer:\n  lr: 0.125\n")
    subprocess.run([sys.executable, "-c", BUILD], cwd=source, check=True, capture_output=True, timeout=120)
    return next(source.parent.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("installed"))


def test_wheel_holds_two_packages_and_no_settings_of_its_builder(installed: Installed) -> None:
    names = ZipFile(installed.wheel).namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"components", "meshbook"}
    assert {
        "meshbook/recipes/finetune.py", "meshbook/scripts/_plan/report.py", "meshbook/conf/finetune.yaml",
        "meshbook/conf/optimizer/muon.yaml", "meshbook/slurm/train.sbatch.j2", "components/launch/recipe.py",
        "components/planning/mesh.svg.j2", "components/models/chat_templates/qwen3.jinja",
    } <= set(names)  # fmt: skip
    assert not [name for name in names if "/local/" in name or "__pycache__" in name]


def test_tools_for_developers_are_neither_in_the_wheel_nor_offered(installed: Installed) -> None:
    names = {name.removeprefix("meshbook/scripts/") for name in ZipFile(installed.wheel).namelist()}
    assert {"chat.py", "plan.py", "tokenize_corpus.py"} <= names
    assert not [name for name in names if name.startswith(("benchmark/", "_gpu/", "gpu.py", "_docs/", "dev/"))]
    assert "\n  gpu " not in installed.run().stdout
    refused = installed.run("gpu", "--small", expect=2).stderr
    assert refused.startswith("gpu: is not a command of meshbook")
    assert "gpu" in tools()  # of a checkout


def test_checkout_named_like_the_package_does_not_shadow_it(installed: Installed, tmp_path: Path) -> None:
    """A folder on sys.path, which an editable install adds, has precedence over a folder without __init__.py."""
    source = installed.wheel.parent / "source"
    built = subprocess.run(
        [sys.executable, "-c", BUILD_EDITABLE], cwd=source, check=True, capture_output=True, text=True
    )
    with ZipFile(source / built.stdout.split()[-1]) as editable:
        (path,) = [name for name in editable.namelist() if name.endswith((".pth", "_finder.py"))]
        folder = editable.read(path).decode().strip()
    (tmp_path / "meshbook" / "recipes").mkdir(parents=True)
    assert Path(folder) == source
    code = f"import sys; sys.path.append({folder!r}); import meshbook; print(meshbook.__file__)"
    shown = subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert shown.stdout == f"{source / 'meshbook' / '__init__.py'}\n"


def test_recipe_trains_on_two_ranks_next_to_packages_of_the_same_name(installed: Installed) -> None:
    option = installed.folder / "conf" / "optimizer" / "mine.yaml"
    option.parent.mkdir(parents=True)
    option.write_text("lr: 0.5\n")
    rows = [{"prompt": f"{number} + 1", "response": str(number + 1)} for number in range(64)]
    (installed.folder / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    arguments = (*TINY, "optimizer=mine", "cluster=local_2proc", "run.dir=run", "training.max_steps=2")
    installed.run("finetune", *arguments)
    run = installed.folder / "run"
    assert json.loads((run / "result.json").read_text())["status"] == "ok"
    assert "lr: 0.5" in (run / "config.yaml").read_text()
    assert "2 processes" in (run / "mesh.svg").read_text()
    command = json.loads((run / "environment.json").read_text())["command"]
    assert f"{installed.packages}/meshbook/recipes/finetune.py" in command
    (other := installed.folder / "elsewhere").mkdir()
    copied = str(other / "mine.py")
    installed.run("copy", "finetune", copied)
    refused = installed.run("copy", "finetune", copied, expect=2)
    assert refused.stderr == f"{copied}: exists; choose another file\n"
    shown = installed.start([str(installed.python), copied, "optimizer=mine", "--cfg", "job"])
    assert "lr: 0.5" in shown.stdout


def test_tools_and_batch_scripts_use_the_installed_files(installed: Installed) -> None:
    planned = installed.run("plan", "model=llama3_1_8b", "cluster=slurm_1node", "cluster.gpu=h100_80", PYTHONPATH=".")
    assert "on 8 x h100_80" in planned.stdout
    assert "\n  meshbook finetune model=llama3_1_8b " in planned.stdout
    described = installed.run("chat", "--help").stdout
    assert "usage: meshbook chat [-h]" in described
    assert "meshbook chat outputs/finetune/RUN/export" in described
    assert "scripts/chat.py" not in described
    assert "top_k: " in installed.run("teacher", "model=tiny", "--cfg", "job").stdout
    report = json.loads(installed.run("doctor", "--json", expect=0).stdout)
    assert {"ok", "note"} >= {check["verdict"] for check in report["checks"]}
    script = installed.run("finetune", "model=tiny", "cluster=slurm_1node", "cluster.dry_run=render", expect=0).stdout
    assert "-m components.launch.job " in script
    copied = installed.folder / "code"
    installed.start(
        [str(installed.python), "-c", "import sys, pathlib; from components.launch.job.scheduler import copy_code; "
         "copy_code(*map(pathlib.Path, sys.argv[1:]))",
         str(installed.packages / "meshbook" / "recipes" / "finetune.py"), str(copied)]
    )  # fmt: skip
    recipe = str(copied / "meshbook" / "recipes" / "finetune.py")
    located = f"import components.package; print(components.package.PROJECT == {str(copied / 'meshbook')!r})"
    for command, text in (
        ([recipe, "model=tiny", "--cfg", "job"], "max_steps"),
        (["-c", located.replace("PROJECT ==", "PROJECT.as_posix() ==")], "True"),
    ):
        assert text in installed.start([str(installed.python), *command], PYTHONPATH=str(copied)).stdout


def test_sweep_runs_the_recipe_for_each_value(installed: Installed) -> None:
    ended = installed.run("sweep", "finetune", "model=tiny", "optimizer.lr=-1,-2", expect=2)
    assert [line for line in ended.stderr.splitlines() if "optimizer.lr" in line] == [
        "optimizer.lr=-1.0: must be greater than 0", "optimizer.lr=-2.0: must be greater than 0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["finetun"], "finetun: is not a command of meshbook; did you mean finetune?; meshbook lists them"),
        (["sft"], "sft: is not a command of meshbook; did you mean finetune?; meshbook lists them"),
        (["copy", "finetune"], "copy: takes a recipe and a file: meshbook copy RECIPE FILE"),
        (["copy", "chat", "x.py"], "chat: is not a recipe; write meshbook copy RECIPE FILE, with a recipe of classify, "
         "distill, dpo, evaluate, finetune, grpo, pretrain"),
        (["sweep"], "recipe missing; write meshbook sweep RECIPE KEY=A,B, with a recipe of classify, distill, dpo, "
         "evaluate, finetune, grpo, pretrain"),
        (["help", "optimizr"], "optimizr: is no section, key, recipe or tool; did you mean optimizer?; write a section "
         "such as optimizer, a key such as optimizer.lr, or an option such as optimizer=muon"),
        (["help", "lr"], "lr: is no section, key, recipe or tool; did you mean optimizer.lr?; write a section such as "
         "optimizer, a key such as optimizer.lr, or an option such as optimizer=muon"),
        (["completion", "fish"], 'completion: takes a shell, bash or zsh, as in eval "$(meshbook completion bash)"'),
    ],
)  # fmt: skip
def test_wrong_commands_are_rejected_in_one_line(installed: Installed, arguments: list[str], message: str) -> None:
    ended = installed.run(*arguments, expect=2)
    assert (ended.stdout, ended.stderr) == ("", f"{message}\n")


def test_help_describes_commands_sections_keys_and_options(installed: Installed) -> None:
    overview = installed.run().stdout
    assert "finetune      Fine-tuning of a Hugging Face causal LM on any mesh" in overview
    assert "plan          Rank the meshes that can run a recipe" in overview
    section = installed.run("help", "optimizer").stdout
    assert "optimizer.schedule=cosine\n      Learning rate after the warmup" in section
    assert "optimizer.kind=muon: Muon (Jordan et al. 2024)" in section
    assert "  sgd: torch's SGD." in section
    key = installed.run("help", "optimizer.lr").stdout
    assert "optimizer.kind=muon, normuon:\n  optimizer.lr=0.0002\n" in key
    assert "  optimizer.lr=0.0002 in finetune, distill, teacher (optimizer=adamw)\n" in key
    assert "  optimizer.lr=1e-06 in dpo (optimizer=adamw_preferences)\n" in key
    assert (
        "training.max_steps=400 in pretrain (conf/pretrain.yaml)" in installed.run("help", "training.max_steps").stdout
    )
    assert "Options, cluster.gpu=OPTION:" in installed.run("help", "gpu").stdout
    assert "scale: rms" in installed.run("help", "optimizer=muon").stdout
    recipe = installed.run("finetune", "--help", "optimizer=muon", "training.max_steps=7").stdout
    assert "  training.max_steps=7  " in recipe
    assert "  optimizer.lr=0.0002  " in recipe
    assert max(map(len, recipe.partition("Keys, KEY=VALUE")[2].splitlines())) <= 80
    assert "meshbook finetune data=mine.jsonl" in recipe
    assert "  optimizer.ns_steps=5\n" in installed.run("finetune", "--help", "optimizer", "optimizer=muon").stdout
    assert "python recipes/" not in recipe
    teacher = installed.run("teacher", "--help", "teacher.path=T").stdout
    assert "\nmeshbook distill teacher.stored=outputs/teacher/mine " in teacher
    assert "python " not in teacher.partition("Options:")[0]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("meshbook fine", ["finetune"]),
        ("meshbook finetune optimizer.l", ["optimizer.lr="]),
        ("meshbook evaluate optim", []),
        ("meshbook finetune g", ["generation."]),
        ("meshbook finetune model=tiny parallelism=fsdp2_tp", ["fsdp2_tp2", "fsdp2_tp2_sp", "fsdp2_tp4"]),
        ("meshbook sweep finetune cluster.device=", ["auto", "cpu", "cuda"]),
        ("meshbook help training.gl", ["training.global_batch_size"]),
        ("meshbook copy ", ["classify", "distill", "dpo", "evaluate", "finetune", "grpo", "pretrain"]),
    ],
)
def test_bash_completes_commands_keys_and_options(installed: Installed, line: str, words: list[str]) -> None:
    script = (
        'eval "$(meshbook completion bash)"; compopt() { :; }\n'
        'COMP_LINE=$1 COMP_POINT=${#1}; _meshbook; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    path = f"{installed.python.parent}:{os.environ['PATH']}"
    completed = installed.start(["bash", "-c", script, "bash", line], PATH=path)
    assert completed.stdout.split() == words
