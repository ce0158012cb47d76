"""Predicted and published training speeds: how far the planner's formulas of time are from other programs' figures.

python scripts/benchmark/published.py                                       # the points of published_points.csv
python scripts/benchmark/published.py POINTS.csv

A row states a model, a mesh, a batch and the tokens/s per GPU that a source published for it. Where a program differs
from Meshbook in what it sends or recomputes, `PROGRAMS` describes it, from the program's source code. Rows of unknown
models or GPUs are skipped, with the reason.

The report has both speeds of each row, the median and the 90th percentile of the errors of each source, and the share
of its pairs of rows that are predicted in the right order. Rows marked with * were used to choose constants.
"""

from __future__ import annotations

import csv
import itertools
import math
import re
import statistics
import sys
from argparse import ArgumentParser
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from components.config.schema.model import Float8, LossMethod
from components.config.schema.optimizer import AdamWConfig
from components.config.schema.parallelism import (
    ActivationCheckpointing,
    MeshShape,
    ParallelismConfig,
    PipelineSchedule,
)
from components.config.schema.run import PeftConfig, PeftMethod
from components.config.shape import ModelShape
from components.planning.formulas.architecture import Architecture, read_architecture
from components.planning.formulas.hardware import Hardware, NodeLinks, read_hardware
from components.planning.formulas.step_time import StepTime, estimate_time
from components.planning.formulas.workload import MESHBOOK, Implementation, Workload
from components.protocol.errors import EXIT_INVALID, ConfigError
from components.terminal import HelpText, fit

ROOT = Path(__file__).resolve().parents[2]
POINTS = Path(__file__).with_name("published_points.csv")
COLUMNS = (
    *("id", "source", "hardware", "gpu_per_node", "gpus", "model", "pp", "schedule", "dp_shard", "cp", "tp", "ep"),
    *("micro_batch", "accum", "seq", "ac", "compile", "float8", "param_dtype", "peft", "tokens_s_gpu", "notes"),
)
"""Columns that are read; others are ignored."""

FITTED = {"1": 5762, "3": 8532, "5": 6514, "7": 3890, "9": 1071, "19": 10938, "21": 10471, "45": 2973}
"""Rows of published_points.csv from which constants were chosen: id -> tokens/s per GPU."""

LLAMA3 = ModelShape(family="llama", vocab=128256, kv_heads=8, head_dim=128, tied=False)
MODELS = {
    "1b": replace(LLAMA3, layers=16, hidden=2048, heads=32, head_dim=64, mlp=8192, tied=True),
    "3b": replace(LLAMA3, layers=28, hidden=3072, heads=24, mlp=8192, tied=True),
    "8b": replace(LLAMA3, layers=32, hidden=4096, heads=32, mlp=14336),
    "13b": replace(LLAMA3, layers=40, hidden=5120, heads=40, mlp=17920),
    "29b": replace(LLAMA3, layers=56, hidden=6144, heads=48, mlp=21504),
    "70b": replace(LLAMA3, layers=80, hidden=8192, heads=64, mlp=28672),
    "405b": replace(LLAMA3, layers=126, hidden=16384, heads=128, mlp=53248),
    "qwen2_5_32b": ModelShape(
        family="qwen2", layers=64, hidden=5120, heads=40, kv_heads=8, mlp=27648, vocab=152064, tied=False
    ),
    "qwen3_moe_30b": ModelShape(
        *(48, 32, 4, 2048, 151936, 128, "qwen3_moe", 128), expert_mlp=768, experts_per_token=8, tied=False
    ),
    "qwen3_moe_235b": ModelShape(
        *(94, 64, 4, 4096, 151936, 128, "qwen3_moe", 128), expert_mlp=1536, experts_per_token=8, tied=False
    ),
    "mixtral_8x7b": ModelShape(
        *(32, 32, 8, 4096, 32000, 8, "mixtral", 128), expert_mlp=14336, experts_per_token=2, tied=False
    ),
    "gpt_oss_20b": ModelShape(
        *(24, 64, 8, 2880, 201088, 32, "gpt_oss", 64), expert_mlp=2880, experts_per_token=4, window=128, tied=False
    ),
    "gpt_oss_120b": ModelShape(
        *(36, 64, 8, 2880, 201088, 128, "gpt_oss", 64), expert_mlp=2880, experts_per_token=4, window=128, tied=False
    ),
}
"""Name in the points -> sizes. The 13B and 29B models are KempnerForge's (ffn_dim_multiplier 1.3)."""
ALIASES = {
    "32b": "qwen2_5_32b",
    "qwen3_30b_a3b": "qwen3_moe_30b",
    "qwen3_235b_a22b": "qwen3_moe_235b",
    "gptoss_20b": "gpt_oss_20b",
    "gptoss_120b": "gpt_oss_120b",
}

