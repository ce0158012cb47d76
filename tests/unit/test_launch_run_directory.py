"""Where a run lives: chosen, guarded, frozen, continued, and taken back."""

from __future__ import annotations

import copy
import json
import os
import stat
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from components.config.compose.frozen import read_frozen, to_yaml
from components.config.errors import ConfigError
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
from components.launch.run_directory import filesystem
from components.launch.run_directory.directory import RunDirectory
from components.launch.run_directory.opening import check_run_directory, held, open_run_directory
from components.launch.run_directory.provenance import start_record
from components.launch.run_directory.resume_check import check_changes
from components.protocol.run_files import attempt_logs

RECORD = {"recipe": "finetune"}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def config(run_dir: str | None = None) -> FinetuneConfig:
    cfg = FinetuneConfig(
        model=CausalLMConfig(init=WeightInit.random, config={"model_type": "llama"}, tokenizer="bytes"),
        data=DocsDataConfig(),
    )
    cfg.run.dir = run_dir
    return cfg


def start(cfg: FinetuneConfig, recipe: str = "finetune") -> RunDirectory:
    directory = open_run_directory(cfg, recipe)
    directory.freeze(cfg, {"recipe": recipe})
    return directory


def end(directory: RunDirectory) -> None:
    """Free the lock, as the end of the process does."""
    assert directory.lock is not None
    os.close(directory.lock)


def test_a_new_directory_is_named_by_recipe_and_time(tmp_path: Path) -> None:
    cfg = config()
    directory = start(cfg)
    assert directory.path.parent == tmp_path / "outputs" / "finetune"
    assert cfg.run.dir == str(directory.path)
    assert read_frozen(directory.path / "config.yaml", FinetuneConfig) == cfg
    assert json.loads((directory.path / "environment.json").read_text()) == RECORD
    assert (directory.path / "logs" / "latest").resolve() == directory.logs == attempt_logs(directory.path, 0)


