"""Random valid configurations (model family x mesh x data x options) as command lines of a recipe."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.fuzz.families import DENSE, EAGER, SPARSE, draw_config

END, FIRST_TOKEN = 1, 3
"""Token ids: the end-of-text token, and the first regular token."""
ROWS = 12
"""Rows of the train split, and rows per step: every step trains on the whole split, whatever its order."""
LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY = 1e-2, (0.9, 0.95), 1e-3, 0.1
VOCABULARIES = (97, 101, 113, 128, 131)
LARGE_VOCABULARIES = (32769, 49159, 50257)
SINGLE_STAGE = ("GPipe", "1F1B")
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
PEFT = {"lora": [], "rslora": ["peft.rslora=true"], "dora": ["peft.dora=true"], "qlora": ["peft.method=qlora"]}


@dataclass(frozen=True)
class Row:
    """One sample: token ids of its prompt and of its response. A document of plain text has no prompt."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]

    def sample(self, seq_len: int) -> tuple[list[int], list[int]]:
        """Return (token ids, labels) truncated to `seq_len`; labels without a target are -100."""
        ids = [*self.prompt, *self.response, END][:seq_len]
        labels = [-100] * len(self.prompt) + [*self.response, END]
        return ids, labels[:seq_len]


@dataclass(frozen=True)
class Case:
    """One configuration, with everything its reference needs."""

    name: str
    family: str
    config: Mapping[str, Any]
    recipe: str
    seq_len: int
    pack: bool
    train: tuple[Row, ...]
    held_out: tuple[Row, ...]
    adapters: str | None
    router_aux: float
    max_grad_norm: float
    steps: tuple[int, ...]
    """Total optimizer steps after each run; two numbers if a second run resumes the first on another mesh."""
    meshes: tuple[tuple[str, ...], ...]
    """Overrides that differ between runs: mesh, micro-batch size, activation checkpointing, ..."""
    common: tuple[str, ...]
    """Overrides of every run."""

    @property
    def total_steps(self) -> int:
        """Optimizer steps of all runs together."""
        return self.steps[-1]


def draw_case(seed: int, index: int) -> Case:
    """Return case `index` of `seed`, deterministically."""
    rng = random.Random(f"{seed}/{index}")
    is_sparse = rng.random() < 0.25
    family = rng.choice(list(SPARSE if is_sparse else DENSE))
    large = rng.random() < 0.04 and not is_sparse
    layers = rng.choice((2, 2, 3, 4))
    vocab = rng.choice(LARGE_VOCABULARIES if large else VOCABULARIES)
    pack = rng.random() < 0.35
    adapters = rng.choice(list(PEFT)) if rng.random() < 0.25 else None
    router_aux = rng.choice((0.0, 0.1)) if is_sparse else 0.0
    max_grad_norm = rng.choice((1.0, 0.1, 0.0))
    recipe = "pretrain" if adapters is None and rng.random() < 0.2 else "finetune"
    resumes = rng.random() < 0.35
    attention = "eager" if family in EAGER else "sdpa"
    meshes = tuple(_draw_run(rng, layers, is_sparse, large) for _ in range(1 + resumes))
    seq_len = _draw_seq_len(rng, meshes, large)
    optimizer = f"lr={LEARNING_RATE} betas=[{BETAS[0]},{BETAS[1]}] eps={EPS} weight_decay={WEIGHT_DECAY}"
    training = f"eval_every=0 global_batch_size={ROWS} seq_len={seq_len} max_grad_norm={max_grad_norm}"
    common = [
        *(f"training.{each}" for each in training.split()),
        *(f"optimizer.{each}" for each in f"{optimizer} schedule=constant warmup_steps=0".split()),
        f"model.attention={attention}",
        f"model.router_aux={'sequence' if router_aux else 'none'}",
        *([f"model.router_aux_coef={router_aux}"] if router_aux else []),
        *(["peft=lora", "peft.rank=3", "peft.alpha=6", "peft.export=both", *PEFT[adapters]] if adapters else []),
        f"data.pack={str(pack).lower()}",
    ]
    return Case(
        name=f"{seed}/{index}",
        family=family,
        config=draw_config(rng, family, vocab, layers, positions=2 * seq_len),
        recipe=recipe,
        seq_len=seq_len,
        pack=pack,
        train=tuple(_draw_rows(rng, vocab, seq_len, pack, is_text=recipe == "pretrain")),
        held_out=tuple(_draw_row(rng, vocab, seq_len, recipe == "pretrain") for _ in range(3)),
        adapters=adapters,
        router_aux=router_aux,
        max_grad_norm=max_grad_norm,
        steps=(2, 4) if resumes else (3,),
        meshes=meshes,
        common=tuple(common),
    )


def _draw_run(rng: random.Random, layers: int, is_sparse: bool, large: bool) -> tuple[str, ...]:
    """Return the overrides of one run: its mesh, and options that must not change the curve."""
    mesh = _draw_mesh(rng, layers, is_sparse)
    splits_backward = any(value.endswith(SPLIT_BACKWARD) for value in mesh)
    return (*mesh, *_draw_options(rng, large, splits_backward))


