"""Table of model families and what is tested of each: docs/models.md, written from the lists of cases of the tests.

    python -m tests.model_table            # print it
    python -m tests.model_table --write    # write docs/models.md

A cell is the strongest evidence for a family on a mesh axis. Nothing is run: the cases are those that the tests train
and compare with one process, and a rejection is one that a test or a rule of the config states.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any
from unittest import mock

from components.config.mesh_rules import NO_TP_PLAN, RECOMPUTE, layout_of, model_problems
from components.config.schema.parallelism import AXES, MeshShape, ParallelismConfig, Strategy
from components.config.shape import DENSE, ModelShape
from components.planning.formulas.architecture import FAMILIES as PLANNED
from components.planning.formulas.architecture import read_architecture
from tests.config.ready import HUB_MODELS
from tests.distributed import (
    grid,
    packed,
    parity,
    test_expert,
    test_lora,
    test_lora_experts,
    test_packing,
    test_parity,
    test_tp_plan,
)
from tests.fuzz import families as fuzz
from tests.unit import test_packing as packing_in_one_process

FILE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
ONE = "one process"
COLUMNS = (ONE, "dp_shard", "dp_replicate", "tp", "sp", "pp", "cp", "ep")
FULL, LORA, QLORA, PACKED = "all parameters", "LoRA", "QLoRA", "packed rows"
KINDS = (FULL, LORA, QLORA, PACKED)


class Level(IntEnum):
    """Strength of the evidence for a cell."""

    nothing = 0
    fuzz = 1
    rejected = 2
    parity = 3
    ci = 4


MARKS = {
    Level.nothing: "-",
    Level.fuzz: "fuzz",
    Level.rejected: "rejected",
    Level.parity: "parity",
    Level.ci: "yes",
}


@dataclass
class Evidence:
    """What the tests cover."""

    levels: dict[tuple[str, str, str], Level] = field(default_factory=lambda: defaultdict(lambda: Level.nothing))
    """(kind, family, column) -> strongest evidence."""
    reasons: dict[str, list[tuple[str, str]]] = field(default_factory=lambda: defaultdict(list))
    """Family -> (column, reason) of its rejections."""

    def add(self, level: Level, kind: str, family: str, columns: Iterable[str]) -> None:
        """Note evidence for columns of a family."""
        for column in columns:
            self.levels[kind, family, column] = max(level, self.levels[kind, family, column])

    def reject(self, kind: str, family: str, column: str, reason: str) -> None:
        """Note that a rule rejects a column of a family."""
        self.add(Level.rejected, kind, family, [column])
        entry = (column if kind == FULL else f"{kind}, {column}", reason)
        if entry not in self.reasons[family]:
            self.reasons[family].append(entry)

    @property
    def families(self) -> list[str]:
        """Families with evidence, or with an option in conf/model."""
        options = {option.values["family"] for option in HUB_MODELS.values()}
        return sorted({family for _, family, _ in self.levels} | options)


def columns_of(parallelism: ParallelismConfig | Mapping[str, Any]) -> list[str]:
    """Return the columns of a mesh: its axes above 1 or inferred (-1), and sp for sequence parallel."""
    config = parallelism if isinstance(parallelism, ParallelismConfig) else ParallelismConfig(**parallelism)
    axes = [axis for axis in AXES if config.degree(axis) != 1]
    if config.strategy is Strategy.single:
        return [ONE]
    return [*axes, *(["sp"] if config.sequence_parallel else [])]


def columns_of_name(mesh: str) -> list[str]:
    """Return the columns of a mesh by its name, such as dp_shard2_tp2_sp."""
    layout = None if mesh == "single" else layout_of(mesh, ParallelismConfig())
    return [ONE] if layout is None else columns_of(layout)


def collect() -> Evidence:
    """Return the evidence in the lists of cases of all tests."""
    found = Evidence()
    for name, values in (fuzz.DENSE | fuzz.SPARSE).items():
        found.add(Level.fuzz, FULL, values.get("model_type", name), [ONE])
    _grid(found)
    _families(found)
    _experts(found)
    _adapters(found)
    _packed(found)
    _rules(found)
    return found


def _grid(found: Evidence) -> None:
    """Add the parity grid: the covering subset in CI, all meshes of 2, 4 and 8 processes in `make parity`."""
    for world in (2, 4, 8):
        covering = test_parity.covering(world) if world < 8 else []
        everything = [each for model in grid.MODELS for each in grid.cells(world, model, RECOMPUTE[:1])]
        for level, cells in ((Level.parity, everything), (Level.ci, covering)):
            for cell in cells:
                if not cell.rejected:
                    family = grid.MODELS[cell.model]["model_type"]
                    found.add(level, FULL, family, [ONE, *columns_of(cell.parallelism)])


def _families(found: Evidence) -> None:
    """Add families with plans of ours, those with special forwards, and those that are rejected."""
    for name, values in test_tp_plan.FAMILIES.items():
        family = values["model_type"]
        for mesh in (test_parity.TP, {**test_parity.TP, **test_parity.SP}):
            found.add(Level.ci, FULL, family, [ONE, *columns_of(mesh)])
        for mesh in test_tp_plan.PRODUCTS:
            if "ep" not in mesh or name in test_tp_plan.WITH_EXPERTS:
                found.add(Level.parity, FULL, family, columns_of(mesh))
    for values in test_tp_plan.TRANSFORMERS_PLANS.values():
        family = values["model_type"]
        found.add(Level.ci, FULL, family, [ONE, *columns_of(test_parity.FSDP2_TP2)])
        for mesh in (*test_tp_plan.PRODUCTS, test_tp_plan.WITH_CP):
            if "ep" not in mesh:
                found.add(Level.parity, FULL, family, columns_of(mesh))
    for family, (_, mesh) in test_parity.FAMILIES.items():
        found.add(Level.ci, FULL, family, [ONE, *columns_of(mesh)])
    for family, (_, mesh, message) in test_parity.REJECTED.items():
        for column in columns_of(mesh):
            found.reject(FULL, family, column, message)


def _experts(found: Evidence) -> None:
    """Add mixtures of experts."""
    for level, everything in ((Level.ci, False), (Level.parity, True)):
        with mock.patch.object(test_expert, "PARITY", everything):
            for world in test_expert.SHAPES:
                for dtype in grid.BOUNDS:
                    for case in test_expert.cases(world, dtype):
                        family = parity.MOE_MODELS[case.model]["model_type"]
                        found.add(level, FULL, family, [ONE, *columns_of(case.parallelism)])


def _adapters(found: Evidence) -> None:
    """Add LoRA, DoRA and QLoRA, each compared with the peft library."""
    lists = [
        (Level.ci, [each for cases in test_lora.DEFAULT_CASES.values() for each in cases]),
        (Level.parity, [each for world in test_lora.DENSE for each in test_lora.all_cases(world)]),
        (Level.ci, [each for cases in test_lora_experts.CASES.values() for each in cases]),
        (Level.parity, [each for cases in test_lora_experts.MORE_CASES.values() for each in cases]),
    ]
    for level, cases in lists:
        for case in cases:
            kind = QLORA if case.peft.quantizes else LORA
            found.add(level, kind, grid.MODELS[case.model]["model_type"], columns_of_name(case.mesh))
    for level, of_families in ((Level.ci, test_lora.OF_FAMILIES), (Level.parity, test_lora.ALL_OF_FAMILIES)):
        for name, mesh, peft in of_families:
            found.add(
                level, QLORA if peft.quantizes else LORA, test_lora.FAMILY_VALUES[name]["model_type"], columns_of(mesh)
            )


def _packed(found: Evidence) -> None:
    """Add packed rows, compared with their documents forwarded one by one."""
    values = packed.MODELS | parity.HYBRID_MODELS
    for name in parity.HYBRID_MODELS:
        found.add(Level.ci, PACKED, name, [ONE])
    for name in packing_in_one_process.PACKED:
        found.add(Level.ci, PACKED, packing_in_one_process.ALL[name]["model_type"], [ONE])
    for world, cases in test_packing.SHAPES.items():
        for mesh, name, _ in cases:
            level = Level.ci if world == 2 else Level.parity
            found.add(level, PACKED, values[name]["model_type"], columns_of(mesh))
    # test_packing.test_compiled_layers_with_gathered_keys_and_tp_match_one_process
    found.add(Level.ci, PACKED, "phi3", columns_of({**test_packing.GATHER, "tp": 2}))


def _rules(found: Evidence) -> None:
    """Add what rules reject: ep without experts, tp without a plan."""
    (no_experts,) = model_problems(ParallelismConfig(dp_shard=1, ep=2), MeshShape(ep=2), ModelShape(experts=0))
    assert no_experts.startswith("parallelism.ep=2: the model is dense (no experts)")
    for family in {family for _, family, _ in found.levels} | {each.values["family"] for each in HUB_MODELS.values()}:
        if family in DENSE:
            for kind in KINDS:
                found.add(Level.rejected, kind, family, ["ep"])
    for family in NO_TP_PLAN & {family for _, family, _ in found.levels}:
        (no_plan,) = model_problems(ParallelismConfig(tp=2), MeshShape(tp=2), ModelShape(family=family))
        for kind in (FULL, LORA, QLORA):
            found.reject(kind, family, "tp", no_plan)


def table(found: Evidence) -> Iterator[str]:
    """Yield the lines of docs/models.md."""
    yield "# Models"
    yield ""
    yield "<!-- Generated by `python -m tests.model_table --write`; do not edit. -->"
    yield ""
    yield from INTRODUCTION
    yield ""
    yield from _rows(
        ("family", *KINDS, *COLUMNS[1:], "planner"),
        (
            (f"`{family}`", *(_strongest(found, kind, family) for kind in KINDS))
            + tuple(MARKS[found.levels[FULL, family, column]] for column in COLUMNS[1:])
            + ("yes" if family in PLANNED else "-",)
            for family in found.families
        ),
    )
    for kind, title in ((LORA, "LoRA and DoRA"), (QLORA, "QLoRA"), (PACKED, "Packed rows")):
        yield f"## {title}"
        yield ""
        # The rejection of ep alone says nothing about a family.
        shown = [
            family
            for family in found.families
            if any(found.levels[kind, family, column] for column in COLUMNS if column != "ep")
        ]
        yield from _rows(
            ("family", *COLUMNS),
            ((f"`{family}`", *(MARKS[found.levels[kind, family, column]] for column in COLUMNS)) for family in shown),
        )
    yield "## Rejections"
    yield ""
    yield "ep is rejected for every family without experts. Others:"
    yield ""
    for family in sorted(found.reasons):
        yield from (f"- `{family}`, {column}: {reason}" for column, reason in found.reasons[family])
    yield ""
    yield from QUANTIZED
    yield ""
    yield "## Options"
    yield ""
    yield "Options of `conf/model` for models on the hub. Each states its sizes, from which the number of parameters"
    yield "follows, and their source."
    yield ""
    yield from _rows(("option", "model", "family", "parameters"), map(_option, HUB_MODELS))


INTRODUCTION = """\
What the tests cover of each model family, which is transformers' `model_type`. Every test trains a small model of the
family and compares first-step gradients in float64 (bound: 1e-10 relative) or steps in float32 (1e-5) with plain
transformers in one process; adapters with the peft library, packed rows with their documents one by one.

