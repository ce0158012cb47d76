"""Rules about best checkpoints, profiler traces, trackers, tasks, the evaluation of adapters, and optimizers."""

from __future__ import annotations

import importlib.util

from components.config.schema.checkpoint import CheckpointConfig
from components.config.schema.logging import LoggingConfig, ProfileConfig, WandbMode
from components.config.schema.model import DType, ModelConfig
from components.config.schema.optimizer import AdamW8bitConfig, MuonConfig, OptimizerConfig, Schedule
from components.config.schema.peft import PeftConfig
from components.config.schema.training import EvaluationConfig, TasksConfig, TrainingConfig


def best_checkpoint_problems(checkpoint: CheckpointConfig, training: TrainingConfig) -> list[str]:
    """Require an evaluation at every checkpoint step, so that each checkpoint has a loss to compare."""
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


def profile_problems(profile: ProfileConfig, training: TrainingConfig, world_size: int | None) -> list[str]:
    """Require profiled steps and ranks to exist; `world_size` is None if unknown."""
    if not profile.enabled:
        return []
    problems = [] if training.max_steps is None else profile_end_problems(profile, training, training.max_steps)
    if world_size is not None and (absent := [rank for rank in profile.ranks if rank >= world_size]):
        problems.append(
            f"logging.profile.ranks={profile.ranks}: rank {absent[0]} does not exist, ranks are 0 to "
            f"{world_size - 1}; change logging.profile.ranks"
        )
    return problems


def profile_end_problems(profile: ProfileConfig, training: TrainingConfig, steps: int) -> list[str]:
    """Require the profiled steps to be among the run's `steps` optimizer steps."""
    last = profile.start + profile.steps - 1
    if not profile.enabled or last <= steps:
        return []
    return [
        f"logging.profile.start={profile.start}: the trace of {profile.steps} steps ends with step {last}, after "
        f"{training.length(steps)}; change logging.profile.start or logging.profile.steps"
    ]


def decay_problems(optimizer: OptimizerConfig, training: TrainingConfig | None, steps: int | None = None) -> list[str]:
    """Require the final decay under wsd to begin after the warmup; `steps` None: training.max_steps, if it is set."""
    steps = steps if training is None or steps is not None else training.max_steps
    if training is None or steps is None or optimizer.schedule is not Schedule.wsd or not optimizer.decay_steps:
        return []
    longest = max(0, steps - optimizer.warmup_steps)
    if optimizer.decay_steps <= longest:
        return []
    return [
        f"optimizer.decay_steps={optimizer.decay_steps}: must fit, after optimizer.warmup_steps="
        f"{optimizer.warmup_steps}, into {training.length(steps)}; set it to at most {longest}, or change the others"
    ]


def tracker_problems(logging: LoggingConfig) -> list[str]:
    """Require the packages of the enabled trackers, which are optional, to be installed."""
    needed = {}  # setting -> (package, command that installs it, value that disables it)
    if logging.wandb.mode is not WandbMode.disabled:
        needed[f"logging.wandb.mode={logging.wandb.mode}"] = ("wandb", "pip install 'meshbook[wandb]'", "disabled")
    if logging.tensorboard:
        needed["logging.tensorboard=true"] = ("tensorboard", "pip install 'meshbook[tensorboard]'", "false")
    if logging.mlflow.enabled:
        needed["logging.mlflow.enabled=true"] = ("mlflow", "pip install 'meshbook[mlflow]'", "false")
    if logging.trackio.enabled:
        needed["logging.trackio.enabled=true"] = ("trackio", "pip install 'meshbook[trackio]'", "false")
    return [
        f"{setting}: {package} is not installed; run {install}, or set it to {disabled}"
        for setting, (package, install, disabled) in needed.items()
        if importlib.util.find_spec(package) is None
    ]


def harness_problems(tasks: TasksConfig) -> list[str]:
    """Require lm-eval, which is optional, to be installed if there are tasks."""
    if not tasks.tasks or importlib.util.find_spec("lm_eval") is not None:
        return []
    return [
        f"evaluation.tasks={tasks.tasks}: lm-eval is not installed; run pip install 'meshbook[evaluation]', or set it "
        "to []"
    ]


def optimizer_problems(optimizer: OptimizerConfig, model: ModelConfig, peft: PeftConfig | None) -> list[str]:
    """Reject 8-bit moments for float64 weights, and Muon for adapters.

    torchao computes updates in float32. The product of two orthogonalized low-rank matrices is not an orthogonalized
    update.
    """
    if isinstance(optimizer, AdamW8bitConfig) and model.dtype == DType.float64:
        return [
            f"optimizer.kind={optimizer.kind}: computes updates in float32, less exact than model.dtype={model.dtype}; "
            "set optimizer=adamw, or model.dtype=float32"
        ]
    if peft is None or not peft.adapts or not isinstance(optimizer, MuonConfig):
        return []
    return [
        f"optimizer.kind={optimizer.kind}: Muon orthogonalizes the update of whole matrices, not of the two factors of "
        f"peft.method={peft.method}; set optimizer=adamw, or peft=none"
    ]


def adapter_problems(peft: PeftConfig, evaluation: EvaluationConfig) -> list[str]:
    """Require a checkpoint to load the adapters from."""
    if not peft.adapts or evaluation.checkpoint is not None:
        return []
    return [
        f"peft.method={peft.method}: evaluation.checkpoint=null provides no trained adapters to evaluate; set "
        "it to a checkpoint (.../checkpoints/step_N), or set peft=none"
    ]