def _draw_mesh(rng: random.Random, layers: int, is_sparse: bool) -> list[str]:
    """Return the overrides of a mesh of 1 to 4 processes."""
    world = rng.choice((1, 2, 2, 2, 2, 3, 4, 4, 4))
    kind = rng.random()
    if world == 1 and kind < 0.5:
        return ["parallelism=single", "cluster.procs_per_node=1"]
    if kind < 0.1:
        return ["parallelism=ddp", f"parallelism.dp_replicate={world}", f"cluster.procs_per_node={world}"]
    axes = ["pp", "dp_replicate", "dp_shard", "cp", "tp", *(["ep"] * 2 if is_sparse else [])]
    degrees = dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"), 1)
    for factor in {1: (), 2: (2,), 3: (3,), 4: rng.choice(((4,), (2, 2), (2, 2), (2, 2)))}[world]:
        fitting = [axis for axis in axes if not (axis == "pp" and factor * degrees["pp"] > layers)]
        degrees[rng.choice(fitting)] *= factor
    overrides = ["parallelism=fsdp2", *(f"parallelism.{axis}={degree}" for axis, degree in degrees.items())]
    if degrees["tp"] > 1 and rng.random() < 0.5:
        overrides.append("parallelism.sequence_parallel=true")
    if degrees["cp"] > 1:
        overrides.append(f"parallelism.cp_attention={rng.choice(('auto', 'ulysses', 'all_gather'))}")
    if degrees["pp"] > 1:
        fits_several_stages = 2 * degrees["pp"] <= layers
        overrides.append(f"parallelism.pp_schedule={rng.choice(SCHEDULES if fits_several_stages else SINGLE_STAGE)}")
    overrides.append(f"parallelism.defer_grad_sync={rng.choice(('true', 'false'))}")
    overrides.append(f"parallelism.reshard_after_forward={rng.choice(('true', 'false'))}")
    overrides.append(f"parallelism.prefetch={rng.choice((0, 0, 1))}")
    return [*overrides, f"cluster.procs_per_node={world}"]


def _draw_seq_len(rng: random.Random, meshes: Iterable[Sequence[str]], large: bool) -> int:
    """Draw a sequence length that every mesh can shard if it uses cp or sequence parallel."""
    shards_sequence = any(
        "sequence_parallel=true" in value or "cp_attention" in value for mesh in meshes for value in mesh
    )
    if large:
        return 264
    return rng.choice((24, 48)) if shards_sequence else rng.choice((19, 24, 31, 40))


def _draw_options(rng: random.Random, large: bool, splits_backward: bool) -> list[str]:
    """Return overrides that must not change a curve."""
    recompute = rng.choice(("none", "none", "full", "selective", "alternate", "auto"))
    compiles = rng.random() < 0.06
    if splits_backward or compiles:  # selective activation checkpointing and compiled layers need an unsplit backward
        recompute, compiles = recompute.replace("selective", "full"), compiles and not splits_backward
    loss = "auto" if large else rng.choice(("auto", "logits", "chunked"))
    options = [
        f"parallelism.activation_checkpointing={recompute}",
        f"model.loss={loss}",
        f"training.micro_batch_size={rng.choice((1, 2, 3, 4))}",
        f"checkpoint.async_save={rng.choice(('true', 'false'))}",
    ]
    return [*options, "model.compile=true"] if compiles else options


def _draw_rows(rng: random.Random, vocab: int, seq_len: int, pack: bool, is_text: bool) -> list[Row]:
    """Draw samples of unequal lengths that make ROWS rows, some of them truncated or without a target.

    With packing, ROWS samples are longer than half a row, so that no two fit into one, and each leaves space for one
    short sample: every optimal packing has exactly ROWS rows.
    """
    if not pack:
        rows = [_draw_row(rng, vocab, seq_len, is_text) for _ in range(ROWS)]
        if not is_text and rng.random() < 0.4:
            rows[0] = Row(rows[0].prompt[:2], _draw_tokens(rng, vocab, seq_len + 5))  # truncated to seq_len tokens
            rows.insert(
                3, Row(_draw_tokens(rng, vocab, seq_len + 3), (FIRST_TOKEN,))
            )  # no target within seq_len: dropped
        return rows
    short = seq_len // 4
    longest = seq_len - short
    rows = [_draw_row_of_length(rng, vocab, rng.randint(seq_len // 2 + 1, longest), is_text) for _ in range(ROWS)]
    rows += [_draw_row_of_length(rng, vocab, rng.randint(3, short), is_text) for _ in range(rng.randint(1, ROWS))]
    rng.shuffle(rows)
    return rows


def _draw_row(rng: random.Random, vocab: int, seq_len: int, is_text: bool) -> Row:
    return _draw_row_of_length(rng, vocab, rng.randint(4, seq_len), is_text)


def _draw_row_of_length(rng: random.Random, vocab: int, length: int, is_text: bool) -> Row:
    """Draw a row of `length` tokens, including the end-of-text token."""
    prompt = 0 if is_text else rng.randint(1, length - 2)
    return Row(_draw_tokens(rng, vocab, prompt), _draw_tokens(rng, vocab, length - 1 - prompt))


def _draw_tokens(rng: random.Random, vocab: int, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(FIRST_TOKEN, vocab) for _ in range(count))