GPUS = {
    ("MI300X",): "mi300x",
    ("B200",): "b200",
    ("H200",): "h200",
    ("H100", "96GB"): "h100_96",
    ("H100",): "h100_80",
    ("A100", "40GB"): "a100_40",
    ("A100",): "a100_80",
    ("L40S",): "l40s",
}
"""Parts of a hardware name -> file of conf/gpu; the first whose parts all occur."""
OTHER_GPUS = ("GB200", "GB300", "GH200", "PCIE", "NVL")
"""Parts of the names of GPUs that conf/gpu has no file for, though the names contain those of others."""

RING_SPEED = 0.75
"""Speed of torchtitan's attention over cp relative to one kernel: half-size pieces, whose outputs are merged. Fitted to
row 9 of published_points.csv."""
TORCHTITAN = Implementation(
    name="torchtitan",
    eager_hidden=6.0,  # its norms are fused kernels of torch; fitted to row 1 of published_points.csv
    selective_matmuls=0.5,  # its selective policy saves the output of every second matmul
    compiles_recomputation=True,
    float8_gathers=True,
    ring_attention=RING_SPEED,
)
KEMPNERFORGE = Implementation(
    name="KempnerForge",
    tp_gathers=5,  # the inputs of q, k, v, gate and up are redistributed one by one
    gathers_logits=True,
    compiles_recomputation=True,
)
LLAMA3_PAPER = Implementation(
    name="Llama 3 herd of models",
    attention_speed=1.4,  # Meta's own kernels
    ring_attention=1.0,  # keys and values are all-gathered over cp
)
AUTOMODEL = Implementation(
    name="NeMo AutoModel",
    adapter_passes=(2.5, 3.75),  # the scaled product is a tensor of its own
    attention_speed=1.4,  # Transformer Engine calls cuDNN's attention: about 500 TFLOP/s
    waits_for_routing=False,  # DeepEP
    expert_imbalance=1.0,  # its benchmarks force even routing
    compiles_recomputation=True,
)
PROGRAMS = {"torchtitan": TORCHTITAN, "kempnerforge": KEMPNERFORGE, "automodel": AUTOMODEL, "llama 3": LLAMA3_PAPER}
"""Part of a source, in lower case -> what its program does. Other programs are taken to do as Meshbook does."""
LLAMA3_STAGES = 4
"""Pipeline stages per rank of the Llama 3 paper, which does not state them: of its 8 layers per rank. Estimate."""
ASYNC_TP_OVERLAP = 0.6
"""Share of the tp communication that torchtitan's asynchronous tensor parallelism runs beside matmuls. Estimate."""


class SkippedError(Exception):
    """Row that cannot be predicted, with the reason."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Published and predicted speed of a row."""

    row: dict[str, str]
    published: float
    """Tokens/s per GPU."""
    estimate: StepTime

    @property
    def predicted(self) -> float:
        """Tokens/s per GPU."""
        return self.estimate.tokens_per_second_per_gpu

    @property
    def is_fitted(self) -> bool:
        """Whether a constant was chosen from this row."""
        return FITTED.get(self.row["id"]) == self.published

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.published - 1


def main() -> int:
    """Print the comparison; return 0, or 2 if the file is invalid."""
    parser = ArgumentParser("published.py", description=__doc__, formatter_class=HelpText)
    parser.add_argument("points", type=Path, nargs="?", default=POINTS, metavar="POINTS.csv")
    parser.add_argument("--why", action="store_true", help="also print the terms of each prediction")
    options = parser.parse_args()
    try:
        compared, skipped = compare_points(read_points(options.points))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_INVALID
    for each in compared:
        print(_line(each))
        for term in each.estimate.terms if options.why else ():
            print(fit(f"    {term.name:30} {term.value:10.4f} s\n      {term.formula}"))
    for row, reason in skipped:
        print(fit(f"{row['id']:>5}  skipped: {reason}"))
    for source, rows in by_source(compared).items():
        print(fit(f"\n{source}: {summary(rows)}"))
    for name, rows in (
        ("rows that no constant was fitted to", [each for each in compared if not each.is_fitted]),
        ("rows that constants were fitted to (*)", [each for each in compared if each.is_fitted]),
    ):
        if rows:
            print(fit(f"\n{name}: {summary(rows, pairs=False)}"))
    return 0


