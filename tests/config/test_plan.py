"""scripts/plan.py, and the memory check of a launch: commands that import no torch."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from components.config.schema.model import CausalLMConfig, WeightInit
from components.config.schema.parallelism import AXES
from components.models.build import load_config
from components.planning.formulas.workload import BYTE_VOCABULARY
from tests.config.commands import REPOSITORY, Commands
from tests.frozen import frozen

PLAN, FINETUNE = REPOSITORY / "scripts" / "plan.py", REPOSITORY / "recipes" / "finetune.py"
LLAMA_8B = ["model=llama3_1_8b", "cluster=slurm_8node", "cluster.gpu=h100_80", "training.global_batch_size=128"]
LONG = ["training.seq_len=8192"]
TINY = ["model=tiny", "cluster=local_4proc", "cluster.device=cpu", "training.seq_len=128"]


def rows(commands: Commands, arguments: list[str], cwd: Path) -> list[dict]:
    """Plan and return the rows; the command must succeed without torch."""
    ended = commands.run(PLAN, [*arguments, "--json"], cwd)
    assert ended.status == 0, ended.errors
    assert not ended.imported_torch
    return json.loads(ended.output)["rows"]


def test_the_table_ranks_meshes_and_ends_with_a_command(commands: Commands, tmp_path: Path) -> None:
    ended = commands.run(PLAN, [*LLAMA_8B, *LONG], tmp_path)
    assert ended.status == 0, ended.errors
    assert not ended.imported_torch
    lines = ended.output.splitlines()
    assert lines[0].startswith("8.03B parameters, 1,048,576 tokens per step (128 rows of 8,192), on 64 x h100_80")
    command = ended.output.partition("row 1:\n")[2]
    assert command.strip().startswith("python recipes/finetune.py model=llama3_1_8b cluster=slurm_8node")
    special = "run.name='a b'"  # quoted for a shell
    command = commands.run(PLAN, [*TINY, special], tmp_path).output.partition("row 1:\n")[2]
    assert special in shlex.split(command.replace("\\\n", " "))
    assert re.findall(r"^(\d)\S* +(?:d|p|t).*%$", ended.output, re.M) == [str(number) for number in range(1, 9)]


@pytest.mark.parametrize("options", [[], ["--why", "5"], ["--left-out"]], ids=str)
def test_the_output_fits_the_terminal(commands: Commands, tmp_path: Path, options: list[str]) -> None:
    """A wide terminal has a row's terms on its line; others lose no word but their header."""
    arguments = ["model=llama3_1_8b", "cluster=slurm_1node", "cluster.gpu=h100_80", *options]
    whole, *narrow = (commands.run(PLAN, arguments, tmp_path, COLUMNS=each).output for each in ("400", "80", "60"))
    assert options or re.search(r"^1 .*% +matmuls \d+%", whole, re.M)
    for width, text in zip((80, 60), narrow, strict=True):
        assert max(map(len, text.splitlines())) <= width
        lost = Counter(whole.split()) - Counter(text.replace("\\\n", " ").split())
        assert set(lost) <= {"largest", "terms"}


def test_rows_within_the_error_of_the_estimates_are_marked_as_equal(commands: Commands, tmp_path: Path) -> None:
    arguments = ["model=llama3_1_8b", "cluster=slurm_1node", "cluster.gpu=h100_80", *LONG, "--top", "60"]
    seconds = [row["step_seconds"] for row in rows(commands, arguments, tmp_path)]
    marks = re.findall(r"^(\d+)(?:=(\d+))? .*%$", commands.run(PLAN, arguments, tmp_path).output, re.M)
    assert [int(row) for row, _ in marks] == list(range(1, len(seconds) + 1))
    firsts = [number for number, (_, first) in enumerate(marks) if not first]
    assert 2 <= len(firsts) < len(seconds)
    for number, (_, first) in enumerate(marks):
        leader = int(first or number + 1) - 1
        assert leader == max(each for each in firsts if each <= number)
        assert seconds[number] <= 1.11 * seconds[leader]
    assert all(seconds[later] > 1.11 * seconds[earlier] for earlier, later in itertools.pairwise(firsts))


