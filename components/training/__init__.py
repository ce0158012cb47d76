"""How one optimizer step is done right; when to log, evaluate, save and stop is the recipe's business.

prepared.py   prepare: a model on its mesh, with its weights
run.py        Run: the mechanics around a recipe's loop, and none of its policy (attempt.py: what evaluations share)
samples.py    generate_samples: answers to prompts
loop.py       train_step and evaluate: one division by the global number of target tokens
objectives/   what is optimized: NextToken
loss.py       the sum of token losses; re-exports reduce_loss (distributed/collectives.py)
token_loss.py the loss without logits (chunked_loss.py): a model that takes targets
router.py     the auxiliary loss of a mixture of experts' routers
sync.py       re-exports get_sync_ctx (distributed/gradient_sync.py)
gradients.py  one gradient for the replicas over tp, the norm of all gradients over mixed meshes, clipping
optim.py      AdamW with decay groups, learning-rate schedules, updates that skip non-finite gradients
masked_step.py  such an update for any optimizer
precision.py  the type of matrix products
kernels.py    what a run attends by, and what float8 changes of its loss
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
    from components.training.checkpointing import Checkpointing, choose_checkpointing
    from components.training.garbage import GarbageOffTheStep
    from components.training.gradients import clip_gradients, gradient_norm
    from components.training.kernels import check_kernels
    from components.training.loop import StepSettings, evaluate, train_step
    from components.training.loss import count_targets, next_tokens, reduce_loss, token_loss_sum
    from components.training.metrics import StepMetrics, StepReader
    from components.training.objectives import NextToken, Objective
    from components.training.optim import build_optimizer, learning_rate, set_learning_rate
    from components.training.precision import autocast_dtype, compute_dtype
    from components.training.prepared import Prepared, prepare, prepare_built
    from components.training.router import RouterLoss, attach_router_loss
    from components.training.run import Run, Step
    from components.training.samples import generate_samples
    from components.training.state import NonFiniteGradients, SaveClock, StopRequest, TrainState
    from components.training.sync import get_sync_ctx
    from components.training.token_loss import TokenLoss, attach_token_loss
    from components.training.watchdog import StepTimeout, Watchdog
    from components.training.work import StepWork, step_work
else:
    __getattr__ = lazy.attach(__name__)
