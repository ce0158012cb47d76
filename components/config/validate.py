"""The rules that need several sections and the number of processes. Imports no torch."""

from __future__ import annotations

from components.config.batch import batch_problems
from components.config.errors import ConfigError
from components.config.layouts import (
    AttentionLayout,
    attention_layout,
    local_heads,
    ulysses_divides,
)
from components.config.schema.checkpoint import CheckpointConfig
from components.config.schema.checks import field_values
from components.config.schema.cluster import Device
from components.config.schema.data import DataConfig, MixtureDataConfig, RowsDataConfig
from components.config.schema.logging import ProfileConfig
from components.config.schema.model import NO_FLEX_BACKWARD, Attention, DType, Float8, LossMethod
from components.config.schema.parallelism import (
    SPLIT_BACKWARD,
    ActivationCheckpointing,
    ContextAttention,
    MeshShape,
    ParallelismConfig,
    UnevenHeads,
)
from components.config.schema.recipes import EvaluateConfig, FinetuneConfig, RecipeConfig
from components.config.schema.training import TrainingConfig
from components.config.shape import ModelShape


def validate(cfg: RecipeConfig, world_size: int | None, shape: ModelShape | None = None) -> list[str]:
    """Return every problem of `cfg` on `world_size` processes, each one sentence with value, rule and key.

    Rules that need the mesh are left out where it cannot be resolved, and where `world_size` is None because a key
    that decides it was refused. `shape` is what is known of the model without loading it; unknown numbers (None) are
    checked on rank 0 later.
    """
    mesh, problems = MeshShape(), []
    try:
        if world_size is not None:
            mesh = cfg.parallelism.resolve(world_size)
    except ConfigError as error:
        problems, world_size = error.problems, None
    problems += model_problems(cfg.parallelism, mesh, shape or ModelShape())
    if isinstance(cfg, FinetuneConfig):
        problems += batch_problems(cfg.training, cfg.parallelism, mesh)
        problems += _best_problems(cfg.checkpoint, cfg.training)
        problems += _profile_problems(cfg.logging.profile, cfg.training.max_steps, world_size)
        problems += _row_problems("training.seq_len", cfg.training.seq_len, cfg.parallelism, mesh)
    if isinstance(cfg, EvaluateConfig):
        problems += _row_problems("evaluation.seq_len", cfg.evaluation.seq_len, cfg.parallelism, mesh)
    problems += _peft_problems(cfg)
    problems += _data_problems(cfg.data)
    problems += _compile_problems(cfg, mesh, shape or ModelShape())
    return [
        *problems,
        *_loss_problems(cfg, mesh),
        *_recompute_problems(cfg, mesh),
        *_attention_problems(cfg, mesh),
        *_float8_problems(cfg, mesh),
    ]


def _data_problems(data: DataConfig) -> list[str]:
    """What a source of a mixture may do, but not all the data: have a weight, and hold nothing out."""
    problems = []
    if data.weight is not None:
        problems.append(f"data.weight={data.weight}: only sources of a mixture have weights; leave it out")
    sources = data.sources if isinstance(data, MixtureDataConfig) else {"": data}
    if any(
        each.eval_fraction or each.eval_split is not None or (isinstance(each, RowsDataConfig) and each.eval_path)
        for each in sources.values()
    ):
        return problems
    rule = "nothing is held out, but there is always an evaluation at the end"
    if isinstance(data, MixtureDataConfig):
        problems.append(
            f"data.sources: {', '.join(sources)} have eval_fraction=0: {rule}; set data.sources.NAME.eval_fraction of "
            "one above 0, or its eval_split"
        )
    else:
        other = "data.eval_split or data.eval_path" if isinstance(data, RowsDataConfig) else "data.eval_split"
        problems.append(f"data.eval_fraction={data.eval_fraction}: {rule}; set it above 0, or set {other}")
    return problems


def _attention_problems(cfg: RecipeConfig, mesh: MeshShape) -> list[str]:
    """Where the kernel that was asked for cannot do what the run needs."""
    problems = []
    if cfg.data.pack and cfg.model.attention not in (Attention.sdpa, Attention.sdpa_flash):
        problems.append(
            f"model.attention={cfg.model.attention}: is not told where the documents of packed rows end; set "
            "model.attention=sdpa or data.pack=false"
        )
    if cfg.model.attention == Attention.sdpa_flash and mesh.cp > 1:
        problems.append(
            f"model.attention=sdpa_flash: parallelism.cp={mesh.cp} attends to masks of its own, which the flash kernel "
            "does not take; set model.attention=sdpa"
        )
    training = isinstance(cfg, FinetuneConfig)
    if cfg.model.attention == Attention.flex_attention and cfg.cluster.device == Device.cpu and training:
        problems.append(NO_FLEX_BACKWARD)
    return problems


