"""The training step and the machinery around it. When to log, evaluate, save and stop is up to the recipe.

run.py               Run: resume, the step loop, reports and saves of a training run
context.py           RunContext: what preparation, objectives, evaluation and generation need of a run
attempt.py           what training and evaluation runs share: process group, signals, watchdog, result, reading ahead
preparation.py       prepare: build, parallelize and fill a model from a config; what `auto` resolves to;
                     check_kernels: the attention kernel a run uses, and the loss difference float8 causes
prepared.py          Prepared, StepSettings: its results; compute dtype, autocast, moving average
routers.py           auxiliary losses of routers, loads of experts, and their balance by a bias
step_cost.py         what a step costs: FLOPs and the devices' peak, for the MFU; collectives in calls and bytes;
                     a profile
step.py              train_step: one optimizer step, normalized by the global number of units; the forward
evaluation.py        evaluate: one pass over held-out data; show_generations: sample answers to prompts;
                     score_continuations: log-probabilities of requests, batched and divided over dp ranks
objectives/          loss functions, and LM heads that return losses instead of logits
optimizers/          AdamW, learning-rate schedules, gradient norm and clipping, updates that skip non-finite gradients
state.py             counters saved with every checkpoint, the timer of saves, and metrics read some steps later
loss.py              count_targets; re-exports reduce_loss (distributed/collectives.py)
sync.py              re-exports get_sync_ctx (distributed/fsdp.py)
rollouts.py          Rollouts: answers sampled from the model in training, their rewards and advantages
answers.py           Answers: the answers of a batch, their file, and the micro-batches of a rank
rewards.py           RewardFunctions: functions that reward answers, in a worker process
harness.py           load_tasks, evaluate_tasks: benchmark tasks of lm-eval by name, on any mesh, and their scores
mesh_lm.py           MeshLM: lm-eval's interface to a model; the only file that needs lm-eval at import
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from components import package

if TYPE_CHECKING:
    from components.config.schema.optimizer import learning_rate
    from components.training.attempt import EvaluationRun, GarbageCollection, ReadAhead
    from components.training.context import RunContext
    from components.training.evaluation import (
        Evaluation,
        TaskScores,
        encoded_prompts,
        evaluate,
        generation_forward,
        show_generations,
    )
    from components.training.harness import BenchmarkTasks, evaluate_tasks, load_tasks
    from components.training.loss import count_targets, reduce_loss
    from components.training.objectives import PLAIN, CrossEntropy, NextToken
    from components.training.objectives.base import Chunk, RowObjective, TokenLoss, TokenObjective, Vocabulary
    from components.training.objectives.cross_entropy import Classification, Reward, build_scoring
    from components.training.objectives.distillation import Distillation
    from components.training.objectives.loss_head import LossHead, attach_loss_head
    from components.training.objectives.policy import PolicyLoss, SampledLoss, build_policy
    from components.training.objectives.preference import DPO, KTO, ORPO, Preference, SimPO
    from components.training.objectives.reference_model import build_preference, with_reference
    from components.training.objectives.teacher import build_distillation, teacher_run_config
    from components.training.objectives.teacher_store import TeacherStore, build_teacher_store
    from components.training.optimizers.gradients import clip_gradients, gradient_norm
    from components.training.optimizers.optim import build_optimizer, set_learning_rate
    from components.training.preparation import (
        GradSync,
        RecomputePolicy,
        check_kernels,
        choose_grad_sync,
        choose_recompute_policy,
        prepare,
        prepare_built,
        prepare_frozen,
    )
    from components.training.prepared import Prepared, StepSettings, autocast_dtype, compute_dtype, stored_dtype
    from components.training.rewards import RewardFunctions
    from components.training.rollouts import Rollouts
    from components.training.routers import Routers, attach_routers
    from components.training.run import Run, Step
    from components.training.state import (
        FIELDS,
        NonFiniteGradients,
        SaveClock,
        StepMetrics,
        StepNumbers,
        StepReader,
        TrainState,
    )
    from components.training.step import train_step
    from components.training.step_cost import StepFlops, step_flops
    from components.training.sync import get_sync_ctx
    from components.watch.watchdog import StepTimeout, StopRequest, Watchdog
else:
    __getattr__, __dir__ = package.lazy_names(__name__)