def test_two_starts_of_the_same_moment_get_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second draws the same time and the same hex at first."""
    drawn = iter(["aaaa", "aaaa", "bbbb"])
    monkeypatch.setattr(filesystem.time, "strftime", lambda form: "20260101-000000")
    monkeypatch.setattr(filesystem.secrets, "token_hex", lambda count: next(drawn))
    names = [start(config()).path.name for _ in range(2)]
    assert names == ["20260101-000000-aaaa", "20260101-000000-bbbb"]


def test_a_given_directory_is_made_absolute_and_may_be_there(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert start(config("mine")).path == tmp_path / "mine"


def test_the_same_run_goes_on_and_keeps_what_was() -> None:
    first = start(config("mine"))
    first.conclude("failed", "boom")
    end(first)
    longer = config("mine")
    longer.training.max_steps = 999
    second = start(longer)
    assert (first.attempt, second.attempt) == (0, 1)
    assert read_frozen(second.path / "config.yaml", FinetuneConfig).training.max_steps == 999
    assert read_frozen(first.logs / "config.yaml", FinetuneConfig).training.max_steps == 100
    assert json.loads((first.logs / "result.json").read_text()) == {"status": "failed", "error": "boom"}
    assert not (second.path / "result.json").exists()
    assert (second.path / "logs" / "latest").resolve() == second.logs


def test_a_result_of_the_recipe_is_kept() -> None:
    directory = start(config("mine"))
    (directory.path / "result.json").write_text('{"status": "ok"}')
    directory.conclude("failed", "boom")
    assert (directory.path / "result.json").read_text() == '{"status": "ok"}'


def change_seed(cfg: FinetuneConfig) -> None:
    cfg.run.seed = 7


def change_batch(cfg: FinetuneConfig) -> None:
    cfg.training.global_batch_size = 32


def change_length(cfg: FinetuneConfig) -> None:
    cfg.training.seq_len = 64


def change_model(cfg: FinetuneConfig) -> None:
    cfg.model.path = "owner/model"


def change_model_config(cfg: FinetuneConfig) -> None:
    cfg.model.config = {"model_type": "gpt2"}


def change_data(cfg: FinetuneConfig) -> None:
    cfg.data.max_samples = 3


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (change_seed, "run.seed=7"),
        (change_batch, "training.global_batch_size=32"),
        (change_length, "training.seq_len=64"),
        (change_model, "model.path=owner/model"),
        (change_model_config, "model.config={'model_type': 'gpt2'}"),
        (change_data, "data.max_samples=3"),
    ],
)
def test_what_makes_it_another_run_is_refused_by_key(change: Callable[[FinetuneConfig], None], key: str) -> None:
    end(start(config("mine")))
    other = config("mine")
    change(other)
    with pytest.raises(ConfigError) as caught:
        open_run_directory(other, "finetune")
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(f"{key}: the run in run.dir=")
    other.run.resume = "never"
    start(other)


def test_another_weight_in_a_mixture_is_refused_by_its_key() -> None:
    before, after = config("mine"), config("mine")
    for cfg, weight in ((before, 0.3), (after, 0.4)):
        cfg.data = MixtureDataConfig(sources={"docs": DocsDataConfig(weight=weight), "more": DocsDataConfig()})
    end(start(before))
    with pytest.raises(ConfigError, match=r"^data.sources.docs.weight=0.4: the run in .* began with 0.3; .*") as caught:
        open_run_directory(after, "finetune")
    assert caught.value.problems[0].endswith("run.accept_changes=[data.sources.docs.weight]")
    after.run.accept_changes = ["data.sources.docs.weight"]
    start(after)


def test_a_key_that_an_earlier_version_did_not_write_meant_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    cfg = config("mine")
    before = yaml.safe_load(to_yaml(cfg))
    for section, key in (("data", "overlong"), ("data", "eval_fraction"), ("run", "accept_changes")):
        del before[section][key]
    check_changes(yaml.safe_dump(before), cfg, "mine")
    assert capsys.readouterr().err == ""
    cfg.data.eval_fraction = 0.5
    with pytest.raises(ConfigError, match=r"^data.eval_fraction=0.5: the run in mine began with 0.05; "):
        check_changes(yaml.safe_dump(before), cfg, "mine")


def test_a_section_without_a_kind_was_of_the_kind_that_there_was(capsys: pytest.CaptureFixture[str]) -> None:
    cfg = config("mine")
    before = yaml.safe_load(to_yaml(cfg))
    for section in ("cluster", "model", "objective", "optimizer"):
        del before[section]["kind"]
    check_changes(yaml.safe_dump(before), cfg, "mine")
    assert capsys.readouterr().err == ""
    cfg.cluster = SlurmClusterConfig(procs_per_node=cfg.cluster.procs_per_node.replace("auto", "1"))
    check_changes(yaml.safe_dump(before), cfg, "mine")
    assert "cluster.kind: local -> slurm" in capsys.readouterr().err


def test_every_changed_key_is_told_at_once() -> None:
    end(start(config("mine")))
    other = config("mine")
    change_seed(other)
    change_data(other)
    with pytest.raises(ConfigError) as caught:
        open_run_directory(other, "finetune")
    assert len(caught.value.problems) == 2


def test_what_may_change_on_the_way_may_change_and_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    end(start(config("mine")))
    other = config("mine")
    other.optimizer.lr, other.parallelism.tp, other.training.micro_batch_size = 1.0, 2, 1
    end(start(other))
    told = capsys.readouterr().err
    assert "mine resumes with changed values: optimizer.lr: " in told
    assert "-> 1.0; parallelism.tp: 1 -> 2; training.micro_batch_size: " in told
    start(other)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("accepted", [["run.seed", "data.max_samples"], ["run.seed", "data"]])
def test_a_change_that_is_accepted_by_its_key_goes_on(accepted: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    end(start(config("mine")))
    other = config("mine")
    change_seed(other)
    change_data(other)
    other.run.accept_changes = accepted[:1]
    with pytest.raises(ConfigError, match=r"^data.max_samples=3: .*run.accept_changes=\[data.max_samples\]$"):
        open_run_directory(other, "finetune")
    other.run.accept_changes = accepted
    end(start(other))
    assert "data.max_samples: None -> 3; run.seed: 42 -> 7" in capsys.readouterr().err
    other.run.accept_changes = []
    start(other)  # accepted once: this is the run now


def test_a_checkpoint_of_elsewhere_is_compared_with_the_config_it_was_made_under(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = start(config("there"))
    stored = tmp_path / "step_3"
    stored.mkdir()
    made_under = (source.path / "config.yaml").read_text()
    (stored / "state.json").write_text(json.dumps({"step": 3, "extra": {}, "config": made_under}))
    other = config("here")
    other.run.resume = str(stored)
    change_batch(other)
    with pytest.raises(ConfigError, match=rf"training.global_batch_size=32: the run in run.resume={stored} began with"):
        open_run_directory(other, "finetune")
    assert not (tmp_path / "here").exists()
    other.run.accept_changes = ["training.global_batch_size"]
    start(other)
    assert f"run.resume={stored} resumes with changed values: training.global_batch_size: " in capsys.readouterr().err
    (stored / "state.json").write_text("{}")
    other.run.dir = "third"
    with pytest.raises(ConfigError, match=rf"run.resume={stored}: not a complete checkpoint: .*state.json"):
        open_run_directory(other, "finetune")


def test_adapters_are_evaluated_as_they_were_trained(tmp_path: Path) -> None:
    trained = config("there")
    trained.peft = PeftConfig(method="lora", alpha=8.0, rslora=True)
    stored = tmp_path / "step_3"
    stored.mkdir()
    text = (start(trained).path / "config.yaml").read_text()
    (stored / "state.json").write_text(json.dumps({"step": 3, "extra": {}, "config": text}))

    def evaluation(peft: PeftConfig) -> EvaluateConfig:
        cfg = EvaluateConfig(model=trained.model, data=DocsDataConfig(), peft=peft)
        cfg.evaluation.checkpoint = str(stored)
        return cfg

    with pytest.raises(ConfigError) as caught:
        open_run_directory(evaluation(PeftConfig(method="lora")), "evaluate")
    assert caught.value.problems == [
        f"peft.{key}={now}: evaluation.checkpoint={stored} was trained with {then}; set peft.{key}={then}"
        for key, now, then in (("alpha", 32.0, 8.0), ("rslora", False, True))
    ]
    open_run_directory(evaluation(replace(trained.peft, export="merged", dropout=0.5)), "evaluate")


def test_only_what_could_be_refused_can_be_accepted() -> None:
    with pytest.raises(ConfigError, match=r"run.accept_changes=\[optimizer.lr\]: may name run.seed, .*data"):
        RunConfig(accept_changes=["optimizer.lr", "data.path", "data"])


def test_starting_over_where_checkpoints_are_is_refused() -> None:
    directory = start(config("mine"))
    end(directory)
    again = config("mine")
    again.run.resume = "never"
    (directory.path / "checkpoints" / "step_5.tmp-0").mkdir(parents=True)
    end(start(copy.deepcopy(again)))
    (directory.path / "checkpoints" / "step_5").mkdir()
    with pytest.raises(ConfigError, match="run.resume=never: .* contains checkpoints"):
        open_run_directory(again, "finetune")


def test_a_run_of_another_recipe_is_refused_by_name() -> None:
    end(start(config("mine")))
    other = EvaluateConfig(model=config().model, data=DocsDataConfig())
    other.run.dir = "mine"
    with pytest.raises(ConfigError, match="contains a run of the recipe finetune, not evaluate"):
        open_run_directory(other, "evaluate")


def test_a_config_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text("lr: 3\n")
    with pytest.raises(ConfigError, match=r"its config.yaml does not fit this recipe \(lr=3: no such key"):
        open_run_directory(config("mine"), "finetune")


def test_a_file_that_is_no_config_is_quoted_in_part(tmp_path: Path) -> None:
    """A link to another file of the run, say: what is in it may be long, and have many lines."""
    (tmp_path / "mine").mkdir()
    other = {"step": 2, "config": "a line\n" * 500, "more": [1]}
    (tmp_path / "mine" / "config.yaml").write_text(yaml.safe_dump(other, sort_keys=False))
    with pytest.raises(ConfigError) as caught:
        open_run_directory(config("mine"), "finetune")
    (problem,) = caught.value.problems
    assert "its config.yaml does not fit this recipe (step=2: no such key" in problem
    assert "\n" not in problem
    assert len(problem) < 700


def test_files_that_are_no_run_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("x")
    with pytest.raises(ConfigError, match="contains files, but no run"):
        open_run_directory(config("thesis"), "finetune")
    assert os.listdir(tmp_path / "thesis") == ["chapter.tex"]


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_place_that_cannot_be_is_told(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=f"run.dir={tmp_path / place}: cannot be used"):
        open_run_directory(config(place), "finetune")


def test_a_directory_in_use_is_refused_by_name(tmp_path: Path) -> None:
    first = start(config("mine"))
    with pytest.raises(ConfigError, match=f"run.dir={tmp_path / 'mine'}: is in use"):
        open_run_directory(config("mine"), "finetune")
    end(first)
    start(config("mine"))


def test_what_a_start_would_refuse_is_told_by_a_look_that_makes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(cfg: FinetuneConfig, recipe: str = "finetune") -> str:
        before = sorted(tmp_path.rglob("*"))
        try:
            check_run_directory(cfg, recipe)
        except ConfigError as error:
            return str(error)
        finally:
            assert sorted(tmp_path.rglob("*")) == before
        return ""

    (tmp_path / "file").write_text("")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("x")
    assert (told(config()), told(config("new/one"))) == ("", "")
    assert "run.dir=" + str(tmp_path / "file/below") + ": cannot be used: File exists" in told(config("file/below"))
    assert "contains files, but no run" in told(config("thesis"))
    first = start(config("mine"))
    assert "is in use by a run that is still going" in told(config("mine"))
    end(first)
    assert told(config("mine")) == ""
    end(start(config("mine")))  # the look has let go of the lock
    other = config("mine")
    change_seed(other)
    assert f"run.seed=7: the run in run.dir={tmp_path / 'mine'} began with 42" in told(other)
    assert "contains a run of the recipe finetune" in told(config("mine"), "pretrain")
    other.run.dir, other.run.resume = "here", str(tmp_path / "thesis")
    assert f"run.resume={tmp_path / 'thesis'}: not a complete checkpoint" in told(other)
    assert capsys.readouterr().err == ""


def test_a_place_without_permission_is_told_by_a_look() -> None:
    with tempfile.TemporaryDirectory() as folder:  # of which others may see the way, unlike that of tmp_path
        Path(folder).chmod(0o555)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                if os.getuid() == 0:  # whom no mode keeps out
                    os.setuid(65534)
                check_run_directory(config(f"{folder}/run"), "finetune")
            except ConfigError as error:
                status = 0 if "cannot be used: Permission denied; choose another run.dir" in str(error) else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert os.listdir(folder) == []


def test_a_refused_start_frees_the_directory() -> None:
    end(start(config("mine")))
    other = config("mine")
    change_seed(other)
    with pytest.raises(ConfigError, match="run.seed"):
        open_run_directory(other, "finetune")
    start(config("mine"))


def test_a_refused_run_leaves_nothing(tmp_path: Path) -> None:
    for run_dir in (None, "a/b/c"):
        directory = start(config(run_dir))
        (directory.logs / "rank_1.log").write_text("said something")
        (directory.path / "metrics.jsonl").touch()
        directory.discard("no data")
    assert os.listdir(tmp_path) == []


def test_a_refused_run_leaves_what_was_there_before(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    start(config("mine")).discard("no data")
    assert os.listdir(tmp_path / "mine") == []
    (tmp_path / "outputs" / "finetune" / "earlier").mkdir(parents=True)
    start(config()).discard("no data")
    assert os.listdir(tmp_path / "outputs" / "finetune") == ["earlier"]


def test_a_refused_run_leaves_what_the_recipe_made() -> None:
    directory = start(config("mine"))
    (directory.path / "export").mkdir()
    directory.discard("no data")
    assert json.loads((directory.path / "result.json").read_text()) == {"status": "invalid", "error": "no data"}
    assert (directory.path / "config.yaml").exists()


def test_a_run_that_went_on_is_not_taken_back() -> None:
    end(start(config("mine")))
    directory = start(config("mine"))
    directory.discard("no data")
    assert (directory.path / "config.yaml").exists()
    assert json.loads((directory.path / "result.json").read_text())["status"] == "invalid"


def test_modes_under_our_umask() -> None:
    before = os.umask(0o077)
    try:
        directory = start(config())
    finally:
        os.umask(before)
    for entry in [directory.path, *directory.path.rglob("*")]:
        if not entry.is_symlink():
            assert stat.S_IMODE(entry.stat().st_mode) == (0o700 if entry.is_dir() else 0o600), entry


def test_the_record_tells_versions_git_and_command_but_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    monkeypatch.setattr("sys.argv", ["recipes/finetune.py", "run.name=a b"])
    record = start_record("finetune", Path(__file__), 2, 1)
    assert "hf_canary" not in json.dumps(record)
    assert record["versions"]["omegaconf"].startswith("2.3")
    assert record["versions"]["torch"]
    assert (record["recipe"], record["processes"], record["attempt"]) == ("finetune", 2, 1)
    assert record["command"] == f"{sys.executable} recipes/finetune.py 'run.name=a b'"
    assert record["git"] is None or len(record["git"]["commit"]) == 40


def test_a_recipe_outside_any_repository_has_no_git(tmp_path: Path) -> None:
    assert start_record("finetune", tmp_path / "recipe.py", 1, 0)["git"] is None


def slurm_says(folder: Path, **answers: str) -> str:
    """Write commands of Slurm's that answer like this, and return their folder."""
    folder.mkdir(exist_ok=True)
    for name, answer in answers.items():
        (folder / name).write_text(f"#!/bin/sh\n{answer}\n")
        (folder / name).chmod(0o755)
    return str(folder)


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "LAUNCH_FAILED", "OF_A_LATER_SLURM"])
def test_a_directory_whose_job_has_not_ended_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    directory = start(config("mine"))
    end(directory)
    (directory.path / "job_id").write_text("17\n")
    monkeypatch.setenv("PATH", slurm_says(tmp_path / "bin", squeue=f"echo 17 {state}"))
    with pytest.raises(ConfigError, match=f"belongs to job 17, which is {state}; choose another run.dir, or end"):
        open_run_directory(config("mine"), "finetune")
    with pytest.raises(ConfigError, match=f"which is {state}; wait for it to finish, or end"), held(directory.path):
        pass