def _float8_problems(cfg: RecipeConfig, mesh: MeshShape) -> list[str]:
    """Where linear layers cannot be torchao's, or are not computed as modules."""
    if cfg.model.float8 == Float8.none:
        return []
    key = f"model.float8={cfg.model.float8}"
    problems = []
    if cfg.cluster.device == Device.cpu and not cfg.model.float8_emulate:
        problems.append(
            f"{key}: CPUs have no float8 products, and cluster.device=cpu; set model.float8=none "
            "(model.float8_emulate=true shows its rounding, slowly)"
        )
    if mesh.tp > 1:
        problems.append(
            f"{key}: layers that parallelism.tp={mesh.tp} divides are computed from their weights alone; set "
            "model.float8=none, or parallelism.tp=1"
        )
    peft = field_values(cfg).get("peft")
    if peft is not None and peft.adapts:
        problems.append(f"{key}: layers with adapters are not computed in float8; set model.float8=none, or peft=none")
    if mesh.pp > 1 and cfg.parallelism.pp_schedule in SPLIT_BACKWARD:
        problems.append(
            f"{key}: parallelism.pp_schedule={cfg.parallelism.pp_schedule} splits the backward, which float8 layers do "
            "in one piece; set model.float8=none or parallelism.pp_schedule=Interleaved1F1B"
        )
    return problems


def _recompute_problems(cfg: RecipeConfig, mesh: MeshShape) -> list[str]:
    """Keeping some results of a layer needs its backward in one piece, and in the open."""
    if cfg.parallelism.activation_checkpointing != ActivationCheckpointing.selective:
        return []
    problems = []
    if cfg.model.compile:
        problems.append(
            "parallelism.activation_checkpointing=selective: a compiled layer is recomputed as a whole (by itself it "
            "keeps what is dear to recompute); set it to none, full or alternate, or model.compile=false"
        )
    if mesh.pp > 1 and cfg.parallelism.pp_schedule in SPLIT_BACKWARD:
        problems.append(
            "parallelism.activation_checkpointing=selective: needs the backward of a layer in one piece, which "
            f"parallelism.pp_schedule={cfg.parallelism.pp_schedule} splits; set full, or "
            "parallelism.pp_schedule=Interleaved1F1B"
        )
    return problems


def _loss_problems(cfg: RecipeConfig, mesh: MeshShape) -> list[str]:
    """Where the loss cannot be computed as it was asked for by name."""
    asked = f"model.loss={cfg.model.loss}"
    if cfg.model.loss not in (LossMethod.chunked, LossMethod.liger):
        return []
    problems = []
    if cfg.model.loss == LossMethod.liger:
        if cfg.cluster.device == Device.cpu:
            problems.append(
                f"{asked}: liger-kernel computes on GPUs only, and cluster.device=cpu; set model.loss=chunked"
            )
        if mesh.tp > 1:
            problems.append(
                f"{asked}: liger-kernel needs the whole vocabulary, and parallelism.tp={mesh.tp} shares it out; set "
                "model.loss=chunked"
            )
        if mesh.pp > 1 and cfg.parallelism.pp_schedule in SPLIT_BACKWARD:
            problems.append(
                f"{asked}: parallelism.pp_schedule={cfg.parallelism.pp_schedule} asks for gradients twice, and "
                "liger-kernel gives them once; set model.loss=chunked"
            )
    return problems


def _peft_problems(cfg: RecipeConfig) -> list[str]:
    peft = field_values(cfg).get("peft")
    if peft is None or not peft.adapts:
        return []
    problems = []
    if isinstance(cfg, EvaluateConfig) and cfg.evaluation.checkpoint is None:
        problems.append(
            f"peft.method={peft.method}: without evaluation.checkpoint there are no trained adapters to evaluate; set "
            "it to a checkpoint (.../checkpoints/step_N), or set peft=none"
        )
    return problems


def _compile_problems(cfg: RecipeConfig, mesh: MeshShape, shape: ModelShape) -> list[str]:
    if not cfg.model.compile:
        return []
    problems = []
    if mesh.pp > 1 and cfg.parallelism.pp_schedule in SPLIT_BACKWARD:
        problems.append(
            f"parallelism.pp_schedule={cfg.parallelism.pp_schedule}: splits the backward, which compiled layers do in "
            "one piece; set model.compile=false or parallelism.pp_schedule=Interleaved1F1B"
        )
    if shape.experts and mesh.ep == 1 and DType.float64 in (cfg.model.dtype, cfg.model.compute_dtype):
        problems.append(
            "model.compile=true: experts in float64 are computed in a loop over those that got tokens, which cannot be "
            "compiled; set model.compile=false, or model.dtype=float32"
        )
    return problems