| mark | meaning |
|---|---|
| yes | compared in every CI run |
| parity | compared by `make parity` only |
| fuzz | `make fuzz` draws it with random meshes and options; nothing else trains it |
| rejected | an error before the first step, with the reason below |
| - | nothing tests it |

The first four columns hold the strongest mark on any mesh; those of axes are for all parameters (`sp`: sequence
parallel). `planner`: the formulas of `scripts/plan.py` cover the family; for others, `cluster.dry_run=plan` simulates a
step on a mesh of your choice.
""".splitlines()

QUANTIZED = """\
## Quantized checkpoints

Weights are decoded to bfloat16, slice by slice, while each rank reads its shards; nothing else of a run changes. That
is so for full training, LoRA and QLoRA, on every mesh. Exports hold bfloat16 and no `quantization_config`; banner and
model card name the format. The planner counts decoded sizes.

| format in config.json | weights | published by |
|---|---|---|
| `mxfp4` | 4-bit floats, a power of two per 32 | gpt-oss |
| `fp8`, `fbgemm_fp8` | float8, a scale per block, row or matrix | DeepSeek, Qwen, GLM, MiniMax, Mistral |
| `fp8` with `expert_dtype=fp4` | the same with powers of two; 4-bit floats for experts | DeepSeek V4 |
| `mxfp8` | float8, a power of two per 32 | MiniMax M3 |
| `modelopt` | `FP8`, `NVFP4` and `MIXED_PRECISION` | NVIDIA |
| `compressed-tensors` | float8, MXFP8, MXFP4, NVFP4, integers of 4 and 8 bits | Red Hat, Kimi K2, Mistral |

