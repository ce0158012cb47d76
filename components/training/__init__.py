"""How one optimizer step is done right; when to log, evaluate, save and stop is the recipe's business.

preparation.py  prepare: a model on its mesh, with its weights (prepared.py: Prepared, StepSettings)
run.py        Run: the mechanics around a recipe's loop, and none of its policy (attempt.py: what evaluations share)
step.py       train_step: one division by the global number of units
evaluation.py evaluate: one pass over held-out data (forward.py: the forward that both share)
samples.py    show_generations: answers to prompts
objectives/   what is optimized: NextToken
loss.py       the number of targets; re-exports reduce_loss (distributed/collectives.py)
loss_head.py  a model that takes targets and returns losses instead of logits (chunked_loss.py: in chunks of tokens)
router.py     the auxiliary loss of a mixture of experts' routers
sync.py       re-exports get_sync_ctx (distributed/gradient_sync.py)
gradients.py  one gradient for the replicas over tp, the norm of all gradients over mixed meshes, clipping
optim.py      AdamW with decay groups, learning-rate schedules, updates that skip non-finite gradients
masked_step.py  such an update for any optimizer
precision.py  the type of matmuls
kernels.py    the attention kernel of a run, and what float8 changes of its loss
metrics.py    numbers of a step, read a fixed number of steps later, so that the host never waits
state.py      what a resume needs besides tensors; the request to stop; the time of the next save
checkpointing.py  what activation checkpointing `auto` stands for, by an estimate of memory
work.py       FLOPs of a step and the devices' peak: what the MFU is made of
garbage.py    Python's garbage is collected between steps
watchdog.py   ends a run that makes no progress, and names the rank that is missing
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from components import lazy

if TYPE_CHECKING:
    from components.training.attempt import EvaluationRun
    from components.training.checkpointing import Checkpointing, StepLoad, choose_checkpointing
    from components.training.evaluation import Evaluation, evaluate
    from components.training.garbage import GarbageOffTheStep
    from components.training.gradients import clip_gradients, gradient_norm
    from components.training.kernels import check_kernels
    from components.training.loss import count_targets, reduce_loss
    from components.training.loss_head import LossHead, attach_loss_head
    from components.training.metrics import FIELDS, StepMetrics, StepNumbers, StepReader
    from components.training.objectives import PLAIN, CrossEntropy, NextToken, Objective
    from components.training.objectives.preference import Preference
    from components.training.optim import build_optimizer, learning_rate, set_learning_rate
    from components.training.precision import autocast_dtype, compute_dtype
    from components.training.preparation import prepare, prepare_built
    from components.training.prepared import Prepared, StepSettings
    from components.training.reference import with_reference
    from components.training.router import RouterLoss, attach_router_loss
    from components.training.run import Run, Step
    from components.training.samples import show_generations
    from components.training.state import NonFiniteGradients, SaveClock, StopRequest, TrainState
    from components.training.step import train_step
    from components.training.sync import get_sync_ctx
    from components.training.watchdog import StepTimeout, Watchdog
    from components.training.work import StepWork, step_work
else:
    __getattr__ = lazy.attach(__name__)
