"""Simulation of a run's ranks whose memory differs, each in a child process, and a summary. Imports no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from components.config.compose.frozen import to_yaml
from components.config.mesh_rules import fit_micro_batches
from components.config.model_files import locate
from components.config.schema.model import Attention, DType, Float8, Fused, LossMethod, ModelConfig, Qat, WeightInit
from components.config.schema.optimizer import AdamW8bitConfig
from components.config.schema.parallelism import ActivationCheckpointing
from components.config.schema.recipes import DistillConfig, TrainConfig
from components.config.shape import ModelShape
from components.planning.formulas.workload import bytes_text
from components.protocol.errors import ConfigError, raise_all
from components.protocol.processes import without_ranks
from components.terminal import fit

_SIZE_KEYS = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "hidden": "hidden_size",
    "vocab": "vocab_size",
    "head_dim": "head_dim",
    "linear_heads": "linear_num_value_heads",
    "mlp": "intermediate_size",
    "expert_mlp": "moe_intermediate_size",
    "experts_per_token": "num_experts_per_tok",
    "tied": "tie_word_embeddings",
}
"""Size of a model -> its key in the configs of transformers."""
_EXPERT_KEYS = {
    "mixtral": "num_local_experts",
    "gpt_oss": "num_local_experts",
    "minimax_m2": "num_local_experts",
    "deepseek_v3": "n_routed_experts",
    "glm4_moe": "n_routed_experts",
    "mistral4": "n_routed_experts",
    "nemotron_h": "n_routed_experts",
}
"""Model type -> its key for the number of experts; num_experts for others."""
_TOP_K = {"gemma4_text": "top_k_experts"}
"""Model type -> its key for the number of experts of a token, if it is not that of the others."""
_SINGLE_MLP_SIZE = ("mixtral", "gpt_oss", "olmoe", "minimax_m2")
"""Model types without dense MLPs, whose intermediate_size is that of an expert."""
_TIMEOUT_SECONDS = 600.0
"""Time that one rank may take. 8B parameters take half a minute."""
RESULT, PROBLEMS = "result", "problems"
"""Keys of a child's answer, a line of JSON: the result, or the config errors."""
_SIMULATED_ATTENTION = (Attention.sdpa, Attention.sdpa_flash, Attention.eager)
DOCUMENTS = 8
"""Documents of a packed row, all of one length. Their number affects the size of attention masks only."""
STORED_TOKENS = 64
"""Tokens per target of a stored teacher, the default of scripts/teacher.py."""


def simulate_run(cfg: TrainConfig, shape: ModelShape, world: int, recipe: Path | None = None) -> list[SimulatedRank]:
    """Simulate the first and the last rank of a run, and one of each kind of pipeline stage.

    A model of the hub that is not on this machine is built from its stated sizes.

    Args:
        recipe: File of the recipe whose steps are simulated; None: Meshbook's recipe for the class of the config.

    Raises ConfigError with all problems of a child process.
    """
    built = replace(cfg, model=buildable(cfg.model, shape))
    return _simulate_ranks(built, world, _ranks_to_simulate(built, world), recipe=recipe)


def buildable(model: ModelConfig, shape: ModelShape) -> ModelConfig:
    """Return a model config that can be built here: a hub model by its sizes, any other as it is."""
    if model.path is None or locate(model.path).is_local:
        return model
    values: dict[str, Any] = {"model_type": shape.family}
    values |= {key: getattr(shape, name) for name, key in _SIZE_KEYS.items() if getattr(shape, name) is not None}
    if shape.experts:
        values[_EXPERT_KEYS.get(shape.family or "", "num_experts")] = shape.experts
    if (top_k := _TOP_K.get(shape.family or "")) and "num_experts_per_tok" in values:
        values[top_k] = values.pop("num_experts_per_tok")
    if shape.family == "nemotron_h":  # as many layers as its pattern has, in the option's model.config
        values.pop("num_hidden_layers", None)
    if shape.family in _SINGLE_MLP_SIZE and shape.expert_mlp is not None:
        values["intermediate_size"] = values.pop("moe_intermediate_size")
    return replace(
        model, path=None, revision=None, init=WeightInit.random, tokenizer="bytes", config={**values, **model.config}
    )


def simulation_lines(runs: Sequence[SimulatedRank], estimated: int | None) -> list[str]:
    """Return the memory of a run by its simulated ranks, and the traffic and notes of the fullest one.

    Args:
        estimated: Peak bytes by the formulas; None: unknown.
    """
    fullest = max(runs, key=lambda each: each.peak)
    formulas = ""
    if estimated is not None:
        formulas = f" (formulas {bytes_text(estimated)}, {estimated / fullest.peak - 1:+.1%})"
    ranks = ", ".join(f"{run.rank}: {bytes_text(run.peak)}" for run in runs)
    lines = [
        f"{bytes_text(fullest.peak)} on rank {fullest.rank}{formulas}",
        f"    peak of each simulated rank: {ranks}; a rank took {fullest.cpu_seconds:.0f} s of CPU",
        f"    of rank {fullest.rank}: parameters {bytes_text(fullest.parameters)}, gradients "
        f"{bytes_text(fullest.gradients)}, optimizer {bytes_text(fullest.optimizer)}, saved for the backward at most "
        f"{bytes_text(fullest.saved)}; peak at {fullest.peak_operator} in {fullest.peak_phase}",
        *(
            f"    {each.group}: {each.calls} {each.operation}, {bytes_text(each.bytes)} per step"
            for each in fullest.traffic
        ),
        *(f"    note: {note}" for note in fullest.notes),
    ]
    return [part for line in lines for part in fit(line).split("\n")]


