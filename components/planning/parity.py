"""Comparison of meshes with one process of plain PyTorch: losses, gradients of the first step, and replicas.

The processes: one for the reference, then N that train on one mesh after the other. If a rank fails, its mesh is
reported as failed, and the remaining meshes run in new processes.

The tokenizer, the data and the model are built as recipes/finetune.py builds them, except that dropout is off: its
random streams differ between meshes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from components import checkpoint, data, distributed, models, training
from components.batch import Batch
from components.config.schema.model import RouterAux
from components.config.schema.objective import NextTokenConfig
from components.config.schema.optimizer import AdamWConfig
from components.config.schema.recipes import FinetuneConfig
from components.json_collectives import all_gather_json
from components.models.weights.weight_files import write_file
from components.planning.formulas.ranking import MeshPlan
from components.planning.parity_reference import Curve, Hyperparameters, Sample, compute_in_float64, reference
from components.protocol.errors import ConfigError
from components.protocol.failures import LOST_PEER
from components.protocol.processes import reserve_loopback_port, without_ranks
from components.torch_kernels import torch_dtype

_MESHES_PER_START = 40
"""Meshes that run in the same processes, limited because each leaves its process groups and their sockets open."""
_GRACE_SECONDS = 3.0
"""Time after a rank's failure in which other ranks may report theirs, one of which may be the root cause."""
FLOOR = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Minimum denominator of a gradient's relative error, as a fraction of the global norm. Some gradients are zero
mathematically (the bias of a key projection), so that only rounding errors remain of them."""
_COMPARED_STEPS = 50
"""Number of steps whose losses and norms are compared. Training amplifies rounding, so later steps of correct programs
differ too."""
_SPREAD = 4
"""Factor for the bounds of bfloat16, which are measured: _SPREAD times the difference between bfloat16 and float32 in
one process. A mesh rounds in another order, so its difference is another sample of the same distribution."""


def compare(comparison: Comparison, plans: list[MeshPlan], log: Callable[[str], None]) -> Iterator[MeshResult | Bounds]:
    """Yield the bounds, then the result of each mesh once it is complete.

    Raises:
        ConfigError: The reference raised it.
        RuntimeError: The reference failed otherwise.
    """
    with tempfile.TemporaryDirectory(prefix="parity-") as temporary:
        folder = Path(temporary)
        log("one process in plain PyTorch ...")
        for _, outcome in _run_ranks(1, _reference_rank, (comparison, folder), 1):
            if isinstance(outcome, ConfigError):
                raise outcome
            if isinstance(outcome, str):
                raise RuntimeError(f"the reference failed: {outcome}")
        yield Bounds(**json.loads((folder / "bounds.json").read_text()))
        yield from (MeshResult(plan.name, rejected=list(plan.problems)) for plan in plans if plan.problems)
        pending = [plan for plan in plans if plan.is_legal]
        while pending:
            started = pending[:_MESHES_PER_START]
            done = 0
            for name, outcome in _run_ranks(
                comparison.processes, _mesh_rank, (comparison, started, folder), len(started)
            ):
                failed = not isinstance(outcome, MeshResult)
                result = MeshResult(started[done].name, failed=str(outcome)) if failed else outcome
                done += 1
                yield replace(result, mesh=name or result.mesh)
            pending = pending[max(done, 1) :]


def _run_ranks(
    processes: int, target: Callable[..., None], args: tuple[Any, ...], count: int
) -> Iterator[tuple[str, Any]]:
    """Start ranks and yield `count` messages (name, outcome) of rank 0; after a rank's failure, yield that and stop."""
    context = get_context("spawn")
    reserved = reserve_loopback_port()
    port = reserved.getsockname()[1]
    threads = str(max((os.cpu_count() or 1) // processes, 1))
    pipes, ranks = [], []
    for rank in range(processes):
        receiver, sender = context.Pipe(duplex=False)
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": threads}
        variables |= {name: str(number) for name, number in numbers.items()}
        process = context.Process(target=_rank_main, args=(target, sender, variables, args), daemon=True)
        process.start()
        sender.close()
        pipes.append(receiver)
        ranks.append(process)
    try:
        for _ in range(count):
            message = _next_message(pipes)
            yield message
            if not isinstance(message[1], MeshResult | None):
                return
    finally:
        for process in ranks:
            process.kill()
            process.join()
        reserved.close()


def _next_message(pipes: list[Any]) -> tuple[str, Any]:
    """Return the next message of rank 0, or a rank's failure: preferably a root cause, not a lost connection."""
    failures: list[Any] = []
    deadline: float | None = None
    open_pipes: list[Any] = list(pipes)
    while open_pipes and (deadline is None or time.monotonic() < deadline):
        ready: list[Any] = wait(open_pipes, timeout=0.5)
        for pipe in ready:
            try:
                name, outcome = pipe.recv()
            except EOFError:
                open_pipes.remove(pipe)
                name, outcome = "", "a process died"
            if isinstance(outcome, MeshResult | None):
                return name, outcome
            failures.append(outcome)
            deadline = deadline or time.monotonic() + _GRACE_SECONDS
    root_causes = [
        failure for failure in failures if not any(sign in str(failure) for sign in (*LOST_PEER, "a process died"))
    ]
    return "", (root_causes or failures)[0]


def _rank_main(
    target: Callable[..., None], sender: Connection, variables: dict[str, str], args: tuple[Any, ...]
) -> None:
    """Run `target` as one rank; send its messages and its failure to the parent, then wait to be killed."""
    inherited = without_ranks(os.environ)
    os.environ.clear()
    os.environ |= inherited | variables
    torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    try:
        target(lambda name, outcome: sender.send((name, outcome)), *args)
    except ConfigError as error:
        sender.send(("", error))
    except Exception as error:
        traceback.print_exc()
        sender.send(("", f"{type(error).__name__}: {error}".splitlines()[0]))
    sys.stdout.flush()
    sys.stderr.flush()
    with suppress(KeyboardInterrupt):
        time.sleep(3600)  # stay alive until the parent kills it: a peer may still receive data that this rank sent


@dataclass(frozen=True)
class Comparison:
    """Job to compare on all meshes, and options of the comparison."""

    cfg: FinetuneConfig
    processes: int
    steps: int
    dtype: str
    gradients: bool
    """Whether to compare the gradients of the first step."""
    out: Path
    """Folder of the report."""


@dataclass(frozen=True)
class Bounds:
    """Largest relative differences that rounding can explain."""

    loss: float
    norm: float
    gradient: float


BOUNDS = {"float32": Bounds(1e-5, 1e-5, 1e-4), "float64": Bounds(1e-9, 1e-9, 1e-10)}
"""Adam amplifies rounding from step to step, so bounds of curves are larger than those of the first gradients."""


@dataclass(slots=True)
class MeshResult:
    """Worst relative differences over the ranks of a mesh, and other failures; written as a row of the report."""

    mesh: str
    accumulation: int = 0
    loss: float = 0.0
    norm: float = 0.0
    gradient: float = 0.0
    worst_gradient: str = ""
    different_replicas: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)
    failed: str = ""

    def wrong(self, bounds: Bounds) -> list[str]:
        """Return short descriptions of all failures; empty if the mesh agrees with the reference."""
        if self.failed:
            return [f"failed: {self.failed}"]
        differences = [
            f"{quantity} off by {value:.1e}"
            for quantity, value, bound in (
                ("loss", self.loss, bounds.loss),
                ("norm", self.norm, bounds.norm),
                (f"gradient of {self.worst_gradient}", self.gradient, bounds.gradient),
            )
            if not value <= bound
        ]
        if self.different_replicas:
            differences.append(f"replicas differ: {', '.join(self.different_replicas[:3])}")
        if self.missing:
            differences.append(f"no rank has {', '.join(self.missing[:3])}")
        return differences


def _reference_rank(send: Callable[[str, Any], None], comparison: Comparison, folder: Path) -> None:
    """Train in one process and write the curve, the gradients of the first step and the bounds to `folder`."""
    cfg = comparison.cfg
    info = distributed.start_process_group(cfg.cluster.device)
    tokenizer, dataset = _tokenizer_and_data(cfg)
    batches = _batches(cfg, dataset)

    def samples_of(step: int) -> Iterator[Sample]:
        for index in batches.global_batch(step):
            row = dataset[index]
            for sample in row.examples if isinstance(row, data.PackedRow) else [row]:
                yield torch.tensor(sample.input_ids), torch.tensor(sample.labels)

    def curve_of(autocast: torch.dtype | None) -> Curve:
        model = models.build_on_meta(cfg.model, len(tokenizer)).eval()
        models.add_adapters(model, cfg.peft, exports=False)
        models.select_trained(model, cfg.training, cfg.optimizer.groups)
        model.set_attn_implementation(str(cfg.model.attention))  # transformers' attention with its masks
        if comparison.dtype == "float64":
            compute_in_float64(model)
        models.materialize(model, info.device)
        models.fill_weights(model, cfg.model, cfg.run.seed)
        if cfg.peft.path is not None:
            models.read_adapter(model, cfg.peft)
        settings = replace(_hyperparameters(comparison), autocast=autocast, router_aux=_router_coefficient(cfg, model))
        return reference(model, samples_of, settings)

    curve, bounds = curve_of(None), BOUNDS.get(comparison.dtype)
    if bounds is None:
        rounded = curve_of(torch_dtype(comparison.dtype))
        floor = _floor(curve.norms[0], torch.float32)
        gradients = [relative(rounded.gradients[name], exact, floor) for name, exact in curve.gradients.items()]
        loss = worst_difference(rounded.losses, curve.losses)
        norm = worst_difference(rounded.norms, curve.norms)
        bounds = Bounds(_SPREAD * loss, _SPREAD * norm, _SPREAD * max(gradients))
    write_file(folder / "gradients.safetensors", curve.gradients)
    (folder / "curve.json").write_text(json.dumps({"losses": curve.losses, "norms": curve.norms}))
    (folder / "bounds.json").write_text(json.dumps(asdict(bounds)))
    send("", None)


def _mesh_rank(send: Callable[[str, Any], None], comparison: Comparison, plans: list[MeshPlan], folder: Path) -> None:
    """Train on one mesh after the other; rank 0 sends each mesh's name and result."""
    cfg = comparison.cfg
    distributed.start_process_group(cfg.cluster.device, collective_timeout=cfg.cluster.collective_timeout)
    expected = Curve(**json.loads((folder / "curve.json").read_text()))
    tokenizer, dataset = _tokenizer_and_data(cfg)
    for plan in plans:
        started = time.perf_counter()
        try:
            row = _run_mesh(comparison, plan, (len(tokenizer), tokenizer.pad_token_id, dataset), expected, folder)
            row.seconds = time.perf_counter() - started
        except ConfigError as error:  # raised on every rank, before the first collective of training
            row = MeshResult(plan.name, rejected=error.problems)
        if dist.get_rank() == 0:
            send(plan.name, row)


def _run_mesh(
    comparison: Comparison, plan: MeshPlan, samples: tuple[int, int, Any], expected: Curve, folder: Path
) -> MeshResult:
    """Train on one mesh as the recipe does; return the same result on every rank.

    Args:
        samples: (vocabulary size, padding token, data set).
    """
    cfg, (vocab_size, pad_token, dataset) = plan.cfg, samples
    info = distributed.start_process_group(cfg.cluster.device)
    mesh = distributed.build_mesh(cfg.parallelism, info.device.type)
    batches = _batches(cfg, dataset, mesh, data.Padding(multiple=mesh.sequence_multiple, token_id=pad_token))
    model = models.build_on_meta(cfg.model, vocab_size).eval()
    anatomy = models.read_anatomy(model)
    models.add_adapters(model, cfg.peft, exports=False)
    models.select_trained(model, cfg.training, cfg.optimizer.groups)
    if comparison.dtype == "float64":
        compute_in_float64(model)
    eager = replace(cfg, model=replace(cfg.model, compile="false"))
    prepared = training.prepare_built(model, anatomy, eager, training.RunContext(mesh, info.device))
    notes = [note for note in prepared.notes if isinstance(note, str)]  # about the mesh; the others are about the step
    row = MeshResult(plan.name, len(batches.at(0)), notes=notes)
    if comparison.gradients:
        row.gradient, row.worst_gradient, row.missing = _gradients(prepared, batches.at(0), expected, folder)
    (optimizer,) = checkpoint.list_optimizers(training.build_optimizer(prepared, cfg.optimizer))
    curve = train_on_mesh(prepared, optimizer, batches.at, _hyperparameters(comparison))
    row.loss = worst_difference(curve.losses, expected.losses)
    row.norm = worst_difference(curve.norms, expected.norms)
    row.different_replicas = _differing_replicas(model)
    return _merge(row)


def _gradients(
    prepared: training.Prepared, batches: list[Batch], expected: Curve, folder: Path
) -> tuple[float, str, list[str]]:
    """Return this rank's worst gradient error, the name of its parameter, and parameters that no rank has."""
    worst, seen = (0.0, ""), set()
    with safe_open(folder / "gradients.safetensors", framework="pt") as stored:

        def visit(name: str, gradient: torch.Tensor) -> None:
            nonlocal worst
            seen.add(name)
            if name not in stored.keys():  # noqa: SIM118 (safe_open has no __contains__)
                worst = (float("inf"), name)
                return
            error = relative(gradient, stored.get_tensor(name).to(gradient), _floor(expected.norms[0], gradient.dtype))
            worst = max(worst, (error if error == error else float("inf"), name))

        _visit_gradients(prepared, batches, visit)
        by_rank = all_gather_json(sorted(seen))
        return *worst, sorted(set(stored.keys()) - set().union(*by_rank))


def _merge(row: MeshResult) -> MeshResult:
    """Combine the results of all ranks: the worst differences, and all replicas that differ."""
    by_rank = [MeshResult(**each) for each in all_gather_json(asdict(row))]
    worst = max(by_rank, key=lambda each: each.gradient)
    return replace(
        worst,
        loss=max(each.loss for each in by_rank),
        norm=max(each.norm for each in by_rank),
        different_replicas=sorted({name for each in by_rank for name in each.different_replicas}),
    )


def _tokenizer_and_data(cfg: FinetuneConfig) -> tuple[Any, Any]:
    tokenizer = models.load_tokenizer(cfg.model)
    return tokenizer, data.build_dataset(cfg.data, tokenizer, seq_len=cfg.training.seq_len, split="train")


def _batches(
    cfg: FinetuneConfig, dataset: Any, mesh: Any = None, padding: data.Padding | None = None
) -> data.TrainBatches:
    rank, size = (mesh.rank("dp"), mesh.size("dp")) if mesh else (0, 1)
    plan = data.BatchPlan.of(cfg.training, cfg.data, rank, size, padding)
    return data.TrainBatches(dataset, plan, seed=cfg.run.seed)


def _hyperparameters(comparison: Comparison) -> Hyperparameters:
    cfg = comparison.cfg
    if not isinstance(cfg.optimizer, AdamWConfig) or cfg.training.max_steps is None:
        raise TypeError("the reference needs AdamW and training.max_steps, which scripts/parity.py requires")
    return Hyperparameters(
        cfg.optimizer,
        comparison.steps,
        cfg.training.max_steps,
        cfg.training.max_grad_norm,
        label_smoothing=cfg.objective.label_smoothing,
        z_loss=cfg.objective.z_loss,
        stages=data.BatchPlan.of(cfg.training, cfg.data, 0, 1).stages,
    )


def _router_coefficient(cfg: FinetuneConfig, model: Any) -> float:
    config = model.config.get_text_config()
    default = getattr(config, "router_aux_loss_coef", None) if hasattr(config, "num_experts_per_tok") else None
    coefficient = default if cfg.model.router_aux_coef is None else cfg.model.router_aux_coef
    return 0.0 if cfg.model.router_aux == RouterAux.none else coefficient or 0.0


def _floor(norm: float, dtype: torch.dtype) -> float:
    return norm * FLOOR[dtype]


def train_on_mesh(
    model: training.Prepared,
    optimizer: torch.optim.Optimizer,
    batches_of: Callable[[int], list[Batch]],
    settings: Hyperparameters,
) -> Curve:
    """Train a prepared model on this rank's micro-batches of each step, and return its curve."""
    curve = Curve()
    terms = NextTokenConfig(label_smoothing=settings.label_smoothing, z_loss=settings.z_loss)
    objective = training.NextToken(terms)
    for step in range(settings.steps):
        training.set_learning_rate(optimizer, settings.optimizer, step, settings.max_steps, settings.stages)
        numbers = training.train_step(model, batches_of(step), optimizer, objective)
        curve.losses.append(numbers["loss"].item())
        curve.norms.append(numbers["grad_norm"].item())
    return curve


def _visit_gradients(
    model: training.Prepared, batches: list[Batch], visit: Callable[[str, torch.Tensor], None]
) -> None:
    """Call `visit` with the name and the full gradient of each parameter of this rank.

    The gradients are those that an optimizer step would use; the weights do not change. A collective: sharded gradients
    are gathered, one at a time.
    """

    # An optimizer, because only its `step` runs between the reduction of the gradients and `zero_grad`.
    class Visitor(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for name, parameter in model.module.named_parameters():
                if (gradient := parameter.grad) is not None:
                    visit(name, gradient.full_tensor() if isinstance(gradient, DTensor) else gradient)

    visitor = Visitor(model.module.parameters(), lr=0.0)
    visitor.param_groups[0]["fused"] = False
    training.train_step(replace(model, settings=replace(model.settings, max_grad_norm=0.0)), batches, visitor)


def _differing_replicas(model: nn.Module) -> list[str]:
    """Return the names of parameters of which two ranks hold the same shard with different bits. A collective."""
    digests = {}
    for name, parameter in model.named_parameters():
        coordinate: tuple[Any, ...] = ()
        local = parameter.detach()
        if isinstance(parameter, DTensor):
            mesh, local = parameter.device_mesh, parameter.to_local().detach()
            coordinate = tuple(
                mesh.get_local_rank(dim) for dim, each in enumerate(parameter.placements) if not each.is_replicate()
            )
        content = local.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        digests[f"{name} {coordinate}"] = hashlib.sha256(content).hexdigest()
    by_rank = all_gather_json(digests)
    different = {
        shard.partition(" ")[0]
        for shard, digest in digests.items()
        if any(other.get(shard, digest) != digest for other in by_rank)
    }
    return sorted(different)


def relative(value: torch.Tensor, expected: torch.Tensor, floor: float = 0.0) -> float:
    """Return ||value - expected|| / max(||expected||, floor), or the absolute difference if that denominator is 0."""
    scale = max(expected.double().norm().item(), floor)
    return (value - expected).double().norm().item() / (scale if scale > 0 else 1.0)


def worst_difference(values: list[float], expected: list[float]) -> float:
    """Return the largest |value - expected| / |expected| in the first _COMPARED_STEPS of two curves.

    Infinite if the curves differ in length or hold a value that is not finite.
    """
    if len(values) != len(expected) or not all(map(math.isfinite, [*values, *expected])):
        return math.inf
    pairs = zip(values[:_COMPARED_STEPS], expected[:_COMPARED_STEPS], strict=True)
    return max((abs(value - exact) / abs(exact) for value, exact in pairs), default=0.0)
