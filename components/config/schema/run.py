"""`run`, `checkpoint`, `logging` and `peft`: directory, resume, saves, export, console, trackers, adapters."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from components.protocol.errors import above, at_least, field_values, raise_all, within
from components.storage.object_store import is_url, url_problems

if TYPE_CHECKING:
    from components.config.schema.training import TrainingConfig

_DEFINING_KEYS = (
    "run.seed", "training.global_batch_size", "training.batch_size_ramp", "training.seq_len",
    "training.seq_len_ramp", "training.trainable", "training.freeze",
    "model.path", "model.config", "model.rope", "model.new_tokens", "data",
    "peft.method", "peft.rank", "peft.alpha", "peft.targets", "peft.target_parameters",
    "peft.modules_to_save", "peft.rslora", "peft.dora", "peft.path",
)  # fmt: skip
"""Keys, and the section `data`, that define the experiment; a resume that changes one is rejected."""
_HARMLESS_KEYS = ("data.cache", "data.cache_gib", "data.unused_keys")
"""Keys within `data` that may change on resume."""
ALL_LINEAR = "all-linear"
"""Target that selects every linear layer except the output head."""


def is_defining(key: str) -> bool:
    """Return whether a change of `key` makes a resumed run a different experiment."""
    return key not in _HARMLESS_KEYS and any(
        key == defining or key.startswith(f"{defining}.") for defining in _DEFINING_KEYS
    )


def accepts(accepted: Collection[str], key: str) -> bool:
    """Return whether `accepted` (run.accept_changes) lists `key` or its section."""
    return key in accepted or key.partition(".")[0] in accepted


def is_same_checkpoint(earlier: object, resume: str) -> bool:
    """Return whether two values of run.resume name the same checkpoint; "auto" and "never" name none."""
    if earlier in (None, "auto", "never"):
        return False
    return Path(str(earlier)).expanduser().resolve() == Path(resume).expanduser().resolve()


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """Run directory, name, seed and resume policy."""

    dir: str | None = None
    """Run directory; null: outputs/<recipe>/<time>-<hex>, chosen once by the launching process. If it already
    holds a run, `resume` decides."""
    name: str | None = None
    """Name of the Slurm job; null: name of the recipe."""
    seed: int = 42
    """Seed of weight initialization, sample order and dropout, in [0, 2**32 - 1]."""
    deterministic: bool = False
    """true: use deterministic kernels only, so that runs on the same mesh and devices are bit-equal; slower on GPUs. An
    operator without such a kernel ends the run."""
    resume: str = "auto"
    """auto: resume from the newest complete checkpoint in run.dir, if any; never: start from step 0, in a run.dir
    without checkpoints; or the path of a checkpoint to resume from. A start that is interrupted continues from its own
    newest checkpoint when it is requeued or restarted."""
    private: bool = False
    """true: create all files readable by the owner only (umask 077); false: use the umask of the user. Files that hold
    samples, environment variables or addresses (logs, environment.json, job.sbatch) are always private."""
    accept_changes: list[str] = field(default_factory=list)
    """Keys that may change on resume although they define the experiment (run.seed, training.global_batch_size,
    training.seq_len, model.path, ...); `data` accepts every change below data."""
    allow_env: list[str] = field(default_factory=list)
    """Environment variables that ${oc.env:NAME} may copy into the config, and so into the run directory."""

    def __post_init__(self) -> None:
        problems = within("run.seed", self.seed, 0, 2**32 - 1)
        if not self.resume:
            problems.append("run.resume='': must be auto, never or the path of a checkpoint")
        if self.dir is not None and not self.dir.strip():
            problems.append("run.dir='': must be a path, or null for a new directory under outputs/")
        if self.dir is not None and is_url(self.dir):
            problems.append(
                f"run.dir={self.dir}: must be a local path; checkpoint.remote copies checkpoints to an object store"
            )
        if self.name is not None and not (self.name.strip() and self.name.isprintable()):
            problems.append(f"run.name={self.name!r}: must be printable text on one line")
        problems += [
            f"run.accept_changes=[{key}]: may name {', '.join(_DEFINING_KEYS)} and keys below them; "
            "other keys may always change"
            for key in self.accept_changes
            if not is_defining(key)
        ]
        raise_all(problems)


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """When to save, which checkpoints to keep, and whether to export the model at the end."""

    every: int = 0
    """Optimizer steps between checkpoints; 0: save only at the end of the run or when a stop is requested."""
    every_minutes: float = 0
    """Additionally save when this many minutes have passed since the last save; such a checkpoint is deleted once a
    newer one is complete. 0: never."""
    last: bool = True
    """Save after the last step. A run that receives a stop request earlier always saves."""
    keep: int = 2
    """Number of newest complete checkpoints to keep, at least 1; older ones are deleted after a newer one is
    complete."""
    keep_every: int = 0
    """Keep every checkpoint whose step is a multiple of this number forever; must be a multiple of every. 0: none."""
    keep_best: bool = False
    """Also keep the checkpoint with the lowest evaluation loss or the highest evaluation reward; every must be a
    multiple of training.eval_every."""
    async_save: bool = False
    """Write checkpoints in the background: training only waits while each rank copies its state to host memory, which
    takes that much host memory."""
    check_replicas: int = 100
    """Optimizer steps between comparisons of the replicas of weights and optimizer state bit by bit, which find a rank
    that computes wrong numbers without an error; they are also compared before every checkpoint and at the end. Such a
    run ends with exit status 76, names the rank and its host, and saves nothing. 0: never compare."""
    remote: str | None = None
    """URL in an object store (s3://, gs://, az://, hf://) below which each checkpoint and the export are copied; each
    run needs its own without other objects, and a sweep appends the name of each point. keep, keep_every and keep_best
    apply there too. A resumed run whose directory lacks the newest checkpoint copies it back. null: no copies."""
    export: bool = True
    """Export the model to RUN_DIR/export at the end, a folder that transformers loads."""
    export_average: bool = True
    """In a run with training.ema_decay, export the averaged weights; false: the trained weights."""

    def __post_init__(self) -> None:
        problems = [
            *at_least("checkpoint.every", self.every, 0),
            *at_least("checkpoint.every_minutes", self.every_minutes, 0),
            *at_least("checkpoint.keep", self.keep, 1),
            *at_least("checkpoint.check_replicas", self.check_replicas, 0),
            *at_least("checkpoint.keep_every", self.keep_every, 0),
        ]
        problems += url_problems("checkpoint.remote", self.remote)
        if self.remote is not None and not is_url(self.remote):
            problems.append(f"checkpoint.remote={self.remote}: must be a URL such as s3://BUCKET/NAME, or null")
        if self.keep_every > 0 and (self.every <= 0 or self.keep_every % self.every):
            problems.append(
                f"checkpoint.keep_every={self.keep_every}: must be a multiple of checkpoint.every={self.every}, the "
                "interval of saves; change checkpoint.keep_every or checkpoint.every"
            )
        raise_all(problems)


class WandbMode(StrEnum):
    """disabled: do not import wandb; offline: write local files only, needs no account; online: upload."""

    disabled = "disabled"
    offline = "offline"
    online = "online"


@dataclass(kw_only=True, slots=True)
class WandbConfig:
    """Weights & Biases. Errors of wandb never stop a run."""

    mode: WandbMode = WandbMode.disabled
    """disabled, offline (local files, no account) or online (upload)."""
    project: str = "meshbook"
    """wandb project."""
    entity: str | None = None
    """wandb team or user; null: the account's default."""
    tags: list[str] = field(default_factory=list)
    """wandb tags of the run."""
    group: str | None = None
    """wandb group that the run is shown in; a sweep sets it for its runs. null: none."""


@dataclass(kw_only=True, slots=True)
class MlflowConfig:
    """MLflow (extra `mlflow`): the server in MLFLOW_TRACKING_URI, or the folder `mlruns` in the run directory.
    Errors of MLflow never stop a run."""

    enabled: bool = False
    """Track the run with MLflow."""
    project: str = "meshbook"
    """MLflow experiment."""
    group: str | None = None
    """Value of the MLflow tag `group`; a sweep sets it for its runs. null: none."""


@dataclass(kw_only=True, slots=True)
class TrackioConfig:
    """trackio (extra `trackio`): a local database in TRACKIO_DIR, by default in the run directory. Its errors never
    stop a run."""

    enabled: bool = False
    """Track the run with trackio."""
    project: str = "meshbook"
    """trackio project."""
    group: str | None = None
    """trackio group that the run is shown in; a sweep sets it for its runs. null: none."""


@dataclass(kw_only=True, slots=True)
class ProfileConfig:
    """torch.profiler traces of some optimizer steps, written to RUN_DIR/profile/; no overhead unless enabled."""

    enabled: bool = False
    """Record traces."""
    start: int = 10
    """First step to record, at least 1, counted from the start or resume of the run; the very first steps include
    setup."""
    steps: int = 3
    """Number of steps to record, at least 1."""
    ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks that record a trace."""
    memory: bool = False
    """Also record memory allocations."""
    stacks: bool = False
    """Also record the Python stack of each operation; slower."""

    def __post_init__(self) -> None:
        problems = [
            *at_least("logging.profile.start", self.start, 1),
            *at_least("logging.profile.steps", self.steps, 1),
        ]
        for rank in self.ranks:
            problems += at_least("logging.profile.ranks", rank, 0)
        if self.enabled and not self.ranks:
            problems.append("logging.profile.ranks=[]: no rank would record; set it to a list of ranks, such as [0]")
        raise_all(problems)

    def end_problems(self, training: TrainingConfig, steps: int) -> list[str]:
        """Require the profiled steps to be among the run's `steps` optimizer steps."""
        last = self.start + self.steps - 1
        if not self.enabled or last <= steps:
            return []
        return [
            f"logging.profile.start={self.start}: the trace of {self.steps} steps ends with step {last}, after "
            f"{training.length(steps)}; change logging.profile.start or logging.profile.steps"
        ]


class ExpertLoads(StrEnum):
    """none: do not count the tokens that are sent to experts; summary: log the largest load of an expert, experts
    without tokens and the entropy of the loads; layers: also the largest load in each layer."""

    none = "none"
    summary = "summary"
    layers = "layers"


@dataclass(kw_only=True, slots=True)
class LoggingConfig:
    """Console output, plots, profiler traces and trackers."""

    comm: bool = False
    """Record the collectives of the second optimizer step on rank 0 and print them by process group and operation:
    number of calls and MiB."""
    examples: int = 2
    """Number of decoded training examples to print at the start, with their loss mask; 0: none."""
    progress: bool = True
    """Show a progress bar on rank 0 if the output is a terminal; otherwise plain lines are printed."""
    quiet: bool = False
    """Print only the run directory and the launcher's notes at the start, the summary at the end, and errors;
    `--quiet` on the command line sets it. metrics.jsonl has every number."""
    experts: ExpertLoads = ExpertLoads.summary
    """Loads of the experts of a mixture, over all ranks and micro-batches of a step: expert_load (the most tokens that
    an expert of a layer receives, over the mean; 1 is balanced), dead_experts (without a token) and expert_entropy (1
    is balanced); layers also logs expert_load_N of each layer N; none counts nothing."""
    plot: bool = True
    """Write RUN_DIR/loss.png, or reward.png of a run with rewards, and experts.png of a mixture of experts; if the
    optional dependency `plot` is not installed, skip them with a message."""
    peak_tflops: float | None = None
    """Peak throughput of one device in TFLOP/s for the compute dtype, to compute the MFU, greater than 0; null: from a
    table of common GPUs."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """Profiler traces of some steps."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    """Weights & Biases."""
    tensorboard: bool = False
    """Write TensorBoard event files to RUN_DIR/tensorboard/ (extra `tensorboard`)."""
    mlflow: MlflowConfig = field(default_factory=MlflowConfig)
    """MLflow."""
    trackio: TrackioConfig = field(default_factory=TrackioConfig)
    """trackio."""

    def __post_init__(self) -> None:
        problems = at_least("logging.examples", self.examples, 0)
        if self.peak_tflops is not None:
            problems += above("logging.peak_tflops", self.peak_tflops, 0)
        raise_all(problems)


def trackers_without_group(logging: LoggingConfig) -> list[str]:
    """Return the keys of the enabled trackers that show runs in groups and have none."""
    enabled = {
        "logging.wandb": logging.wandb.mode is not WandbMode.disabled and logging.wandb.group is None,
        "logging.mlflow": logging.mlflow.enabled and logging.mlflow.group is None,
        "logging.trackio": logging.trackio.enabled and logging.trackio.group is None,
    }
    return [key for key, has_none in enabled.items() if has_none]


class PeftMethod(StrEnum):
    """none: train every parameter; lora: train a pair of low-rank matrices per target layer (Hu et al. 2021).

    qlora: lora with the frozen weights of the target layers stored in 4 bits (NF4, Dettmers et al. 2023).
    """

    none = "none"
    lora = "lora"
    qlora = "qlora"


class PeftExport(StrEnum):
    """adapter: the adapters in PEFT's format; merged: the model with the adapters added to its weights; or both."""

    adapter = "adapter"
    merged = "merged"
    both = "both"


@dataclass(kw_only=True, slots=True)
class PeftConfig:
    """Layers that get adapters, and their size: y = W x + (alpha / rank) B A x, with W frozen."""

    method: PeftMethod = PeftMethod.none
    """none (train every parameter), lora or qlora (lora over 4-bit base weights). With none, the other keys must keep
    their defaults."""
    path: str | None = None
    """Adapter to start from: a folder of PEFT, the directory of a run that exported one, a hub name, or a URL (s3://,
    gs://, az://, hf://). Its rank, alpha and layers must be those set here, and its base model that of model.path.
    null: a new one, which does not change the model."""
    rank: int = 16
    """Rank of the update: number of rows of A and of columns of B."""
    alpha: float = 32.0
    """Numerator of the scaling alpha / rank of the update B A x; greater than 0."""
    dropout: float = 0.0
    """Dropout probability of the inputs of A in training, in [0, 1)."""
    targets: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    """Layers that get adapters: [all-linear] for every linear layer except the output head, or suffixes of module
    names, such as [q_proj, mlp.up_proj]."""
    target_parameters: list[str] = field(default_factory=list)
    """Matrices of fused experts that get adapters, one pair per expert: suffixes of parameter names, such as
    [mlp.experts.gate_up_proj, mlp.experts.down_proj]. Their base weights are not quantized under qlora."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules that are trained as a whole beside the adapters, and saved with them: suffixes of module names, such as
    [embed_tokens, lm_head] for new tokens. Their weights are at least float32."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (rank-stabilized LoRA, Kalajdzievski 2023); useful for large ranks."""
    dora: bool = False
    """Also train the norm of each row of W + (alpha / rank) B A (weight-decomposed LoRA, Liu et al. 2024); slower."""
    export: PeftExport = PeftExport.both
    """What to export at the end: adapter (RUN_DIR/adapter, loaded by PEFT), merged (RUN_DIR/export, loaded by
    transformers) or both."""

    @property
    def adapts(self) -> bool:
        """Whether adapters are trained and the base weights are frozen."""
        return self.method != PeftMethod.none

    @property
    def trains_ends(self) -> bool:
        """Whether the embedding or the head is trained, as peft.modules_to_save is for."""
        return not self.adapts or bool(self.modules_to_save)

    @property
    def quantizes(self) -> bool:
        """Whether the weights of the target layers are stored in 4 bits."""
        return self.method == PeftMethod.qlora

    @property
    def scaling(self) -> float:
        """Factor of the update B A x."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def __post_init__(self) -> None:
        problems = [*at_least("peft.rank", self.rank, 1), *above("peft.alpha", self.alpha, 0)]
        if not 0 <= self.dropout < 1:
            problems.append(f"peft.dropout={self.dropout}: must be at least 0 and less than 1")
        if self.target_parameters and self.dropout:
            problems.append(
                f"peft.dropout={self.dropout}: experts are adapted by their matrices (peft.target_parameters), whose "
                "inputs dropout cannot reach; set peft.dropout=0"
            )
        if self.target_parameters and self.dora:
            problems.append("peft.dora=true: is not defined for peft.target_parameters; set peft.dora=false")
        if not self.targets and not self.target_parameters:
            problems.append(
                f"peft.targets=[]: name at least one layer, or {ALL_LINEAR}, or experts by peft.target_parameters"
            )
        elif ALL_LINEAR in self.targets and len(self.targets) > 1:
            problems.append(f"peft.targets={self.targets}: {ALL_LINEAR} cannot be combined with names; remove either")
        problems += url_problems("peft.path", self.path)
        if not self.adapts:
            problems += [
                f"peft.{name}={value}: peft.method=none trains every parameter, without adapters; add peft=lora"
                for name, value in self._changed().items()
            ]
        raise_all(problems)

    def _changed(self) -> dict[str, object]:
        """Return the fields whose value differs from the default, by name."""
        defaults = {each.name: each.default for each in fields(self) if each.default is not MISSING}
        defaults |= {"targets": [ALL_LINEAR], "target_parameters": [], "modules_to_save": []}
        return {name: value for name, value in field_values(self).items() if value != defaults[name]}