@pytest.mark.parametrize(
    ("arguments", "warned"),
    [
        (["model=llama3_1_8b", "cluster=slurm_1node", "cluster.gpu=h100_80"], ["seq_len", "global_batch_size"]),
        (["model=tiny", "cluster=slurm_8node", "cluster.gpu=h100_80", "training.seq_len=256"], ["global_batch_size"]),
        (["experiment=llama3_1_8b_1node"], []),
        (TINY[:3], []),
    ],
)  # fmt: skip
def test_sizes_that_nobody_set_are_warned_about(
    commands: Commands, tmp_path: Path, arguments: list[str], warned: list[str]
) -> None:
    ended = commands.run(PLAN, [*arguments, "--top", "1"], tmp_path, COLUMNS="400")
    assert ended.status == 0, ended.errors
    warnings = [line for line in ended.output.splitlines() if line.startswith("warning: ")]
    assert [next(key for key in ("seq_len=", "global_batch_size=") if key in line)[:-1] for line in warnings] == warned
    proposed = [line.rpartition(" ")[2] for line in warnings]  # what ends the warning, sets the key
    assert warned == [] or "warning: " not in commands.run(PLAN, [*arguments, *proposed, "--json"], tmp_path).errors


def test_a_plan_without_the_kernels_of_linear_attention_says_so(commands: Commands, tmp_path: Path) -> None:
    arguments = ["model=qwen3_5_9b", "cluster=slurm_1node", *LONG, "--top", "1"]
    on_gpus = [*arguments, "cluster.gpu=h100_80"]
    plain = commands.run(PLAN, on_gpus, tmp_path, COLUMNS="400").output
    assert plain.startswith("warning: flash-linear-attention is not installed here, so this plan counts plain PyTorch")
    assert "warning: " not in commands.run(PLAN, [*arguments, "cluster.gpu=cpu"], tmp_path).output
    (row,) = rows(commands, on_gpus, tmp_path)
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").touch()
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    command = [sys.executable, str(PLAN), *on_gpus, "--json"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "warning: " not in done.stderr
    assert json.loads(done.stdout)["rows"][0]["step_seconds"] < 0.95 * row["step_seconds"]


def test_documented_plans_are_for_stated_sizes() -> None:
    files = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md"), *(REPOSITORY / "scripts").glob("*.py"),
             *(REPOSITORY / "meshbook").glob("*.py"), *(REPOSITORY / "recipes").glob("*.py")]  # fmt: skip
    planned = r"(?:plan\.py|meshbook plan|parallelism=auto|parallelism=plan:|cluster\.dry_run=plan)\b"
    start = r"^[ $]*(?:python|meshbook) "
    found = [
        command
        for file in files
        for command in re.findall(rf"{start}(?:.*\\\n)*.*$", file.read_text(), re.M)
        if re.search(planned, command) and "model=tiny" not in command
    ]
    assert len(found) >= 8
    stated = r"experiment=|training\.seq_len=\d{4}|--help|--measure"
    assert [each for each in found if not re.search(stated, each)] == []


def test_the_reader_of_the_table_may_close_it(tmp_path: Path) -> None:
    command = [sys.executable, str(PLAN), *TINY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path) as planned:
        assert planned.stdout
        planned.stdout.close()
        assert planned.stderr
        assert planned.stderr.read() == b""
    assert planned.returncode == 128 + signal.SIGPIPE


def test_rows_are_distinct_fit_and_are_sorted_by_time(commands: Commands, tmp_path: Path) -> None:
    found = rows(commands, [*LLAMA_8B, *LONG, "--top", "40"], tmp_path)
    meshes = [json.dumps([row["mesh"], row["strategy"], row["pp_schedule"]]) for row in found]
    assert len(found) == len(set(meshes)) == 40
    assert [row["step_seconds"] for row in found] == sorted(row["step_seconds"] for row in found)
    for row in found:
        world = 1
        for axis in AXES:
            world *= row["mesh"][axis]
        assert world == 64
        assert row["peak_memory_bytes"] == pytest.approx(sum(term["value"] for term in row["memory"]), abs=1)
        assert row["peak_memory_bytes"] < 85e9
        assert row["step_seconds"] == pytest.approx(sum(term["value"] for term in row["time"]))
        assert all(term["formula"] for term in row["memory"] + row["time"])


