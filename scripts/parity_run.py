"""What a rank of `parity.py` does: the curve of one process, and the curve of each mesh, on the user's model and data.

Tokenizer, data and model are made as recipes/finetune.py makes them, with dropout off: its streams differ by mesh.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from components import data, distributed, models, training
from components.batch import Batch
from components.config.errors import ConfigError
from components.config.schema.model import RouterAux
from components.config.schema.recipes import FinetuneConfig
from components.exchange import all_gather_json
from scripts import parity_curves as curves
from scripts.parity_curves import Course, Curve, Sample
from scripts.parity_shapes import MeshPlan


@dataclass(frozen=True)
class Comparison:
    """What is compared."""

    cfg: FinetuneConfig
    processes: int
    steps: int
    dtype: str
    gradients: bool
    out: Path


@dataclass(frozen=True)
class Bounds:
    """The largest relative differences that are rounding."""

    loss: float
    norm: float
    gradient: float


BOUNDS = {"float32": Bounds(1e-5, 1e-5, 1e-4), "float64": Bounds(1e-9, 1e-9, 1e-10)}
"""Adam steps amplify rounding a little from step to step, so a curve has more of it than the first gradients."""
SPREAD = 4
"""bfloat16's bounds are measured: so many times what the type does to the curve of one process. A mesh rounds in
another order, so its distance from float32 is another draw of one spread, of which the largest of few is known."""


@dataclass(slots=True)
class Row:
    """What a mesh showed: the worst relative differences of its ranks."""

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
    refused: list[str] = field(default_factory=list)
    failed: str = ""

    def wrong(self, bounds: Bounds) -> list[str]:
        """Return what is wrong, in a few words each; nothing for a good row."""
        if self.failed:
            return [f"failed: {self.failed}"]
        found = [
            f"{what} off by {value:.1e}"
            for what, value, bound in (
                ("loss", self.loss, bounds.loss),
                ("norm", self.norm, bounds.norm),
                (f"gradient of {self.worst_gradient}", self.gradient, bounds.gradient),
            )
            if not value <= bound
        ]
        if self.different_replicas:
            found.append(f"replicas differ: {', '.join(self.different_replicas[:3])}")
        if self.missing:
            found.append(f"no rank has {', '.join(self.missing[:3])}")
        return found


def reference_rank(send: Callable[[str, Any], None], comparison: Comparison, folder: Path) -> None:
    """Write curve, first gradients and bounds to `folder`."""
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
        model.set_attn_implementation(str(cfg.model.attention))  # transformers' own, with its masks
        if comparison.dtype == "float64":
            curves.compute_in_float64(model)
        models.materialize(model, info.device)
        models.fill_weights(model, cfg.model, cfg.run.seed)
        course = replace(_course(comparison), autocast=autocast, router_aux=_router_coefficient(cfg, model))
        return curves.reference(model, samples_of, course)

    curve, bounds = curve_of(None), BOUNDS.get(comparison.dtype)
    if bounds is None:
        rounded = curve_of(getattr(torch, comparison.dtype))
        floor = _floor(curve.norms[0], torch.float32)
        gradients = [curves.relative(rounded.gradients[name], whole, floor) for name, whole in curve.gradients.items()]
        loss, norm = (
            curves.worst_difference(getattr(rounded, name), getattr(curve, name)) for name in ("losses", "norms")
        )
        bounds = Bounds(SPREAD * loss, SPREAD * norm, SPREAD * max(gradients))
    save_file({name: gradient.cpu() for name, gradient in curve.gradients.items()}, folder / "gradients.safetensors")
    (folder / "curve.json").write_text(json.dumps({"losses": curve.losses, "norms": curve.norms}))
    (folder / "bounds.json").write_text(json.dumps(asdict(bounds)))
    send("", None)


def mesh_rank(send: Callable[[str, Any], None], comparison: Comparison, plans: list[MeshPlan], folder: Path) -> None:
    """Go through meshes, and send the name and the row of each on rank 0."""
    cfg = comparison.cfg
    distributed.start_process_group(cfg.cluster.device, collective_timeout=cfg.cluster.collective_timeout)
    expected = Curve(**json.loads((folder / "curve.json").read_text()))
    tokenizer, dataset = _tokenizer_and_data(cfg)
    for plan in plans:
        started = time.perf_counter()
        try:
            row = _run_mesh(comparison, plan, (len(tokenizer), tokenizer.pad_token_id, dataset), expected, folder)
            row.seconds = time.perf_counter() - started
        except ConfigError as error:  # alike on every rank, before any of them trains
            row = Row(plan.name, refused=error.problems)
        if dist.get_rank() == 0:
            send(plan.name, row)


def _run_mesh(
    comparison: Comparison, plan: MeshPlan, samples: tuple[int, int, Any], expected: Curve, folder: Path
) -> Row:
    """Train on one mesh as the recipe does; every rank returns the same row.

    Args:
        samples: Tokens of the tokenizer, the one that pads, and the data set.
    """
    cfg, (vocabulary, pad_token, dataset) = plan.cfg, samples
    info = distributed.start_process_group(cfg.cluster.device)
    mesh = distributed.build_mesh(cfg.parallelism, info.device.type)
    batches = _batches(cfg, dataset, mesh, data.Padding(multiple=mesh.sequence_multiple, token_id=pad_token))
    compute_dtype, _ = training.compute_dtype(cfg.model, info.device)
    model = models.build_on_meta(cfg.model, vocabulary).eval()
    anatomy = models.read_anatomy(model)
    models.add_adapters(model, cfg.peft, exports=False)
    if comparison.dtype == "float64":
        curves.compute_in_float64(model)
    layout = distributed.parallelize(model, mesh, cfg.parallelism, compute_dtype, anatomy)
    router_loss = training.attach_router_loss(model, cfg.model, mesh, anatomy)
    loss_head = training.attach_loss_head(model, cfg, mesh, layout.stages, info.device)
    recomputed = training.choose_checkpointing(model, cfg, mesh, info.device, compute_dtype, anatomy=anatomy)
    models.checkpoint_activations(model, recomputed.policy, anatomy)
    models.materialize(model, info.device)
    models.fill_weights(model, cfg.model, cfg.run.seed)
    called = distributed.wrap_replicas(model, mesh, cfg.parallelism, layout)
    settings = training.StepSettings(
        device=info.device,
        max_grad_norm=cfg.training.max_grad_norm,
        defer_grad_sync=cfg.parallelism.defer_grad_sync,
        mesh=mesh,
        autocast=training.autocast_dtype(cfg.parallelism, cfg.model, compute_dtype),
        router_loss=router_loss,
        loss_head=loss_head,
    )
    prepared = training.Prepared(model, settings, called)
    row = Row(plan.name, len(batches.at(0)), notes=list(layout.notes))
    if comparison.gradients:
        row.gradient, row.worst_gradient, row.missing = _gradients(prepared, batches.at(0), expected, folder)
    optimizer = training.build_optimizer(model, cfg.optimizer)
    curve = curves.train_on_mesh(prepared, optimizer, batches.at, _course(comparison))
    row.loss = curves.worst_difference(curve.losses, expected.losses)
    row.norm = curves.worst_difference(curve.norms, expected.norms)
    row.different_replicas = curves.differing_replicas(model)
    return _merge(row)


def _gradients(
    model: training.Prepared, batches: list[Batch], expected: Curve, folder: Path
) -> tuple[float, str, list[str]]:
    """The worst gradient of this rank, its name, and the names of parameters that no rank has."""
    worst, seen = (0.0, ""), set()
    with safe_open(folder / "gradients.safetensors", framework="pt") as stored:

        def visit(name: str, gradient: torch.Tensor) -> None:
            nonlocal worst
            seen.add(name)
            if name not in stored.keys():  # noqa: SIM118 (a file's, no dict's)
                worst = (float("inf"), name)
                return
            error = curves.relative(
                gradient, stored.get_tensor(name).to(gradient), _floor(expected.norms[0], gradient.dtype)
            )
            worst = max(worst, (error if error == error else float("inf"), name))

        curves.visit_gradients(model, batches, visit)
        everyone = all_gather_json(sorted(seen))
        return *worst, sorted(set(stored.keys()) - set().union(*everyone))


def _merge(row: Row) -> Row:
    everyone = [Row(**each) for each in all_gather_json(asdict(row))]
    worst = max(everyone, key=lambda each: each.gradient)
    return replace(
        worst,
        loss=max(each.loss for each in everyone),
        norm=max(each.norm for each in everyone),
        different_replicas=sorted({name for each in everyone for name in each.different_replicas}),
    )


def _tokenizer_and_data(cfg: FinetuneConfig) -> tuple[Any, Any]:
    tokenizer = models.load_tokenizer(cfg.model)
    return tokenizer, data.build_dataset(cfg.data, tokenizer, seq_len=cfg.training.seq_len, split="train")


def _batches(
    cfg: FinetuneConfig, dataset: Any, mesh: Any = None, padding: data.Padding | None = None
) -> data.TrainBatches:
    dp = (mesh.rank("dp"), mesh.size("dp")) if mesh else (0, 1)
    plan = data.BatchPlan.of(cfg.training, *dp, padding)
    return data.TrainBatches(dataset, plan, seed=cfg.run.seed)


def _course(comparison: Comparison) -> Course:
    cfg = comparison.cfg
    return Course(cfg.optimizer, comparison.steps, cfg.training.max_steps, cfg.training.max_grad_norm)


def _router_coefficient(cfg: FinetuneConfig, model: Any) -> float:
    config = model.config.get_text_config()
    own = getattr(config, "router_aux_loss_coef", None) if hasattr(config, "num_experts_per_tok") else None
    asked = own if cfg.model.router_aux_coef is None else cfg.model.router_aux_coef
    return 0.0 if cfg.model.router_aux == RouterAux.none else asked or 0.0


def _floor(norm: float, dtype: torch.dtype) -> float:
    return norm * curves.FLOOR[dtype]