def read_points(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file. Raises ConfigError if it cannot be read or lacks columns."""
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            names = list(reader.fieldnames or ())
            rows = list(reader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; name a CSV file of published speeds") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: is not a CSV file: {error}") from error
    if missing := [name for name in COLUMNS if name not in names]:
        raise ConfigError(
            f"{path}: has no column {', '.join(missing)}; the first line must name the columns of {POINTS.name}"
        )
    return [{name: value or "" for name, value in row.items() if name is not None} for row in rows]


def compare_points(
    rows: Iterable[dict[str, str]],
) -> tuple[list[Comparison], list[tuple[dict[str, str], str]]]:
    """Return the rows that could be predicted, and the others with the reason."""
    compared, skipped = [], []
    for row in rows:
        try:
            published = _number(row, "tokens_s_gpu")
            workload = workload_of_row(row)
            estimate = estimate_time(workload, hardware_of_row(row), implementation_of_row(row))
            compared.append(Comparison(row, published, estimate))
        except (SkippedError, ConfigError) as reason:
            skipped.append((row, str(reason)))
    return compared, skipped


def workload_of_row(row: dict[str, str]) -> Workload:
    """Return what a rank computes in the row's run. Raises SkippedError."""
    mesh = mesh_of_row(row)
    program = program_of_row(row)
    schedule = row["schedule"].strip() or "1F1B"
    if schedule not in list(PipelineSchedule):
        raise SkippedError(f"pipeline schedule {schedule} is unknown")
    policy = row["ac"].strip() or "none"
    if policy not in ("none", "full", "selective", "alternate"):
        raise SkippedError(f"activation checkpointing {policy} is unknown")
    peft = row["peft"].strip().lower() or "none"
    if peft not in list(PeftMethod):
        raise SkippedError(f"peft {peft} is unknown")
    kempner = program is KEMPNERFORGE  # its pipeline stages exchange whole sequences, and reshard
    parallelism = ParallelismConfig(
        pp=mesh.pp,
        dp_replicate=mesh.dp_replicate,
        dp_shard=mesh.dp_shard,
        ep=mesh.ep,
        cp=mesh.cp,
        tp=mesh.tp,
        pp_schedule=PipelineSchedule(schedule),
        sequence_parallel=mesh.tp > 1 and not (kempner and mesh.pp > 1),
        activation_checkpointing=ActivationCheckpointing(policy),
        reshard_after_forward="true" if kempner else "auto",
        stages_per_rank=LLAMA3_STAGES if program is LLAMA3_PAPER else 2,
    )
    return Workload(
        architecture=architecture_of_row(row),
        mesh=mesh,
        parallelism=parallelism,
        seq_len=_whole(row, "seq"),
        micro_batch=_whole(row, "micro_batch"),
        micro_batches=_whole(row, "accum", default=1),
        stored_bytes=2 if row["param_dtype"].strip() in ("bfloat16", "bf16") else 4,
        compute_bytes=2,
        float8=Float8.tensorwise if _is_set(row, "float8") else Float8.none,
        compiled=_is_set(row, "compile"),
        fused=False,  # each program's eager_hidden counts its norms
        loss=LossMethod.logits,
        optimizer=AdamWConfig(),
        peft=PeftConfig(method=PeftMethod(peft)),
    )


def mesh_of_row(row: dict[str, str]) -> MeshShape:
    """Return the mesh of a row; GPUs beyond it are replicas. Raises SkippedError."""
    mesh = MeshShape(**{axis: _whole(row, axis, default=1) for axis in ("pp", "dp_shard", "ep", "cp", "tp")})
    gpus = _whole(row, "gpus", default=mesh.world)
    if gpus * mesh.ep == mesh.world and mesh.dp_shard % mesh.ep == 0:
        mesh = replace(mesh, dp_shard=mesh.dp_shard // mesh.ep)  # a program whose ep ranks are some of its dp_shard
    if gpus % mesh.world:
        raise SkippedError(f"{gpus} GPUs are no multiple of the mesh {mesh.summary}")
    return replace(mesh, dp_replicate=gpus // mesh.world)


def program_of_row(row: dict[str, str]) -> Implementation:
    """Return the program of the row's source."""
    return next((each for part, each in PROGRAMS.items() if part in row["source"].lower()), MESHBOOK)


def architecture_of_row(row: dict[str, str]) -> Architecture:
    """Return the architecture of the row's model. Raises SkippedError."""
    name = re.sub(r"[-. ]+", "_", row["model"].strip().lower())
    name = re.sub(r"^(meta_)?llama_?3(_[123])?_", "", name)
    shape = MODELS.get(ALIASES.get(name, name))
    if shape is None:
        raise SkippedError(f"model {row['model'] or '(none)'} is unknown; MODELS has {', '.join(MODELS)}")
    return read_architecture(shape, name)


def hardware_of_row(row: dict[str, str]) -> Hardware:
    """Return the hardware of a row. Raises SkippedError."""
    name = row["hardware"].strip()
    file = next((file for parts, file in GPUS.items() if all(part in name.upper() for part in parts)), None)
    if file is None or any(other in name.upper() for other in OTHER_GPUS):
        raise SkippedError(f"hardware {name or '(none)'} is unknown; GPUS has {', '.join(map('-'.join, GPUS))}")
    hardware = read_hardware(ROOT / "conf" / "gpu" / f"{file}.yaml")
    gpus = _whole(row, "gpu_per_node", default=hardware.gpus_per_node)
    # Boards of four GPUs have no NVSwitch: each pair of GPUs has a third of the links (HGX H100 and H200 4-GPU).
    links = NodeLinks.direct if gpus == 4 and hardware.gpus_per_node == 8 else hardware.node_links
    return replace(hardware, gpus_per_node=gpus, node_links=links)


def implementation_of_row(row: dict[str, str]) -> Implementation:
    """Return what the row's program does."""
    program = program_of_row(row)
    if program is TORCHTITAN and _is_set(row, "float8"):
        program = replace(program, gather_bytes=1)
    if program is KEMPNERFORGE and mesh_of_row(row).pp > 1:
        program = replace(program, shards_head=False, gathers_logits=False)
    return replace(program, tp_overlap=ASYNC_TP_OVERLAP) if "AsyncTP" in row["notes"] else program


def by_source(compared: Iterable[Comparison]) -> dict[str, list[Comparison]]:
    """Return the comparisons of each source."""
    found: dict[str, list[Comparison]] = {}
    for each in compared:
        found.setdefault(each.row["source"], []).append(each)
    return found


def percentile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def ordered_pairs(compared: list[Comparison]) -> tuple[int, int]:
    """Return how many pairs of rows with different published speeds are predicted in the right order, and all pairs."""
    pairs = [pair for pair in itertools.combinations(compared, 2) if pair[0].published != pair[1].published]
    right = sum((a.predicted > b.predicted) == (a.published > b.published) for a, b in pairs)
    return right, len(pairs)


def summary(compared: list[Comparison], *, pairs: bool = True) -> str:
    """Return the errors of some rows as a sentence."""
    errors = [abs(each.error) for each in compared]
    text = (
        f"{len(errors)} rows, median error {statistics.median(errors):.0%}, 90th percentile "
        f"{percentile(errors, 0.9):.0%}, largest {max(errors):.0%}"
    )
    right, number = ordered_pairs(compared)
    return f"{text}; {right} of {number} pairs in the right order ({right / number:.0%})" if pairs and number else text


def _line(each: Comparison) -> str:
    row = each.row
    mesh = " ".join(f"{axis}{row[axis]}" for axis in ("pp", "dp_shard", "ep", "cp", "tp") if row[axis] not in ("", "1"))
    return (
        f"{row['id']:>5}  {row['model']:14} {row['gpus']:>4} x {row['hardware']:22} {mesh}\n"
        f"       seq {row['seq']:>6} {row['ac']:9} published {each.published:8,.0f}  predicted {each.predicted:8,.0f}  "
        f"{each.error:+5.0%}"
        f"{' *' if each.is_fitted else ''}"
    )


def _number(row: dict[str, str], column: str) -> float:
    try:
        value = float(row[column])
    except ValueError:
        raise SkippedError(f"{column}={row[column] or '(none)'} is not a number") from None
    if not (value > 0 and math.isfinite(value)):
        raise SkippedError(f"{column}={row[column]} must be greater than 0")
    return value


def _is_set(row: dict[str, str], column: str) -> bool:
    return row[column].strip().lower() not in ("", "0", "none", "false", "no")


def _whole(row: dict[str, str], column: str, default: int | None = None) -> int:
    if default is not None and not row[column].strip():
        return default
    value = _number(row, column)
    if value != int(value):
        raise SkippedError(f"{column}={row[column]} is not a whole number")
    return int(value)


if __name__ == "__main__":
    sys.exit(main())