@pytest.mark.parametrize(
    "answers",
    [{"squeue": "echo 17 COMPLETED"}, {"squeue": "exit 1", "scontrol": "[ $1 = ping ] && echo Slurmctld is UP"}],
    ids=["ended", "forgotten"],
)
def test_a_directory_whose_job_has_ended_goes_on_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answers: dict[str, str]
) -> None:
    directory = start(config("mine"))
    end(directory)
    (directory.path / "job_id").write_text("17\n")
    monkeypatch.setenv("PATH", slurm_says(tmp_path / "bin", **answers))
    with held(directory.path):
        pass
    end(start(config("mine")))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("answers", [{}, {"squeue": "exit 1", "scontrol": "exit 1"}], ids=["laptop", "no controller"])
def test_a_job_that_nobody_can_ask_about_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answers: dict[str, str]
) -> None:
    """A start may be all right, as a person knows; what cannot be taken back is refused."""
    monkeypatch.setenv("PATH", slurm_says(tmp_path / "bin", **answers))
    directory = start(config("mine"))
    end(directory)
    end(start(config("mine")))
    assert capsys.readouterr().err == ""  # no job, nothing to tell
    (directory.path / "job_id").write_text("17\n")
    end(start(config("mine")))
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1
    assert f"{directory.path}: belongs to job 17, which may still run: there is no squeue on PATH" in told
    assert "do not start this run twice at once" in told
    with (
        pytest.raises(ConfigError, match="job 17, which may still run.*remove .*job_id if the job has"),
        held(directory.path),
    ):
        pass