def test_every_command_that_is_proposed_starts(commands: Commands, tmp_path: Path) -> None:
    found = rows(commands, [*TINY, "training.global_batch_size=16", "--top", "100"], tmp_path)
    assert {row["strategy"] for row in found} >= {"fsdp2", "ddp"}
    assert {axis for row in found for axis in AXES if row["mesh"][axis] > 1} >= {"pp", "dp_shard", "tp"}
    for row in found[:: max(1, len(found) // 8)]:
        _, recipe, *overrides = shlex.split(row["command"])
        ended = commands.run(REPOSITORY / recipe, [*overrides, "cluster.dry_run=true"], tmp_path)
        assert ended.status == 0, (row["command"], ended.errors)
        for axis in AXES:
            assert f"{axis}={row['mesh'][axis]}" in ended.errors + ended.output


def test_what_the_command_line_sets_is_kept(commands: Commands, tmp_path: Path) -> None:
    fixed = ["parallelism.tp=4", "parallelism.activation_checkpointing=full", "training.micro_batch_size=1"]
    for row in rows(commands, [*LLAMA_8B, *LONG, *fixed], tmp_path):
        assert (row["mesh"]["tp"], row["activation_checkpointing"], row["micro_batch_size"]) == (4, "full", 1)
    found = rows(commands, [*LLAMA_8B, *LONG, "parallelism=fsdp2_tp4"], tmp_path)
    assert {json.dumps(row["mesh"]) for row in found} == {
        json.dumps({"pp": 1, "dp_replicate": 1, "dp_shard": 16, "ep": 1, "cp": 1, "tp": 4})
    }


def test_eager_attention_has_no_cp_and_counts_its_scores(commands: Commands, tmp_path: Path) -> None:
    """Probabilities, float32 and bfloat16, of 32 layers of 32 heads: twice the row, four times the bytes per row."""
    fixed = ["model.attention=eager", "parallelism.dp_shard=64", "training.micro_batch_size=1",
             "parallelism.activation_checkpointing=none", "cluster.gpu=b200"]  # fmt: skip
    for tokens in (2048, 4096):
        found = rows(commands, [*LLAMA_8B, f"training.seq_len={tokens}", *fixed], tmp_path)
        saved = next(term["value"] for term in found[0]["memory"] if term["name"] == "activations")
        assert saved > 32 * 32 * tokens**2 * 6
    free = [*LLAMA_8B, "training.seq_len=16384", "model.attention=eager", "cluster.gpu=b200"]
    assert {row["mesh"]["cp"] for row in rows(commands, [*free, "--top", "40"], tmp_path)} == {1}


def test_qlora_has_no_tp_that_splits_a_quantized_block(commands: Commands, tmp_path: Path) -> None:
    """The MLPs of Gemma 3 1B have 6,912 features, 108 blocks of 64."""
    overrides = ["model=gemma3_1b", "cluster=slurm_1node", "cluster.gpu=h100_80", "peft=qlora", "optimizer.lr=1e-3"]
    assert {row["mesh"]["tp"] for row in rows(commands, [*overrides, "--top", "200"], tmp_path)} == {1, 2, 4}


def test_sequence_parallelism_of_an_experiment_excludes_no_mesh(commands: Commands, tmp_path: Path) -> None:
    """The mesh of an experiment is not fixed, and its sequence parallelism needs tp, which ddp does not have."""
    overrides = [*TINY, "experiment=llama3_1_8b_1node", "cluster.gpu=null", "training.global_batch_size=16"]
    found = rows(commands, [*overrides, "--top", "100"], tmp_path)
    assert {row["strategy"] for row in found} >= {"fsdp2", "ddp"}


def test_terms_and_reasons_are_printed_on_demand(commands: Commands, tmp_path: Path) -> None:
    why = commands.run(PLAN, [*LLAMA_8B, *LONG, "--why", "2"], tmp_path)
    assert why.status == 0
    for text in ("row 2: ", "parameters", "optimizer", "activations", "matmuls", "h100_80: matmul_share"):
        assert text in why.output
    left_out = commands.run(PLAN, [*LLAMA_8B, *LONG, "--left-out"], tmp_path)
    assert "parallelism.tp > 8: its collectives, four per layer, would cross nodes" in left_out.output
    assert "needs more than" in left_out.output


def test_a_row_is_drawn_as_a_picture(commands: Commands, tmp_path: Path) -> None:
    arguments = [*LLAMA_8B, *LONG, "parallelism.tp=4", "parallelism.pp=2"]
    ended = commands.run(PLAN, [*arguments, "--draw", "mesh.svg", "--why", "2"], tmp_path)
    assert ended.status == 0, ended.errors
    assert not ended.imported_torch
    root = ElementTree.parse(tmp_path / "mesh.svg").getroot()
    ranks = [each.get("data-rank") for each in root.iter() if "data-rank" in each.attrib]
    assert ranks == [str(rank) for rank in range(64)]
    assert sum(each.get("data-group") == "tp" for each in root.iter()) == 3
    row = rows(commands, arguments, tmp_path)[1]
    bars = [each for each in root.iter() if each.get("data-bar") == "Memory of the fullest rank"]
    drawn = {each.get("data-term"): float(each.get("data-value", "nan")) for each in bars}
    assert drawn == pytest.approx({term["name"]: term["value"] for term in row["memory"]}, rel=1e-4)
    # The bubble below the schedule is that of the bar: the idle time of the slowest rank, a share of the whole step.
    idle = next(term["value"] for term in row["time"] if term["name"] == "pipeline bubble") / row["step_seconds"]
    texts = " ".join("".join(each.itertext()) for each in root.iter() if each.tag.endswith("text"))
    assert re.findall(r"pipeline bubble.*?(\d+)%", texts) == [f"{100 * idle:.0f}"] * 2
    assert commands.run(PLAN, [*arguments, "--draw", "mesh.svg"], tmp_path).status == 0, "its own picture is replaced"
    (tmp_path / "mine.svg").write_text("<svg/>")
    refused = commands.run(PLAN, [*arguments, "--draw", "mine.svg"], tmp_path)
    assert "--draw mine.svg: exists and is no picture of a mesh" in refused.errors
    refused = commands.run(PLAN, [*arguments, "--draw", "nowhere/mesh.svg"], tmp_path)
    assert refused.status == 2
    assert "--draw nowhere/mesh.svg: cannot be written: No such file or directory" in refused.errors
    assert "Traceback" not in refused.errors


def test_the_vocabulary_of_the_byte_tokenizer_is_that_of_a_built_model() -> None:
    model = CausalLMConfig(path=None, init=WeightInit.random, tokenizer="bytes", config={"model_type": "llama"})
    assert load_config(model).vocab_size == BYTE_VOCABULARY


LAUNCH = ["model=tiny", "cluster=local_2proc", "cluster.device=cpu", "cluster.dry_run=true", "cluster.gpu=small"]
LARGE = ["training.global_batch_size=512", "training.micro_batch_size=256", "training.seq_len=2048"]


@pytest.fixture
def small_device(tmp_path: Path) -> Path:
    """Return a folder in which cluster.gpu=small has 2.6 GB."""
    folder = tmp_path / "conf" / "local" / "gpu"
    folder.mkdir(parents=True)
    text = (REPOSITORY / "conf" / "gpu" / "l40s.yaml").read_text().splitlines()
    lines = ["memory_bytes: 2.6e+9" if line.startswith("memory_bytes") else line for line in text]
    (folder / "small.yaml").write_text("\n".join(lines))
    return tmp_path


def test_a_launch_reports_memory_that_exceeds_the_device(commands: Commands, small_device: Path) -> None:
    fits = commands.run(FINETUNE, LAUNCH, small_device)
    assert (fits.status, fits.imported_torch) == (0, False)
    assert "memory: the fullest rank needs about" in fits.output + fits.errors

    large = commands.run(FINETUNE, [*LAUNCH, *LARGE], small_device)
    assert large.status == 0
    report = large.output + large.errors
    assert "warning: cluster.gpu=small: the fullest rank needs about" in report
    assert "most for activations" in report
    assert "training.micro_batch_size=" in report
    changed = report.partition("training.micro_batch_size=")[2].split()[0]
    again = commands.run(FINETUNE, [*LAUNCH, *LARGE, f"training.micro_batch_size={changed}"], small_device)
    assert "memory: the fullest rank needs about" in again.output + again.errors

    # auto recomputes as much as the device requires, so it is not reported as too large.
    medium = [*LAUNCH, *LARGE, "training.micro_batch_size=64"]
    assert "warning: " in commands.run(FINETUNE, medium, small_device).output
    auto = commands.run(FINETUNE, [*medium, "parallelism.activation_checkpointing=auto"], small_device)
    assert "memory: the fullest rank needs about" in auto.output

    refused = commands.run(FINETUNE, [*LAUNCH, *LARGE, "cluster.memory_check=refuse"], small_device)
    assert refused.status == 2
    assert "or set cluster.memory_check=report" in refused.errors
    off = commands.run(FINETUNE, [*LAUNCH, *LARGE, "cluster.memory_check=off"], small_device)
    assert "memory:" not in off.output + off.errors
    assert off.status == 0


AUTO = ["model=tiny", "cluster=local_4proc", "cluster.device=cpu", "cluster.dry_run=true"]


def test_parallelism_auto_is_the_first_row_of_the_plan(commands: Commands, tmp_path: Path) -> None:
    first = rows(commands, AUTO, tmp_path)[0]
    ended = commands.run(FINETUNE, [*AUTO, "parallelism=auto"], tmp_path)
    assert (ended.status, ended.imported_torch) == (0, False), ended.errors
    assert ended.errors.startswith("parallelism=auto: ")
    for axis in AXES:
        assert f"{axis}={first['mesh'][axis]}" in ended.output + ended.errors
    # The rest of the command line is kept, and degrees that it sets are not chosen.
    set_by_hand = commands.run(FINETUNE, [*AUTO, "parallelism=auto", "parallelism.tp=2", "parallelism.pp=2"], tmp_path)
    assert "pp=2 x dp_replicate=1 x dp_shard=1 x ep=1 x cp=1 x tp=2" in set_by_hand.output + set_by_hand.errors
    printed = commands.run(FINETUNE, [*AUTO, "parallelism=auto", "--cfg", "job"], tmp_path)
    assert printed.status == 0
    assert f"  dp_shard: {first['mesh']['dp_shard']}\n" in printed.output


def test_a_run_that_resumes_keeps_the_mesh_of_parallelism_auto(commands: Commands, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    began = commands.run(FINETUNE, [*AUTO, "parallelism=fsdp2_tp2", "parallelism.dp_shard=2", "--cfg", "job"], tmp_path)
    folder.mkdir()
    folder.joinpath("config.yaml").write_text(frozen(began.output.replace("${unless_epochs:40}", "40")))
    resumed = commands.run(FINETUNE, [*AUTO, "parallelism=auto", f"run.dir={folder}"], tmp_path)
    assert "parallelism=auto: keeps dp_shard2_tp2, as " in resumed.errors
    on_two = [each.replace("local_4proc", "local_2proc") for each in AUTO]
    other = commands.run(FINETUNE, [*on_two, "parallelism=auto", f"run.dir={folder}"], tmp_path)
    assert "auto: keeps" not in other.errors


def test_a_command_without_a_device_imports_no_planner() -> None:
    code = "import sys, components.launch.open_run; print([name for name in sys.modules if 'planning' in name])"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
                          ).stdout.strip() == "[]"  # fmt: skip


def test_a_sweep_takes_the_best_meshes(commands: Commands, tmp_path: Path) -> None:
    best = rows(commands, AUTO, tmp_path)[:3]
    arguments = ["-m", *AUTO, "parallelism=plan:3", "optimizer.lr=1e-4,1e-3"]
    ended = commands.run(FINETUNE, arguments, tmp_path)
    assert (ended.status, ended.imported_torch) == (0, False), ended.errors
    lines = [line for line in ended.output.splitlines() if "would start" in line]
    meshes = [" x ".join(f"{axis}={row['mesh'][axis]}" for axis in AXES) for row in best]
    assert [line.partition("mesh ")[2].partition(",")[0] for line in lines] == meshes * 2


def test_a_sweep_takes_the_best_meshes_of_the_share_of_parallel_points(commands: Commands, tmp_path: Path) -> None:
    arguments = ["-m", "model=tiny", "parallelism=plan:2", "sweep.parallel=2", "cluster.gpu=h100_80"]
    ended = commands.run(FINETUNE, [*arguments, "cluster.dry_run=true"], tmp_path, CUDA_VISIBLE_DEVICES="0,1,2,3")
    assert (ended.status, ended.imported_torch) == (0, False), ended.errors
    assert ended.output.count(": would start 2 x ") == 2


def test_parallel_points_must_fit_their_share_of_the_gpus(commands: Commands, tmp_path: Path) -> None:
    arguments = ["-m", "model=tiny", "run.seed=1,2", "sweep.parallel=2", "cluster.procs_per_node=4"]
    ended = commands.run(FINETUNE, [*arguments, "cluster.dry_run=true"], tmp_path, CUDA_VISIBLE_DEVICES="0,1,2,3")
    assert ended.status == 2
    assert ended.errors.strip() == (
        "sweep.parallel=2: each point has 2 of the 4 visible GPUs, but it starts 4 processes, and each needs its own "
        "GPU; lower sweep.parallel or cluster.procs_per_node"
    )


@pytest.mark.parametrize("document", ["README.md", "docs/mesh.md"])
def test_the_plan_in_a_document_is_what_the_command_prints(commands: Commands, tmp_path: Path, document: str) -> None:
    """The README may leave the example to the page."""
    block = (REPOSITORY / document).read_text().partition("$ python scripts/plan.py ")[2].partition("\n```")[0]
    assert block or document == "README.md"
    command, _, printed = block.replace("\\\n      training", "training", 1).partition("\n")
    if block:
        ended = commands.run(PLAN, shlex.split(command), tmp_path)
        assert ended.output.startswith(printed)


LARGE_PLAN = ("scripts/plan", [*LLAMA_8B, *LONG])
TRAIN = ("recipes/finetune", AUTO)


@pytest.mark.parametrize(
    ("program", "arguments", "message"),
    [
        (LARGE_PLAN, ["cluster.gpu=h1000"], "cluster.gpu=h1000: no such device; choose a100_40, a100_80"),
        (LARGE_PLAN, ["cluster.gpu=null"], "cluster.gpu=null: the device is unknown; set it to an option of conf/gpu"),
        (LARGE_PLAN, ["model.family=null", "model.path=me/mine"], "model.path=me/mine: its sizes are unknown"),
        (LARGE_PLAN, ["model.family=mamba"], "model.family=mamba: the formulas do not cover this model type"),
        (LARGE_PLAN, ["cluster.nodes=1", "cluster.procs_per_node=1"], "nothing fits 1 process: the smallest configur"),
        (LARGE_PLAN, ["parallelism.tp=7"], "64 processes cannot be divided by tp 7"),
        (LARGE_PLAN, ["training.seq_len=abc"], "training.seq_len=abc"),
        (LARGE_PLAN, ["--top", "0"], "--top 0: must be 1 or more"),
        (LARGE_PLAN, ["--recipe", "nothing"], "plan.py: argument --recipe: invalid choice"),
        (("recipes/finetune", LAUNCH), ["cluster.gpu=h1000"], "cluster.gpu=h1000: no such device"),
        (TRAIN, ["parallelism=plan:3"], "parallelism=plan:3: needs -m; plan:K runs the best K meshes as a sweep"),
        (TRAIN, ["parallelism=auto4"], "parallelism=auto4: write parallelism=auto"),
        (TRAIN, ["-m", "parallelism=plan:0"], "parallelism=plan:0: must be plan:1 or more"),
        (TRAIN, ["parallelism=auto", "cluster.device=cuda"], "cluster.gpu=null: the device is unknown"),
        (TRAIN, ["parallelism=auto", "model=qwen3_8b", "model.family=rwkv"], "model.family=rwkv: the formulas"),
        (("recipes/evaluate", AUTO), ["parallelism=auto"], "parallelism=auto: only training recipes can be planned"),
    ],
    ids=str,
)
def test_wrong_input_is_one_message(
    commands: Commands, tmp_path: Path, program: tuple[str, list[str]], arguments: list[str], message: str
) -> None:
    script, given = program
    ended = commands.run(REPOSITORY / f"{script}.py", [*given, *arguments], tmp_path)
    assert ended.status == 2
    assert message in ended.errors
    assert "Traceback" not in ended.errors
    assert not ended.imported_torch
