"""The run directory: chosen, locked, populated, resumed and removed."""

from __future__ import annotations

import copy
import json
import os
import stat
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from components.config.compose.frozen import read_frozen, to_yaml
from components.config.schema import (
    CausalLMConfig,
    EvaluateConfig,
    FinetuneConfig,
    PeftConfig,
    SlurmClusterConfig,
    WeightInit,
)
from components.config.schema.data import DocsDataConfig, MixtureDataConfig
from components.config.schema.run import RunConfig
from components.launch import run_directory as filesystem
from components.launch.run_directory import RunDirectory, start_record
from components.launch.run_directory_lock import check_changes, check_run_directory, exclude_starts, open_run_directory
from components.protocol.errors import ConfigError
from components.protocol.run_files import accept_start, attempt_logs, current_config
from tests.frozen import frozen

RECORD = {"recipe": "finetune"}


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def config(run_dir: str | None = None) -> FinetuneConfig:
    cfg = FinetuneConfig(
        model=CausalLMConfig(init=WeightInit.random, config={"model_type": "llama"}, tokenizer="bytes"),
        data=DocsDataConfig(),
    )
    cfg.run.dir = run_dir
    return cfg


def start(cfg: FinetuneConfig, recipe: str = "finetune", picture: str | None = None) -> RunDirectory:
    directory = open_run_directory(cfg, recipe)
    directory.freeze(cfg, {"recipe": recipe}, picture)
    return directory


def take_step(directory: RunDirectory) -> None:
    """Replace the record of the run by that of this start, as rank 0 does at its first step."""
    accept_start(directory.path, directory.attempt)


def end(directory: RunDirectory) -> None:
    """Release the lock, as the end of the process does."""
    assert directory.lock is not None
    os.close(directory.lock)


def test_new_directory_is_named_by_recipe_and_time(tmp_path: Path) -> None:
    cfg = config()
    directory = start(cfg)
    assert directory.path.parent == tmp_path / "outputs" / "finetune"
    assert cfg.run.dir == str(directory.path)
    assert read_frozen(directory.path / "config.yaml", FinetuneConfig) == cfg
    assert json.loads((directory.path / "environment.json").read_text()) == RECORD
    assert (directory.path / "logs" / "latest").resolve() == directory.logs == attempt_logs(directory.path, 0)


