"""Expansion of a command line with -m into sweep points, and their names and commands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from components.config.compose.sweep import SweepRequest, compose_point, expand_sweep, override_of
from components.config.compose.sweep_keys import Goal, _known_goal
from components.config.schema import FinetuneConfig
from components.config.schema.data import MixtureDataConfig
from components.launch.sweep.plan import (
    Point,
    PointRecord,
    Sweep,
    is_running,
    locked,
    new_directory,
    point_name,
    read_record,
    read_sweep,
    write_record,
)
from components.launch.sweep.points import point_command, retry
from components.protocol.errors import ConfigError


def expanded(*arguments: str) -> SweepRequest:
    return expand_sweep("finetune", FinetuneConfig, Path("/nowhere"), ["-m", *arguments])


def test_points_are_the_product_in_command_line_order() -> None:
    sweep = expanded("model=tiny", "parallelism=ddp,fsdp2", "run.name='a b'", "run.seed=range(1,3)")
    assert [point.overrides for point in sweep.points] == [
        ("model=tiny", f"parallelism={option}", "run.name='a b'", f"run.seed={seed}")
        for option in ("ddp", "fsdp2")
        for seed in (1, 2)
    ]
    assert sweep.points[3].values == {"parallelism": "fsdp2", "run.seed": "2"}
    sweep = expanded("parallelism=glob([tp*,pp4*],exclude=tp3)", "optimizer.lr=log(1e-4,1e-2,3)")
    assert [tuple(point.values.values()) for point in sweep.points] == [
        (option, lr) for option in ("pp4_1f1b", "tp2", "tp4") for lr in ("0.0001", "0.001", "0.01")
    ]


def test_run_dir_of_the_sweep_is_not_an_override_of_its_points(tmp_path: Path) -> None:
    sweep = expanded(f"run.dir={tmp_path}/here", "run.seed=1,2", "--config-dir", str(tmp_path))
    assert [point.overrides for point in sweep.points] == [("run.seed=1",), ("run.seed=2",)]
    assert sweep.options == ("--config-dir", str(tmp_path))
    cfg, problems = compose_point(sweep, sweep.points[1], lambda cfg, rejected: [])
    assert cfg is not None
    assert (cfg.run.dir, cfg.run.seed, problems) == (f"{tmp_path}/here", 2, [])


@pytest.mark.parametrize(
    ("override", "values"),
    [
        ("optimizer.lr=log(1e-5,1e-3,5)", ["1e-05", "3.1623e-05", "0.0001", "0.00031623", "0.001"]),
        ("optimizer.lr=log(1e-3, 1e-5, 3)", ["0.001", "0.0001", "1e-05"]),
        ("optimizer.lr=lin(1e-4,4e-4,4)", ["0.0001", "0.0002", "0.0003", "0.0004"]),
        ("training.global_batch_size=lin(8,32,4)", ["8", "16", "24", "32"]),  # whole numbers
        ("training.max_steps=log(1,1000000,3)", ["1", "1000", "1000000"]),
    ],
)
def test_spaced_values(override: str, values: list[str]) -> None:
    sweep = expanded("model=tiny", override)
    assert [list(point.values.values()) for point in sweep.points] == [[value] for value in values]
    assert all(compose_point(sweep, point, lambda cfg, rejected: [])[0] is not None for point in sweep.points)


def drawn_values(*arguments: str) -> list[dict[str, str]]:
    return [point.values for point in expanded(*arguments).points]


def test_draws_are_random_values_of_each_key() -> None:
    command = ("sweep.draws=400", "optimizer.lr=loguniform(1e-5,1e-1)", "training.global_batch_size=choice(8,16,32)")
    points = drawn_values(*command)
    rates = [float(point["optimizer.lr"]) for point in points]
    assert 1e-5 <= min(rates) < max(rates) <= 1e-1
    assert 0.4 < sum(rate < 1e-3 for rate in rates) / 400 < 0.6  # half of the values are below the geometric mean
    sizes = [point["training.global_batch_size"] for point in points]
    assert {size: sizes.count(size) > 100 for size in sizes} == {"8": True, "16": True, "32": True}
    evenly = [float(each["optimizer.lr"]) for each in drawn_values(command[0], "optimizer.lr=uniform(0,1)")]
    assert 0.4 < sum(rate < 0.5 for rate in evenly) / 400 < 0.6
    assert drawn_values(*command) == points
    assert drawn_values(*command, "sweep.seed=1") != points


def test_draws_of_a_whole_number_key_are_whole_numbers() -> None:
    command = ("training.max_steps=uniform(10,12)", "training.global_batch_size=loguniform(1,1e2)", "sweep.draws=200")
    points = drawn_values(*command)
    assert {point["training.max_steps"] for point in points} == {"10", "11", "12"}
    sizes = [int(point["training.global_batch_size"]) for point in points]
    assert 1 <= min(sizes) < max(sizes) <= 100
    assert 0.4 < sum(size < 10 for size in sizes) / 200 < 0.6
    with pytest.raises(ConfigError) as caught:
        expanded("training.max_steps=uniform(1.5,9)", "sweep.draws=2")
    assert caught.value.problems[0] == (
        "training.max_steps=uniform(1.5,9): write uniform(LOW,HIGH) with whole numbers, LOW less than HIGH"
    )


def test_values_of_a_key_do_not_depend_on_the_other_keys() -> None:
    alone = drawn_values("sweep.draws=5", "optimizer.lr=uniform(0,1)")
    both = drawn_values("sweep.draws=5", "optimizer.weight_decay=uniform(0,1)", "optimizer.lr=uniform(0,1)")
    assert [point["optimizer.lr"] for point in both] == [point["optimizer.lr"] for point in alone]
    assert all(point["optimizer.lr"] != point["optimizer.weight_decay"] for point in both)


def test_draws_of_listed_values_are_different_points_of_the_grid() -> None:
    grid = ("parallelism=ddp,fsdp2", "run.seed=range(0,3)")
    product = [tuple(point.items()) for point in drawn_values(*grid)]
    drawn = [tuple(point.items()) for point in drawn_values(*grid, "sweep.draws=6")]
    assert sorted(drawn) == sorted(product)
    assert drawn != product


def test_keys_of_the_sweep_are_not_overrides_of_its_points() -> None:
    sweep = expanded("sweep.metric=score", "run.seed=1,2", "sweep.goal=max")
    assert [point.overrides for point in sweep.points] == [("run.seed=1",), ("run.seed=2",)]
    assert (sweep.keys.metric, sweep.keys.direction) == ("score", Goal.max)


@pytest.mark.parametrize(
    ("metric", "goal"),
    [
        *(("eval_loss", "min"), ("loss", "min"), ("wall_seconds", "min"), ("peak_memory_bytes", "min")),
        *(("tokens_per_second", "max"), ("mfu", "max"), ("eval_log_prob_accuracy", "max"), ("lossless", None)),
    ],
)
def test_goal_is_inferred_from_the_name_of_a_metric(metric: str, goal: str | None) -> None:
    assert _known_goal(metric) == goal


def test_free_form_keys_and_lists_can_be_swept() -> None:
    sweep = expanded("model=tiny", "model.config.hidden_size=64,128", "generation.prompts=[a,b],[c]")
    configs = [compose_point(sweep, point, lambda cfg, rejected: [])[0] for point in sweep.points]
    found = [(cfg.model.config["hidden_size"], cfg.generation.prompts) for cfg in configs if cfg]
    assert found == [(size, prompts) for size in (64, 128) for prompts in (["a", "b"], ["c"])]


def test_one_source_of_a_mixture_can_be_swept() -> None:
    sources = ("+data@data.sources.a=pydocs,gsm8k", "+data@data.sources.b=pydocs", "data.sources.a.weight=2")
    sweep = expanded("model=tiny", "data=mixture", *sources)
    kinds = []
    for point in sweep.points:
        cfg, _ = compose_point(sweep, point, lambda cfg, rejected: [])
        assert cfg is not None
        assert isinstance(cfg.data, MixtureDataConfig)
        assert [source.weight for source in cfg.data.sources.values()] == [2, None]
        kinds.append([str(source.kind) for source in cfg.data.sources.values()])
    assert kinds == [["docs", "docs"], ["sft", "docs"]]
    assert [point.values for point in sweep.points] == [{"data@data.sources.a": name} for name in ("pydocs", "gsm8k")]


def test_invalid_value_is_a_point_problem_and_unknown_option_raises() -> None:
    sweep = expanded("model=tiny", "training.seq_len=0,64", "parallelism=ddp,fdsp2")
    found = {}
    for point in sweep.points:
        try:
            found[point.overrides[1:]] = compose_point(sweep, point, lambda cfg, rejected: ["and this"])[1]
        except ConfigError as error:
            found[point.overrides[1:]] = ["error: " + problem.partition(" (there")[0] for problem in error.problems]
    error_line = "error: parallelism=fdsp2: no such option; did you mean fsdp2?"
    (problem_text,) = found["training.seq_len=0", "parallelism=ddp"][:1]
    assert problem_text.startswith("training.seq_len=0: must be at least 2")
    assert found["training.seq_len=64", "parallelism=ddp"] == ["and this"]
    assert found["training.seq_len=64", "parallelism=fdsp2"][0] == error_line


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"parallelism": "fsdp2_tp2"}, "3_fsdp2_tp2"),
        ({"parallelism": "ddp", "optimizer.lr": "1e-4"}, "3_ddp_1e-4"),
        ({"run.name": "'../a b/$(c)'"}, "3_a-b-c"),
        ({"run.name": "'übung'"}, "3_bung"),
        ({"run.name": "'..'"}, "3"),
        ({}, "3"),
        ({"run.name": "x" * 99}, "3_" + "x" * 46),
    ],
)
def test_point_names_are_valid_file_names(values: dict[str, str], name: str) -> None:
    assert point_name(3, values) == name


@pytest.mark.parametrize("text", ["plain", "it's", 'a "b"', "a\\b", "back\\'slash", "a=b,c", "x y", "[1]", "{}"])
def test_quoted_override_round_trips(text: str) -> None:
    sweep = expanded("model=tiny", override_of("run.name", text), "run.seed=1,2")
    cfg, _ = compose_point(sweep, sweep.points[0], lambda cfg, rejected: [])
    assert cfg is not None
    assert cfg.run.name == text


def write_sweep(directory: Path) -> Sweep:
    directory.mkdir(exist_ok=True)
    points = [Point(n, f"{n}_{n}", {"run.seed": str(n)}, [f"run.seed={n}"], "tp=2", 2) for n in range(2)]
    sweep = Sweep(directory, "id", "finetune", Path("/r.py"), Path("/"), "python r.py", ["-x"], ["run.seed"], points)
    sweep.write()
    return sweep


def test_sweep_can_be_read_after_its_folder_moved(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "a")
    write_record(sweep, sweep.points[1], PointRecord(5.0, 1, 2.5, "boom", True))
    (tmp_path / "a").rename(tmp_path / "b")
    reread = read_sweep(tmp_path / "b")
    assert reread.run_dir(reread.points[1]) == tmp_path / "b" / "1_1"
    assert [point.overrides for point in reread.points] == [["run.seed=0"], ["run.seed=1"]]
    assert read_record(reread, reread.points[1]) == PointRecord(5.0, 1, 2.5, "boom", True)
    assert read_record(reread, reread.points[0]) is None
    assert point_command(reread, reread.points[0])[1:] == ["/r.py", "-x", "run.seed=0", f"run.dir='{tmp_path}/b/0_0'"]


def test_folder_without_a_sweep_is_rejected(tmp_path: Path) -> None:
    for content in (None, "[]"):
        if content:
            (tmp_path / "sweep.json").write_text(content)
        with pytest.raises(ConfigError, match=r"is not the folder of a sweep"):
            read_sweep(tmp_path)


def test_new_sweep_rejects_a_folder_with_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--retry"):
        new_directory("finetune", str(write_sweep(tmp_path / "a").directory))
    path, identity = new_directory("finetune", str(tmp_path / "new"))
    assert path == tmp_path / "new"
    assert identity.startswith("new-")
    path.mkdir()
    with locked(path):  # as another command does that has not written sweep.json yet
        assert new_directory("finetune", str(path))[0] == path


def test_retry_of_a_sweep_with_missing_paths_is_rejected_without_changes(tmp_path: Path) -> None:
    sweep = replace(write_sweep(tmp_path / "a"), folder=tmp_path / "gone")
    before = sorted(sweep.directory.rglob("*"))
    with pytest.raises(ConfigError) as caught:
        retry(sweep, [], sweep)
    plan = sweep.directory / "sweep.json"
    assert [problem.partition("; ")[0] for problem in caught.value.problems] == [
        f"{plan}: file=/r.py: the sweep's recipe does not exist here",
        f"{plan}: folder={tmp_path}/gone: the sweep's working directory does not exist here",
    ]
    assert sorted(sweep.directory.rglob("*")) == before


def test_second_process_cannot_lock_a_running_sweep(tmp_path: Path) -> None:
    assert not is_running(tmp_path)
    with locked(tmp_path):
        assert is_running(tmp_path)
        with pytest.raises(ConfigError, match=r"still running"), locked(tmp_path):
            pass
    assert not is_running(tmp_path)
    (tmp_path / ".lock").unlink()
    (tmp_path / ".lock").mkdir()
    with pytest.raises(ConfigError, match=r"cannot be written: Is a directory"), locked(tmp_path):
        pass