def model_problems(parallelism: ParallelismConfig, mesh: MeshShape, shape: ModelShape) -> list[str]:
    """Return what of the model's shape the mesh cannot divide. Checked before loading and again after."""
    problems: list[str] = []
    if shape.heads is not None and mesh.tp > 1 and parallelism.uneven_heads == UnevenHeads.refuse:
        kv_heads = shape.kv_heads or shape.heads
        if attention_layout(shape.heads, kv_heads, mesh.tp) == AttentionLayout.replicated:
            problems.append(
                f"parallelism.tp={mesh.tp}: the model has {shape.heads} attention heads and {kv_heads} kv heads, "
                f"which {mesh.tp} ranks cannot share evenly; change parallelism.tp, or set "
                "parallelism.uneven_heads=replicate to compute attention on every tp rank"
            )
    if shape.mlp is not None and shape.mlp % mesh.tp and parallelism.tp_plan is None:
        problems.append(
            f"parallelism.tp={mesh.tp}: does not divide the {shape.mlp} features of the model's MLPs; change "
            "parallelism.tp"
        )
    stages = len(parallelism.stage_places(mesh.pp))
    if shape.layers is not None and shape.layers < stages:
        fewer = ", or parallelism.pp_schedule=1F1B, a stage per rank" if stages > mesh.pp else ""
        problems.append(
            f"parallelism.pp={mesh.pp}: {parallelism.pp_schedule} makes {stages} stages of it, but the model has only "
            f"{shape.layers} layers; set a smaller parallelism.pp{fewer}"
        )
    if shape.heads is not None and mesh.cp > 1 and parallelism.cp_attention == ContextAttention.ulysses:
        heads, kv_heads = local_heads(shape.heads, shape.kv_heads or shape.heads, mesh.tp)
        if not ulysses_divides(heads, kv_heads, mesh.cp):
            problems.append(
                f"parallelism.cp_attention=ulysses: cp {mesh.cp} cannot share the {heads} heads and {kv_heads} kv "
                "heads of a rank evenly; set parallelism.cp_attention=all_gather, or another parallelism.cp"
            )
    if mesh.ep > 1 and shape.experts == 0:
        problems.append(f"parallelism.ep={mesh.ep}: the model is dense, it has no experts; set parallelism.ep=1")
    elif shape.experts is not None and shape.experts % mesh.ep:
        problems.append(
            f"parallelism.ep={mesh.ep}: does not divide the model's {shape.experts} experts; change parallelism.ep"
        )
    return problems


def _row_problems(key: str, seq_len: int, parallelism: ParallelismConfig, mesh: MeshShape) -> list[str]:
    multiple = parallelism.sequence_multiple(mesh)
    if seq_len % multiple == 0:
        return []
    why = " and ".join(
        text
        for text, applies in (
            (f"cp {mesh.cp} cuts a row into {2 * mesh.cp} chunks", mesh.cp > 1),
            (f"sequence parallel cuts what a rank holds into tp {mesh.tp}", parallelism.sequence_parallel),
        )
        if applies
    )
    return [f"{key}={seq_len}: must be a multiple of {multiple}, because {why}; change {key}"]


def _best_problems(checkpoint: CheckpointConfig, training: TrainingConfig) -> list[str]:
    """The best checkpoint is one of those whose own step was evaluated: that must be every one that is due."""
    if not checkpoint.keep_best:
        return []
    if training.eval_every == 0:
        return [
            "checkpoint.keep_best=true: needs the evaluation loss of each checkpoint, but training.eval_every=0; set "
            "training.eval_every"
        ]
    if checkpoint.every == 0 or checkpoint.every % training.eval_every:
        return [
            f"checkpoint.keep_best=true: needs checkpoint.every={checkpoint.every} to be a multiple of "
            f"training.eval_every={training.eval_every}, so that each checkpoint has an evaluation loss; change "
            "checkpoint.every or training.eval_every"
        ]
    return []


def _profile_problems(profile: ProfileConfig, max_steps: int, world_size: int | None) -> list[str]:
    """A trace is written when its last step is done, by the ranks that are there."""
    if not profile.enabled:
        return []
    problems = []
    if (last := profile.start + profile.steps - 1) > max_steps:
        problems.append(
            f"logging.profile.start={profile.start}: the trace of {profile.steps} steps ends with step {last}, but "
            f"training.max_steps={max_steps}; change logging.profile.start or logging.profile.steps"
        )
    if world_size is not None and (absent := [rank for rank in profile.ranks if rank >= world_size]):
        problems.append(
            f"logging.profile.ranks={profile.ranks}: there is no rank {absent[0]} of {world_size}; change "
            "logging.profile.ranks"
        )
    return problems