def test_two_starts_in_the_same_second_get_different_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second start first draws the same timestamp and the same hex suffix."""
    drawn = iter(["aaaa", "aaaa", "bbbb"])
    monkeypatch.setattr(filesystem.time, "strftime", lambda form: "20260101-000000")
    monkeypatch.setattr(filesystem.secrets, "token_hex", lambda count: next(drawn))
    names = [start(config()).path.name for _ in range(2)]
    assert names == ["20260101-000000-aaaa", "20260101-000000-bbbb"]


def test_given_directory_is_made_absolute_and_may_exist(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert start(config("mine")).path == tmp_path / "mine"


def test_resumed_run_keeps_the_files_of_earlier_attempts() -> None:
    first = start(config("mine"))
    first.conclude("failed", "boom")
    end(first)
    longer = config("mine")
    longer.training.max_steps = 999
    second = start(longer)
    assert (first.attempt, second.attempt) == (0, 1)
    assert read_frozen(second.path / "config.yaml", FinetuneConfig).training.max_steps == 100
    assert read_frozen(current_config(second.path), FinetuneConfig).training.max_steps == 999
    take_step(second)
    assert current_config(second.path) == second.path / "config.yaml"
    assert not (second.path / ".start").exists()
    assert read_frozen(second.path / "config.yaml", FinetuneConfig).training.max_steps == 999
    assert read_frozen(first.logs / "config.yaml", FinetuneConfig).training.max_steps == 100
    assert json.loads((first.logs / "result.json").read_text()) == {"status": "failed", "error": "boom"}
    assert not (second.path / "result.json").exists()
    assert (second.path / "logs" / "latest").resolve() == second.logs


def test_picture_of_another_mesh_replaces_the_first_at_the_first_step() -> None:
    first = start(config("mine"), picture="two ranks")
    take_step(first)
    end(first)
    refused = start(config("mine"), picture="three ranks")
    refused.discard("refused")
    end(refused)
    assert (first.path / "mesh.svg").read_text() == "two ranks"
    second = start(config("mine"), picture="four ranks")
    assert (first.path / "mesh.svg").read_text() == "two ranks"
    take_step(second)
    assert (first.path / "mesh.svg").read_text() == "four ranks"


def test_result_written_by_the_recipe_is_kept() -> None:
    directory = start(config("mine"))
    (directory.path / "result.json").write_text('{"status": "ok"}')
    directory.conclude("failed", "boom")
    assert (directory.path / "result.json").read_text() == '{"status": "ok"}'


def change(cfg: FinetuneConfig, key: str, value: object) -> None:
    section, _, name = key.partition(".")
    setattr(getattr(cfg, section), name, value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run.seed", 7),
        ("training.global_batch_size", 32),
        ("training.seq_len", 64),
        ("model.path", "owner/model"),
        ("model.config", {"model_type": "gpt2"}),
        ("data.max_samples", 3),
    ],
)
def test_change_that_makes_a_different_run_is_rejected_by_key(key: str, value: object) -> None:
    end(start(config("mine")))
    other = config("mine")
    change(other, key, value)
    with pytest.raises(ConfigError) as caught:
        open_run_directory(other, "finetune")
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(f"{key}={value}: the run in run.dir=")
    other.run.resume = "never"
    start(other)


def test_changed_mixture_weight_is_rejected_by_key() -> None:
    before, after = config("mine"), config("mine")
    for cfg, weight in ((before, 0.3), (after, 0.4)):
        cfg.data = MixtureDataConfig(sources={"docs": DocsDataConfig(weight=weight), "more": DocsDataConfig()})
    end(start(before))
    with pytest.raises(ConfigError, match=r"^data.sources.docs.weight=0.4: the run in .* began with 0.3; .*") as caught:
        open_run_directory(after, "finetune")
    assert caught.value.problems[0].endswith("run.accept_changes=[data.sources.docs.weight]")
    after.run.accept_changes = ["data.sources.docs.weight"]
    start(after)


def test_key_missing_from_an_older_config_counts_as_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    cfg = config("mine")
    before = yaml.safe_load(to_yaml(cfg))
    for section, key in (("data", "overlong"), ("data", "eval_fraction"), ("run", "accept_changes")):
        del before[section][key]
    check_changes(yaml.safe_dump(before), cfg, "mine")
    assert capsys.readouterr().err == ""
    cfg.data.eval_fraction = 0.5
    with pytest.raises(ConfigError, match=r"^data.eval_fraction=0.5: the run in mine began with 0.05; "):
        check_changes(yaml.safe_dump(before), cfg, "mine")


def test_section_without_a_kind_in_an_older_config_has_the_original_kind(capsys: pytest.CaptureFixture[str]) -> None:
    cfg = config("mine")
    before = yaml.safe_load(to_yaml(cfg))
    for section in ("cluster", "model", "objective", "optimizer"):
        del before[section]["kind"]
    check_changes(yaml.safe_dump(before), cfg, "mine")
    assert capsys.readouterr().err == ""
    cfg.cluster = SlurmClusterConfig(procs_per_node=cfg.cluster.procs_per_node.replace("auto", "1"))
    check_changes(yaml.safe_dump(before), cfg, "mine")
    assert "cluster.kind: local -> slurm" in capsys.readouterr().err


def test_allowed_changes_are_accepted_and_reported(capsys: pytest.CaptureFixture[str]) -> None:
    end(start(config("mine")))
    other = config("mine")
    other.optimizer.lr, other.parallelism.tp, other.training.micro_batch_size = 1.0, 2, 1
    second = start(other)
    take_step(second)
    end(second)
    report = capsys.readouterr().err
    assert "mine resumes with changed values: optimizer.lr: " in report
    assert "-> 1.0; parallelism.tp: 1 -> 2; training.micro_batch_size: " in report
    start(other)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("accepted", [["run.seed", "data.max_samples"], ["run.seed", "data"]])
def test_run_resumes_with_changes_listed_in_accept_changes(
    accepted: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    end(start(config("mine")))
    other = config("mine")
    change(other, "run.seed", 7)
    change(other, "data.max_samples", 3)
    with pytest.raises(ConfigError) as caught:
        open_run_directory(copy.deepcopy(other), "finetune")
    assert len(caught.value.problems) == 2
    other.run.accept_changes = accepted[:1]
    with pytest.raises(ConfigError, match=r"^data.max_samples=3: .*run.accept_changes=\[data.max_samples\]$"):
        open_run_directory(other, "finetune")
    other.run.accept_changes = accepted
    second = start(other)
    take_step(second)
    end(second)
    assert "data.max_samples: None -> 3; run.seed: 42 -> 7" in capsys.readouterr().err
    other.run.accept_changes = []
    start(other)  # once accepted, the change is part of the frozen config


def saved_checkpoint(directory: RunDirectory, folder: Path) -> Path:
    """Write the state of a checkpoint of the run."""
    folder.mkdir(parents=True)
    state = {"step": int(folder.name.partition("_")[2]), "extra": {}}
    state["config"] = (directory.path / "config.yaml").read_text()
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def test_checkpoint_of_another_run_is_compared_with_its_saved_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = start(config("there"))
    checkpoint = saved_checkpoint(source, tmp_path / "step_3")
    other = config("here")
    other.run.resume = str(checkpoint)
    change(other, "training.global_batch_size", 32)
    message = rf"training.global_batch_size=32: the run in run.resume={checkpoint} began with"
    with pytest.raises(ConfigError, match=message):
        open_run_directory(other, "finetune")
    assert not (tmp_path / "here").exists()
    other.run.accept_changes = ["training.global_batch_size"]
    start(other)
    assert (
        f"run.resume={checkpoint} resumes with changed values: training.global_batch_size: " in capsys.readouterr().err
    )
    (checkpoint / "state.json").write_text("{}")
    other.run.dir = "third"
    with pytest.raises(ConfigError, match=rf"run.resume={checkpoint}: not a complete checkpoint: .*state.json"):
        open_run_directory(other, "finetune")


def test_changed_command_does_not_continue_an_earlier_start_from_the_same_checkpoint(tmp_path: Path) -> None:
    source = start(config("there"))
    checkpoint = saved_checkpoint(source, tmp_path / "step_3")
    cfg = config("mine")
    cfg.run.resume = str(checkpoint)
    directory = start(copy.deepcopy(cfg))
    end(directory)
    saved_checkpoint(directory, directory.path / "checkpoints" / "step_5")
    cfg.parallelism.tp = 2
    end(start(copy.deepcopy(cfg)))  # continues on another mesh
    cfg.optimizer.lr = 1.0
    with pytest.raises(ConfigError, match=r"already started from it, with other values \(optimizer.lr: .* -> 1.0\)"):
        open_run_directory(copy.deepcopy(cfg), "finetune")
    cfg.run.resume = "auto"
    start(cfg)


def test_evaluation_rejects_peft_settings_that_differ_from_training(tmp_path: Path) -> None:
    trained = config("there")
    trained.peft = PeftConfig(method="lora", alpha=8.0, rslora=True)
    directory = start(trained)
    run, checkpoint = directory.path, saved_checkpoint(directory, tmp_path / "step_3")

    def evaluation(peft: PeftConfig, given: Path) -> EvaluateConfig:
        cfg = EvaluateConfig(model=trained.model, data=DocsDataConfig(), peft=peft)
        cfg.evaluation.checkpoint = str(given)
        return cfg

    for given in (checkpoint, run):
        with pytest.raises(ConfigError) as caught:
            open_run_directory(evaluation(PeftConfig(method="lora"), given), "evaluate")
        assert caught.value.problems == [
            f"peft.{key}={value}: evaluation.checkpoint={given} was trained with {saved}; set peft.{key}={saved}"
            for key, value, saved in (("alpha", 32.0, 8.0), ("rslora", False, True))
        ]
        open_run_directory(evaluation(replace(trained.peft, export="merged", dropout=0.5), given), "evaluate")


def test_accept_changes_rejects_keys_that_may_always_change() -> None:
    with pytest.raises(ConfigError, match=r"run.accept_changes=\[optimizer.lr\]: may name run.seed, .*data"):
        RunConfig(accept_changes=["optimizer.lr", "data.path", "data"])


def test_restart_in_a_directory_with_checkpoints_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = start(config("mine"))
    end(directory)
    again = config("mine")
    again.run.resume = "never"
    (directory.path / "checkpoints" / "step_5.tmp-0").mkdir(parents=True)
    end(start(copy.deepcopy(again)))
    (directory.path / "checkpoints" / "step_5").mkdir()
    with pytest.raises(ConfigError, match="run.resume=never: .* contains checkpoints"):
        open_run_directory(copy.deepcopy(again), "finetune")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # the ranks of the user's torchrun
    start(again)


def test_run_of_another_recipe_is_rejected_by_name() -> None:
    end(start(config("mine")))
    other = EvaluateConfig(model=config().model, data=DocsDataConfig())
    other.run.dir = "mine"
    with pytest.raises(ConfigError, match="contains a run of the recipe finetune, not evaluate"):
        open_run_directory(other, "evaluate")


def test_config_that_does_not_fit_the_recipe_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text(frozen("lr: 3\n"))
    with pytest.raises(ConfigError, match=r"its config.yaml does not fit this recipe \(lr=3: no such key"):
        open_run_directory(config("mine"), "finetune")


def test_invalid_config_file_is_quoted_only_in_part(tmp_path: Path) -> None:
    """It may be a link to another file of the run, with long content and many lines."""
    (tmp_path / "mine").mkdir()
    other = {"step": 2, "config": "a line\n" * 500, "more": [1]}
    (tmp_path / "mine" / "config.yaml").write_text(frozen(yaml.safe_dump(other, sort_keys=False)))
    with pytest.raises(ConfigError) as caught:
        open_run_directory(config("mine"), "finetune")
    (problem,) = caught.value.problems
    assert "its config.yaml does not fit this recipe (step=2: no such key" in problem
    assert "\n" not in problem
    assert len(problem) < 700


def test_start_errors_are_reported_alike_before_and_at_the_start_without_writing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error_of(cfg: FinetuneConfig, recipe: str = "finetune") -> str:
        before = sorted(tmp_path.rglob("*"))
        errors = []
        for act in (check_run_directory, open_run_directory, open_run_directory):  # a rejected start releases the lock
            with pytest.raises(ConfigError) as caught:
                act(copy.deepcopy(cfg), recipe)
            errors.append(str(caught.value))
            assert sorted(tmp_path.rglob("*")) == before
        assert errors[0] == errors[1] == errors[2]
        return errors[0]

    (tmp_path / "file").write_text("")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("x")
    for valid in (config(), config("new/one")):
        check_run_directory(valid, "finetune")
    for name in ("file", "file/below"):
        assert f"run.dir={tmp_path / name}: cannot be used: File exists" in error_of(config(name))
    assert "contains files, but no run" in error_of(config("thesis"))
    first = start(config("mine"))
    assert f"run.dir={tmp_path / 'mine'}: is in use by another run" in error_of(config("mine"))
    end(first)
    check_run_directory(config("mine"), "finetune")
    end(start(config("mine")))  # check_run_directory released the lock
    other = config("mine")
    change(other, "run.seed", 7)
    assert f"run.seed=7: the run in run.dir={tmp_path / 'mine'} began with 42" in error_of(other)
    assert "contains a run of the recipe finetune" in error_of(config("mine"), "pretrain")
    other.run.dir, other.run.resume = "here", str(tmp_path / "thesis")
    assert f"run.resume={tmp_path / 'thesis'}: not a complete checkpoint" in error_of(other)
    assert capsys.readouterr().err == ""
    end(start(config("mine")))


def test_check_run_directory_reports_missing_write_permission() -> None:
    with tempfile.TemporaryDirectory() as folder:  # other users can reach it, unlike tmp_path
        Path(folder).chmod(0o555)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                if os.getuid() == 0:  # file modes do not restrict root
                    os.setuid(65534)
                check_run_directory(config(f"{folder}/run"), "finetune")
            except ConfigError as error:
                status = 0 if "cannot be used: Permission denied; choose another run.dir" in str(error) else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert os.listdir(folder) == []


def test_rejected_run_leaves_no_files(tmp_path: Path) -> None:
    for run_dir in (None, "a/b/c"):
        directory = start(config(run_dir))
        (directory.logs / "rank_1.log").write_text("some output")
        (directory.path / "metrics.jsonl").touch()
        directory.discard("no data")
    assert os.listdir(tmp_path) == []


def test_rejected_run_keeps_directories_that_existed_before(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    start(config("mine")).discard("no data")
    assert os.listdir(tmp_path / "mine") == []
    (tmp_path / "outputs" / "finetune" / "earlier").mkdir(parents=True)
    start(config()).discard("no data")
    assert os.listdir(tmp_path / "outputs" / "finetune") == ["earlier"]


def test_rejected_run_keeps_the_output_of_the_recipe() -> None:
    directory = start(config("mine"))
    (directory.path / "export").mkdir()
    directory.discard("no data")
    assert json.loads((directory.path / "result.json").read_text()) == {"status": "invalid", "error": "no data"}
    assert (directory.path / "config.yaml").exists()


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a run by name, but those of its logs."""
    files = [each for each in sorted(folder.rglob("*")) if each.is_file() and not each.name.startswith(".lock")]
    return {name: each.read_bytes() for each in files if not (name := str(each.relative_to(folder))).startswith("logs")}


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("killed", [0, 1])
def test_refused_resume_leaves_the_run_as_it_was(ended: bool, killed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A start with an accepted change is refused by a rank; another one was killed before its first step."""
    first = start(config("mine"))
    if ended:
        first.conclude("failed", "boom")
    end(first)
    before = contents(first.path)
    before = {name: content for name, content in before.items() if not name.startswith(".lease")}
    changed = config("mine")
    change(changed, "run.seed", 7)
    changed.run.accept_changes = ["run.seed"]
    for _ in range(killed):
        end(start(changed))
        assert contents(first.path)["config.yaml"] == before["config.yaml"]
    for _ in range(2):
        refused = start(changed)
        assert json.loads((refused.logs / "environment.json").read_text()) == RECORD
        refused.discard("other weights")
        end(refused)
    after = {name: content for name, content in contents(first.path).items() if not name.startswith(".lease")}
    assert after == before if not killed else after.items() <= before.items()
    capsys.readouterr()
    again = start(config("mine"))
    assert capsys.readouterr().err == ""
    take_step(again)
    assert read_frozen(again.path / "config.yaml", FinetuneConfig) == config(str(again.path))


def test_config_of_a_refused_start_does_not_restore_a_damaged_one(capsys: pytest.CaptureFixture[str]) -> None:
    first = start(config("mine"))
    end(first)
    changed = config("mine")
    change(changed, "run.seed", 7)
    changed.run.accept_changes = ["run.seed"]
    refused = start(changed)
    refused.discard("other weights")
    end(refused)
    (first.path / "config.yaml").write_text("damaged: [")
    start(config("mine"))
    assert f"restored from {first.logs}/config.yaml" in capsys.readouterr().err


def test_files_of_a_run_respect_the_umask() -> None:
    before = os.umask(0o077)
    try:
        directory = start(config())
    finally:
        os.umask(before)
    for entry in [directory.path, *directory.path.rglob("*")]:
        if not entry.is_symlink():
            assert stat.S_IMODE(entry.stat().st_mode) == (0o700 if entry.is_dir() else 0o600), entry


def test_start_record_contains_versions_git_and_command_but_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    monkeypatch.setattr("sys.argv", ["recipes/finetune.py", "run.name=a b"])
    record = start_record("finetune", Path(__file__), 2, 1)
    assert "hf_canary" not in json.dumps(record)
    assert record["versions"]["omegaconf"].startswith("2.3")
    assert record["versions"]["torch"]
    assert (record["recipe"], record["processes"], record["attempt"]) == ("finetune", 2, 1)
    assert record["command"] == f"{sys.executable} recipes/finetune.py 'run.name=a b'"
    assert record["git"] is None or len(record["git"]["commit"]) == 40


def test_start_record_outside_a_repository_has_no_git_entry(tmp_path: Path) -> None:
    assert start_record("finetune", tmp_path / "recipe.py", 1, 0)["git"] is None


def fake_slurm(folder: Path, **scripts: str) -> str:
    """Write fake Slurm commands with these shell scripts, and return their folder."""
    folder.mkdir(exist_ok=True)
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return str(folder)


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "LAUNCH_FAILED", "OF_A_LATER_SLURM"])
def test_run_directory_whose_job_has_not_ended_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    directory = start(config("mine"))
    end(directory)
    (directory.path / "job_id").write_text("17\n")
    monkeypatch.setenv("PATH", fake_slurm(tmp_path / "bin", squeue=f"echo 17 {state}"))
    with pytest.raises(ConfigError, match=f"belongs to job 17, which is {state}; choose another run.dir, or end"):
        open_run_directory(config("mine"), "finetune")
    with (
        pytest.raises(ConfigError, match=f"which is {state}; wait for it to finish, or end"),
        exclude_starts(directory.path),
    ):
        pass


NOT_LISTED = "[ $1 = ping ] && echo Slurmctld is UP || { echo slurm_load_jobs error: Invalid job id >&2; exit 1; }"


@pytest.mark.parametrize(
    "scripts",
    [{"squeue": "echo 17 COMPLETED"}, {"squeue": "exit 1", "scontrol": NOT_LISTED}],
    ids=["ended", "no longer listed"],
)
def test_run_directory_whose_job_has_ended_resumes_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], scripts: dict[str, str]
) -> None:
    directory = start(config("mine"))
    end(directory)
    (directory.path / "job_id").write_text("17\n")
    monkeypatch.setenv("PATH", fake_slurm(tmp_path / "bin", **scripts))
    with exclude_starts(directory.path):
        pass
    end(start(config("mine")))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("scripts", [{}, {"squeue": "exit 1", "scontrol": "exit 1"}], ids=["laptop", "no controller"])
def test_job_of_unknown_state_gives_a_warning_on_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], scripts: dict[str, str]
) -> None:
    """A start only warns, because the user may know that the job has ended; `exclude_starts`, for tools, raises."""
    monkeypatch.setenv("PATH", fake_slurm(tmp_path / "bin", **scripts))
    directory = start(config("mine"))
    end(directory)
    end(start(config("mine")))
    assert capsys.readouterr().err == ""  # no job, no warning
    (directory.path / "job_id").write_text("17\n")
    end(start(config("mine")))
    warning = capsys.readouterr().err
    assert len(warning.splitlines()) == 1
    assert f"{directory.path}: belongs to job 17, which may still run: there is no squeue on PATH" in warning
    assert "do not start this run twice at once" in warning
    with (
        pytest.raises(ConfigError, match="job 17, which may still run.*remove .*job_id if the job has"),
        exclude_starts(directory.path),
    ):
        pass