Block sizes are those of config.json, so matrices that blocks do not divide are right: DeepSeek V3 has one of 576 rows.
Other formats (GPTQ, AWQ, bitsandbytes, zero points, rotated weights) are rejected by name before launch.
""".splitlines()


def _strongest(found: Evidence, kind: str, family: str) -> str:
    """Return the strongest mark of a family on any mesh; `rejected` only if that is so in one process already."""
    levels = {column: found.levels[kind, family, column] for column in COLUMNS}
    tested = [level for column, level in levels.items() if level is not Level.rejected or column == ONE]
    return MARKS[max(tested, default=Level.nothing)]


def _option(name: str) -> tuple[str, ...]:
    option = HUB_MODELS[name]
    values = option.values
    shape = ModelShape(**{key: values[key] for key in ModelShape.__slots__ if key in values})
    if values["family"] in PLANNED:
        count = f"{read_architecture(shape, name).parameters / 1e9:,.2f}B"
    else:
        count = f"{option.published[0] / 1e9:,.0f}B (as published)" if option.published else "-"
    return f"`{name}`", f"`{values['path']}`", f"`{values['family']}`", count


def _rows(header: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    names = tuple(header)
    yield f"| {' | '.join(names)} |"
    yield "|---" * len(names) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def render() -> str:
    """Return docs/models.md."""
    return "\n".join(table(collect())).rstrip() + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(render())
    else:
        sys.stdout.write(render())