def _ranks_to_simulate(cfg: TrainConfig, world: int) -> list[int]:
    """Return the ranks whose memory differs: the first and the last one, and one of each kind of pipeline stage.

    Ranks of one stage hold equal shards, except that the last ones hold less of what their number does not divide.
    The first stage holds most micro-batches in flight and the embedding, the last one the head and the loss.

    Raises ConfigError if the mesh does not fit `world` ranks.
    """
    pp = cfg.parallelism.resolve(world).pp
    stages = {0, pp // 2, pp - 1}
    return sorted({*(stage * (world // pp) for stage in stages), world - 1})


def _simulate_ranks(
    cfg: TrainConfig,
    world: int,
    ranks: Collection[int],
    timeout: float = _TIMEOUT_SECONDS,
    recipe: Path | None = None,
) -> list[SimulatedRank]:
    """Simulate ranks of a run in child processes, as many at a time as there are cores; return the results in order.

    Args:
        world: Number of ranks of the run.
        timeout: Seconds that one rank may take.
        recipe: File of the recipe whose steps are simulated; None: Meshbook's recipe for the class of the config.

    Raises ConfigError with all problems, if a child refuses the config, fails or takes too long.
    """
    with ThreadPoolExecutor(min(len(ranks), os.cpu_count() or 1)) as pool:
        answers = list(pool.map(lambda rank: _simulate_in_child(cfg, world, rank, timeout, recipe), ranks))
    problems = [problem for answer in answers if isinstance(answer, ConfigError) for problem in answer.problems]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return [answer for answer in answers if isinstance(answer, SimulatedRank)]


def _simulate_in_child(
    cfg: TrainConfig, world: int, rank: int, timeout: float, recipe: Path | None
) -> SimulatedRank | ConfigError:
    """Return the result of a rank, or the errors of its process."""
    request = {
        "recipe": None if recipe is None else str(recipe),
        "schema": type(cfg).__name__,
        "config": to_yaml(cfg),
        "world": world,
        "rank": rank,
    }
    # Torch reads its log level when it is imported.
    environment = {"TORCH_CPP_LOG_LEVEL": "ERROR"} | without_ranks(os.environ) | {"OMP_NUM_THREADS": "1"}
    try:
        child = subprocess.run(
            [sys.executable, "-m", "components.planning.simulated_step"],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            env=environment,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ConfigError(
            f"simulation of rank {rank} of {world}: was stopped after {timeout:g} seconds; simulate a smaller "
            "model or fewer layers, or allow more time"
        )
    answer = json.loads(child.stdout) if child.stdout else {}
    if RESULT in answer:
        return SimulatedRank.from_json(answer[RESULT])
    last = child.stderr.strip().rpartition("\n")[2]
    remedy = "" if recipe is None else f"; set cluster.dry_run=true, which simulates no step of {recipe}"
    return ConfigError(
        answer.get(PROBLEMS)
        or f"simulation of rank {rank} of {world}: exited with status {child.returncode}: {last}{remedy}"
    )


@dataclass(frozen=True, slots=True)
class SimulatedGroup:
    """A process group of the mesh with more than one rank."""

    axes: str
    """Axes or views of the mesh with these ranks, such as `fsdp = dp`."""
    size: int
    """Number of ranks."""


@dataclass(frozen=True, slots=True)
class SimulatedTraffic:
    """Calls of one collective over one group in a step."""

    group: str
    """Axes or views of the mesh with this group."""
    operation: str
    calls: int
    bytes: int
    """Bytes of this rank's input tensors, see components.training.step_cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRank:
    """Memory and traffic of one rank in the second step of a run, when the optimizer has its state."""

    rank: int
    world: int
    """Number of ranks."""
    mesh: str
    """Degrees of the axes."""
    coordinates: str
    """This rank's coordinate on every axis larger than 1."""
    parameters: int
    """Bytes of this rank's parameters, with the copy of a tied head on the last pipeline stage."""
    gradients: int
    """Bytes of the gradients at the optimizer step."""
    optimizer: int
    """Bytes of the optimizer state."""
    average: int
    """Bytes of the moving average of the weights (training.ema_decay)."""
    frozen: int
    """Bytes of a second model, which is not trained: a teacher or a reference."""
    buffers: int
    """Bytes of the trained model's buffers."""
    saved: int
    """Highest sum of the bytes that autograd saves for the backward, without parameters. Outputs that selective
    recomputation keeps are not among them; they are in `peak`."""
    peak: int
    """Highest sum of all bytes during the step, with all of the above."""
    peak_operator: str
    """Operator that allocated the last bytes of the peak."""
    peak_phase: str
    """forward, backward or update."""
    groups: tuple[SimulatedGroup, ...]
    """Process groups of this rank."""
    traffic: tuple[SimulatedTraffic, ...]
    """Collectives of the step."""
    micro_batches: int
    """Micro-batches of the step."""
    micro_batch_rows: int
    """Rows of a micro-batch."""
    cpu_seconds: float
    """CPU time of the process until the result."""
    resident_bytes: int
    """Highest resident memory of the process."""
    notes: tuple[str, ...] = ()
    """Assumptions, and differences from a run."""

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> SimulatedRank:
        """Return the result that `as_json` returned in another process."""
        groups = tuple(SimulatedGroup(**each) for each in values["groups"])
        traffic = tuple(SimulatedTraffic(**each) for each in values["traffic"])
        return cls(**{**values, "groups": groups, "traffic": traffic, "notes": tuple(values["notes"])})


def simulated_config(cfg: TrainConfig, world: int, on_gpu: bool) -> tuple[TrainConfig, list[str]]:
    """Return the config that is simulated instead of `cfg`, and notes on the differences.

    Args:
        world: Number of ranks.
        on_gpu: Whether the ranks run on GPUs.

    Raises ConfigError with all parts of the config that cannot be simulated.
    """
    raise_all(_problems(cfg))
    cfg = fit_micro_batches(cfg, world)
    model, notes = cfg.model, []
    if on_gpu:
        notes.append("without what a GPU adds: rounding by the allocator, buffers of NCCL, workspaces of kernels")
    else:
        notes.append("with the copies that gloo makes in all-gathers and reduce-scatters")
    compiles = model.compiles(cfg.parallelism, packs=cfg.data.pack, on_gpu=on_gpu)
    if compiles:
        notes.append(f"model.compile={model.compile}: simulated without compilation, which saves fewer activations")
    if model.loss is LossMethod.liger:
        model = replace(model, loss=LossMethod.chunked)
        notes.append("model.loss=liger: simulated as chunked")
    if on_gpu and model.compute_dtype is DType.auto and model.dtype is not DType.float64:
        model = replace(model, compute_dtype=DType.bfloat16)
        notes.append("model.compute_dtype=auto: bfloat16")
    dtype = model.stored_dtype(frozen_on_gpu=on_gpu and cfg.peft.adapts)
    # Compiled layers store no more activations than fused ones.
    fuses = compiles or model.fuses(cfg.parallelism, packs=cfg.data.pack, on_gpu=on_gpu)
    model = replace(model, dtype=dtype, compile="false", fused=Fused.all if fuses else Fused.none)
    if cfg.parallelism.ep > 1:
        notes.append("routing is balanced: every expert gets as many tokens")
    if cfg.data.pack:
        notes.append(f"data.pack=true: rows of {DOCUMENTS} documents")
    if isinstance(cfg, DistillConfig) and cfg.teacher.path is None:
        notes.append(f"teacher.stored: {STORED_TOKENS} tokens per target")
    if isinstance(cfg.optimizer, AdamW8bitConfig):
        notes.append(f"optimizer={cfg.optimizer.kind}: its update is not compiled, with more temporaries")
    if cfg.parallelism.cpu_offload and on_gpu:
        notes.append("parallelism.cpu_offload=true: parameters and optimizer state are not in the peak; gradients are")
    parallelism = replace(cfg.parallelism, activation_offload=False)
    if cfg.parallelism.activation_offload:
        notes.append("parallelism.activation_offload=true: simulated without, so activations are in the peak")
    training = replace(cfg.training, batch_size_ramp=[], seq_len_ramp=[])
    logging = replace(cfg.logging, peak_tflops=None)
    return replace(cfg, model=model, parallelism=parallelism, training=training, logging=logging), notes


def _problems(cfg: TrainConfig) -> list[str]:
    model, policy = cfg.model, cfg.parallelism.activation_checkpointing
    problems = []
    if policy is ActivationCheckpointing.auto:
        problems.append(
            f"parallelism.activation_checkpointing={policy}: depends on the device's memory, so a simulation needs the "
            "policy itself; set it to none, selective, full or alternate"
        )
    if model.attention not in _SIMULATED_ATTENTION:
        problems.append(
            f"model.attention={model.attention}: its kernels need a GPU, which a simulation does not use; set "
            "model.attention=sdpa"
        )
    if model.float8 is not Float8.none:
        problems.append(f"model.float8={model.float8}: is not simulated; set model.float8=none")
    if model.qat is not Qat.none:
        problems.append(f"model.qat={model.qat}: is not simulated; set model.qat=none")
    return problems
