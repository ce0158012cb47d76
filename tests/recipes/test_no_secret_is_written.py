"""No file of a run contains secrets from the environment, the config, git or uncommitted code, with real trackers."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.recipes.launching import Bench

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "finetune.py"
CANARY = "canary0123456789"
SECRETS = {
    "HF_TOKEN": f"hf_{CANARY}",
    "WANDB_API_KEY": "ca4a5" * 8,
    "MY_PASSWORD": f"{CANARY} of a password",
    "AWS_SECRET_ACCESS_KEY": f"/{CANARY}/",
}


def git(folder: Path, *arguments: str) -> None:
    who = {f"GIT_{role}_{what}": "a@b" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, env=os.environ | who)


def files_with(folder: Path, text: str) -> set[str]:
    return {
        file.relative_to(folder).parts[0]
        for file in folder.rglob("*")
        if file.is_file() and (text.encode() in file.read_bytes() or text in file.name)
    }


def test_run_writes_no_secret_of_environment_git_or_code(bench: Bench) -> None:
    """Secrets are in the environment, in the URL of the git remote and in uncommitted code, which trackers may copy."""
    trackers = {"tensorboard": "logging.tensorboard=true", "mlflow": "logging.mlflow.enabled=true"}
    installed = [setting for package, setting in trackers.items() if importlib.util.find_spec(package) is not None]
    shutil.copy(RECIPE, bench.recipe)
    git(bench.folder, "init", "-q")
    git(bench.folder, "remote", "add", "origin", f"https://me:{CANARY}@example.org/x.git")
    git(bench.folder, "add", ".")
    git(bench.folder, "commit", "-qm", "mine")
    bench.recipe.write_text(bench.recipe.read_text() + f"\n# TOKEN = '{CANARY}'\n")
    done = bench.start(
        "experiment=smoke", "training.max_steps=1", "training.seq_len=128", "training.eval_every=0",
        "checkpoint.export=false", "data.max_samples=16", "data.max_eval_samples=4", "generation.samples=0",
        "logging.wandb.mode=offline", "logging.wandb.tags=[a_tag]", "cluster.device=cpu",
        *installed,
        environment=SECRETS | {"WANDB_SAVE_CODE": "true", "OMP_NUM_THREADS": "1"},
    ).wait()  # fmt: skip
    assert done.status == 0, done.errors
    (run,) = bench.run_directories()
    found = files_with(run, "a_tag")
    assert found >= {"wandb", "config.yaml", "environment.json"}, "the search finds nothing"
    assert len(found & {"tensorboard", "mlruns"}) == len(installed)
    for secret in (CANARY, *SECRETS.values()):
        assert files_with(run, secret) == set()
        assert secret not in done.output + done.errors


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("run.name", ["run.name=${oc.env:MY_PASSWORD}"]),
        ("logging.wandb.tags[0]", ["logging.wandb.tags=['a ${oc.env:HF_TOKEN}']"]),
        ("data.path", ["data=jsonl", f"data.path=https://me:{CANARY}@example.org/x.jsonl"]),
        ("model.config.api_key", [f"model.config.api_key={CANARY}"]),
        ("model.config.api_key", [f"model.config.api_key={CANARY}", "model.config.api_key=null"]),
        ("run.dir", ["run.dir=outputs/${oc.env:WANDB_API_KEY}"]),
    ],
)
def test_secret_in_the_config_is_rejected_before_anything_is_written(
    bench: Bench, key: str, overrides: list[str]
) -> None:
    bench.write("note('ran')")
    done = bench.run(*overrides, environment=SECRETS)
    assert done.status == 2
    assert done.errors.startswith(f"{key}: ")
    assert len(done.errors.splitlines()) == 1
    assert not any(secret in done.output + done.errors for secret in (CANARY, *SECRETS.values()))
    assert os.listdir(bench.folder) == ["tried.py"]
