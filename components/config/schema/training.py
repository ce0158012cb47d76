"""`training`, `evaluation` and `generation`: batch sizes, intervals and limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from components.protocol.errors import above, at_least, field_values, pattern_problems, raise_all, within


class EvalWeights(StrEnum):
    """Weights that held-out losses are of, in a run with a moving average of the weights."""

    average = "average"
    trained = "trained"
    both = "both"

    @property
    def described(self) -> str:
        """What is evaluated, for the banner."""
        if self is EvalWeights.trained:
            return "held-out loss is of the trained weights"
        more = ", eval_loss_trained of the trained ones" if self is EvalWeights.both else ""
        return f"held-out loss is of the averaged weights{more}"


_LONGEST_STEP = 31_536_000.0
"""Upper bound of step timeouts: a year, in seconds."""


_TASK_KEYS = ("task_path", "num_fewshot", "limit", "batch_size", "apply_chat_template", "every")
"""Keys of `evaluation` that have no effect without tasks."""
_UNTIL = "until_step"
"""Key of a stage of a ramp: the last step of the stage."""


@dataclass(kw_only=True, slots=True)
class StageConfig:
    """A stage of a run on a mixture, an entry of data.stages."""

    until_step: int | None = None
    """Last optimizer step of the stage; null in the last stage, which lasts to the end of the run."""
    weights: dict[str, float] = field(default_factory=dict)
    """Share of the rows of each source by its name, relative to the others; a source that is not named, or has 0, is
    not drawn. {}: the sources' own weights."""
    seq_len: int | None = None
    """Tokens per row, a divisor of training.seq_len: rows are cut as by training.seq_len_ramp, and a step has the same
    tokens and targets. null: training.seq_len."""
    lr_ratio: float | None = None
    """Learning rate of the stage's last step as a fraction of optimizer.lr, at least 0, to which it changes linearly in
    the stage; null: that of the stage before. Needs optimizer.schedule=constant, whose warmup applies."""


def stage_problems(stages: Sequence[StageConfig], sources: Mapping[str, float | None]) -> list[str]:
    """Return the problems of data.stages.

    Args:
        sources: The mixture's sources by name, with the weights that they have themselves.
    """
    problems, before = [], 0
    for number, stage in enumerate(stages):
        key, until, is_last = f"data.stages[{number}]", stage.until_step, number == len(stages) - 1
        if is_last and until is not None:
            problems.append(f"{key}.{_UNTIL}={until}: the last stage lasts to the end of the run; remove it")
        elif not is_last and (until is None or until <= before):
            problems.append(
                f"{key}.{_UNTIL}={'null' if until is None else until}: must be at least {before + 1}, a step after "
                "the end of the stage before; only the last stage has none"
            )
        before = max(before, until or 0)
        problems += [
            f"{key}.weights.{name}={weight:g}: must be a number of at least 0"
            for name, weight in stage.weights.items()
            if not 0 <= weight < math.inf
        ]
        problems += [
            f"{key}.weights.{name}: there is no such source; name those of data.sources: {', '.join(sources)}"
            for name in stage.weights
            if name not in sources
        ]
        if stage.weights and not any(stage.weights.values()):
            problems.append(f"{key}.weights={stage.weights}: draws from no source; set one above 0")
        problems += at_least(f"{key}.seq_len", stage.seq_len, 2)
        problems += at_least(f"{key}.lr_ratio", stage.lr_ratio, 0)
    if problems or not stages:
        return problems
    if all(stage.weights for stage in stages):
        problems += [
            f"data.sources.{name}.weight={weight:g}: has no effect, as every stage has weights; remove it, or the "
            "weights of a stage"
            for name, weight in sources.items()
            if weight is not None
        ]
        problems += [
            f"data.sources.{name}: no stage draws from it; add it to the weights of one of data.stages, or remove it"
            for name in sources
            if not any(stage.weights.get(name) for stage in stages)
        ]
    return problems


@dataclass(kw_only=True, slots=True)
class TrainingConfig:
    """Batch sizes, number of steps, and the intervals of logging and evaluation. Batch sizes count sequences (pairs in
    DPO); with data.pack they count packed rows."""

    max_steps: int | None = None
    """Number of optimizer steps of the whole run, at least 1. null: given by `epochs`, or 100 without it. The default
    in conf/ applies unless `epochs` is given."""
    epochs: float | None = None
    """Passes over the training rows in the whole run, greater than 0, also a fraction; the last step may begin another
    pass. null: max_steps counts. Only one of the two may be given."""
    global_batch_size: int = 16
    """Sequences per optimizer step over all processes; must be a multiple of the data-parallel size dp."""
    batch_size_ramp: list[dict[str, int]] = field(default_factory=list)
    """Smaller batches at the start: [{until_step: 100, global_batch_size: 4}, ...] uses 4 sequences per step in steps 1
    to 100; global_batch_size follows the last stage. Steps and sizes must increase. []: the same size in every step."""
    micro_batch_size: int = 4
    """Upper bound of the sequences per forward pass of one process. The run uses the largest size up to it that divides
    global_batch_size / dp and gives the pipeline schedule enough micro-batches. Gradient accumulation steps =
    global_batch_size / (micro-batch size x dp). Affects speed and memory, not results."""
    seq_len: int = 256
    """Maximum sequence length in tokens, at least 2; data.overlong decides what happens to longer samples."""
    seq_len_ramp: list[dict[str, int]] = field(default_factory=list)
    """Shorter rows at the start, for data=text: [{until_step: 100, seq_len: 64}, ...] cuts each row into rows of 64
    tokens in steps 1 to 100; seq_len follows the last stage. Steps and lengths must increase, and lengths divide
    seq_len. A step has the same tokens and targets as without a ramp; a token attends to fewer. []: no ramp."""
    log_every: int = 1
    """Optimizer steps between log lines."""
    eval_every: int = 20
    """Optimizer steps between evaluations on the held-out split, of losses or rewards; 0: evaluate only at the start
    and the end."""
    max_grad_norm: float = 1.0
    """Clip gradients to this global L2 norm; 0: no clipping."""
    trainable: list[str] = field(default_factory=list)
    """Train only the parameters in whose names one of these regular expressions is found, such as [self_attn, norm];
    names are transformers', as in model.layers.0.self_attn.q_proj.weight. []: every parameter. Not with adapters."""
    freeze: list[str] = field(default_factory=list)
    """Do not train the parameters in whose names one of these regular expressions is found, such as [embed_tokens,
    norm]; applies after `trainable`. []: none. Not with adapters."""
    stop_after_skipped: int = 10
    """Fail the run after this many consecutive steps whose update was skipped, because gradients were not finite or
    because of skip_spikes; such steps leave the weights unchanged. 0: never."""
    skip_spikes: float | None = None
    """Skip the update of a step whose loss or gradient norm lies more than this many standard deviations (greater than
    0, such as 6) above the mean of the last spike_window steps, skipped ones included; null: never. Nothing is skipped
    before half of the window is filled. If the loss has risen for good, updates resume after about spike_window / (1 +
    skip_spikes^2) steps; stop_after_skipped counts these steps, too."""
    spike_window: int = 128
    """Steps whose losses and gradient norms skip_spikes compares with, from 4 to 100,000. In a run of at most half as
    many steps nothing is skipped, which the banner says."""
    neftune_alpha: float = 0.0
    """Add uniform noise in [-1, 1] times neftune_alpha / sqrt(tokens of the document x hidden size) to the output of
    the embedding, in training forwards only (NEFTune, Jain et al. 2023), for example 5. The noise depends on run.seed,
    the step and the document, so it is the same on every mesh. 0: none."""
    ema_decay: float | None = None
    """Keep an exponential moving average (EMA) of the trained weights with this decay, greater than 0 and less than 1,
    in float32 on the model's shards; null: none."""
    eval_weights: EvalWeights = EvalWeights.average
    """With ema_decay: held-out loss (also of checkpoint.keep_best) and generated texts are those of the averaged
    weights (average), of the trained weights (trained), or the average's with the trained weights' loss as
    eval_loss_trained (both, twice the time). Without ema_decay there is no average."""
    early_stop_patience: int | None = None
    """End the run after this many consecutive scheduled evaluations (eval_every) without a lower held-out loss or a
    higher held-out reward; null: never. The run ends as completed, with stopped_early in result.json."""
    early_stop_min_delta: float = 0.0
    """Smallest decrease of the best held-out loss, or increase of the best held-out reward, that counts as an
    improvement, at least 0."""
    gc_every: int = 50
    """Optimizer steps between runs of Python's garbage collector, on all ranks at the same step and never within a
    step; 0: leave it to Python."""
    step_timeout_seconds: float = 600.0
    """Seconds without progress of any process after which the run fails as hung; doubled around the first steps. 0
    (never) or 1 to a year."""

    def __post_init__(self) -> None:
        if self.max_steps is None and self.epochs is None:
            self.max_steps = 100
        raise_all(
            [
                *at_least("training.max_steps", self.max_steps, 1),
                *self._epoch_problems(),
                *at_least("training.global_batch_size", self.global_batch_size, 1),
                *at_least("training.micro_batch_size", self.micro_batch_size, 1),
                *at_least("training.seq_len", self.seq_len, 2),
                *at_least("training.log_every", self.log_every, 1),
                *at_least("training.eval_every", self.eval_every, 0),
                *at_least("training.max_grad_norm", self.max_grad_norm, 0),
                *pattern_problems("training.trainable", self.trainable),
                *pattern_problems("training.freeze", self.freeze),
                *at_least("training.stop_after_skipped", self.stop_after_skipped, 0),
                *at_least("training.neftune_alpha", self.neftune_alpha, 0),
                *at_least("training.gc_every", self.gc_every, 0),
                *_timeout_problems("training", self.step_timeout_seconds),
                *self._ramp_problems(
                    "batch_size_ramp", self.batch_size_ramp, "global_batch_size", self.global_batch_size, 1
                ),
                *self._length_problems(),
                *self._spike_problems(),
                *self._average_problems(),
                *self._early_stop_problems(),
            ]
        )

    @property
    def ramp(self) -> tuple[tuple[int, int], ...]:
        """Stages of batch_size_ramp: (number of steps from the start of the run to its end, sequences per step)."""
        return tuple((stage[_UNTIL], stage["global_batch_size"]) for stage in self.batch_size_ramp)

    @property
    def length_ramp(self) -> tuple[tuple[int, int], ...]:
        """Stages of seq_len_ramp: (number of steps from the start of the run to its end, tokens per row)."""
        return tuple((stage[_UNTIL], stage["seq_len"]) for stage in self.seq_len_ramp)

    def _ramp_problems(self, name: str, stages: list[dict[str, int]], value: str, last: int, least: int) -> list[str]:
        """Return the problems of the ramp at key `name`, whose `value` increases from `least` to `last`."""
        key = f"training.{name}={stages}"
        if any(set(stage) != {_UNTIL, value} for stage in stages):
            return [f"{key}: every stage needs until_step and {value}, and no other key"]
        steps, sizes = [0, *(stage[_UNTIL] for stage in stages)], [least - 1, *(stage[value] for stage in stages)]
        problems = []
        if any(later <= earlier for earlier, later in pairwise(steps)):
            problems.append(f"{key}: until_step must be at least 1 and increase from stage to stage")
        if stages and self.max_steps is not None and steps[-1] >= self.max_steps:
            problems.append(self._late_ramp(key, self.max_steps))
        if any(later <= earlier for earlier, later in pairwise([*sizes, last])):
            problems.append(
                f"{key}: {value} must be at least {least} and increase from stage to stage, up to "
                f"training.{value}={last}"
            )
        return problems

    def _length_problems(self) -> list[str]:
        problems = self._ramp_problems("seq_len_ramp", self.seq_len_ramp, "seq_len", self.seq_len, 2)
        if problems:
            return problems
        return [
            f"training.seq_len_ramp[{number}].seq_len={length}: must divide training.seq_len={self.seq_len}, as each "
            "row is cut into rows of this length; change either"
            for number, (_, length) in enumerate(self.length_ramp)
            if self.seq_len % length
        ]

    def _epoch_problems(self) -> list[str]:
        if self.epochs is None:
            return []
        problems = above("training.epochs", self.epochs, 0)
        if self.max_steps is not None:
            problems.append(
                f"training.epochs={self.epochs:g}: the run also has training.max_steps={self.max_steps}; give one of "
                "the two, and set the other to null"
            )
        return problems

    def length(self, steps: int) -> str:
        """Return the setting that gives the run its `steps` optimizer steps, for messages."""
        if self.epochs is None:
            return f"training.max_steps={steps}"
        return f"the {steps} steps of training.epochs={self.epochs:g}"

    def ramp_end_problems(self, steps: int) -> list[str]:
        """Require the ramps to end before the last of the run's `steps` optimizer steps."""
        ramps = {
            f"training.batch_size_ramp={self.batch_size_ramp}": self.ramp,
            f"training.seq_len_ramp={self.seq_len_ramp}": self.length_ramp,
        }
        return [self._late_ramp(key, steps) for key, stages in ramps.items() if stages and stages[-1][0] >= steps]

    def stage_end_problems(self, stages: Sequence[StageConfig], steps: int | None) -> list[str]:
        """Require every stage to begin within the run's `steps` optimizer steps; None: not known yet."""
        end = math.inf if steps is None else steps
        late = next((number for number, stage in enumerate(stages) if (stage.until_step or 0) >= end), None)
        if late is None or steps is None:
            return []
        return [
            f"data.stages[{late}].{_UNTIL}={stages[late].until_step}: must be less than {self.length(steps)}, so that "
            "the next stage has steps; change either"
        ]

    def _late_ramp(self, key: str, steps: int) -> str:
        return f"{key}: the last until_step must be less than {self.length(steps)}; change either"

    def _early_stop_problems(self) -> list[str]:
        problems = [
            *at_least("training.early_stop_patience", self.early_stop_patience, 1),
            *at_least("training.early_stop_min_delta", self.early_stop_min_delta, 0),
        ]
        if self.early_stop_patience is not None and self.eval_every == 0:
            problems.append(
                f"training.early_stop_patience={self.early_stop_patience}: counts scheduled evaluations, but "
                "training.eval_every=0; set training.eval_every"
            )
        if self.early_stop_patience is None and self.early_stop_min_delta > 0:
            problems.append(
                f"training.early_stop_min_delta={self.early_stop_min_delta}: has no effect without "
                "training.early_stop_patience; set it"
            )
        return problems

    def _spike_problems(self) -> list[str]:
        problems = within("training.spike_window", self.spike_window, 4, 100_000)
        if self.skip_spikes is not None:
            problems += above("training.skip_spikes", self.skip_spikes, 0)
        elif self.spike_window != 128:
            problems.append(
                f"training.spike_window={self.spike_window}: has no effect without training.skip_spikes; set it, for "
                "example to 6"
            )
        return problems

    def _average_problems(self) -> list[str]:
        if self.ema_decay is None:
            if self.eval_weights is not EvalWeights.both:
                return []
            return ["training.eval_weights=both: there are no averaged weights to evaluate; set training.ema_decay"]
        if 0 < self.ema_decay < 1:
            return []
        return [f"training.ema_decay={self.ema_decay}: must be greater than 0 and less than 1, or null for no average"]


def _timeout_problems(section: str, seconds: float) -> list[str]:
    if seconds == 0 or 1 <= seconds <= _LONGEST_STEP:
        return []
    return [
        f"{section}.step_timeout_seconds={seconds}: must be 0 (never time out) or at least 1, and at most "
        f"{_LONGEST_STEP:g}, a year"
    ]


@dataclass(kw_only=True, slots=True)
class TasksConfig:
    """Benchmark tasks of lm-eval (EleutherAI's evaluation harness, an optional package)."""

    tasks: list[str] = field(default_factory=list)
    """Names of lm-eval's tasks, groups or tags, such as [hellaswag, arc_easy]; []: none. Needs the package lm-eval."""
    task_path: str | None = None
    """Folder with your own tasks as YAML files in lm-eval's format, also in subfolders; they override tasks of lm-eval
    with the same name. null: none."""
    num_fewshot: int | None = None
    """Examples before each question, at least 0; null: the number that the task sets. As in lm-eval, a task that sets 0
    keeps it."""
    limit: float | None = None
    """Use only the first documents of each task: their number, or a fraction below 1; null: all. For quick looks, not
    for scores to report."""
    batch_size: int | None = None
    """Requests per forward pass of one process, at least 1; null: as many as fit into micro_batch_size x seq_len
    tokens, and 32 of tasks that generate answers. Affects speed and memory, not results."""
    apply_chat_template: bool = False
    """Format the questions with the tokenizer's chat template."""

    def task_problems(self) -> list[str]:
        """Return the problems of these keys, for the `__post_init__` of subclasses."""
        problems = [
            *at_least("evaluation.num_fewshot", self.num_fewshot, 0),
            *at_least("evaluation.batch_size", self.batch_size, 1),
        ]
        if self.limit is not None:
            problems += above("evaluation.limit", self.limit, 0)
            if self.limit > 1 and self.limit % 1:
                problems.append(
                    f"evaluation.limit={self.limit:g}: must be a whole number of documents, or a fraction below 1"
                )
        if len(set(self.tasks)) < len(self.tasks):
            problems.append(f"evaluation.tasks={self.tasks}: must name each task once")
        unused = {} if self.tasks else {name: value for name, value in field_values(self).items() if name in _TASK_KEYS}
        problems += [
            f"evaluation.{name}={value}: has no effect without tasks; set evaluation.tasks"
            for name, value in unused.items()
            if value
        ]
        return problems


@dataclass(kw_only=True, slots=True)
class TrainingTasksConfig(TasksConfig):
    """Benchmark tasks of lm-eval (an optional package) that measure the model during training."""

    every: int = 0
    """Optimizer steps between evaluations of the tasks; 0: evaluate only at the end."""

    def __post_init__(self) -> None:
        raise_all([*at_least("evaluation.every", self.every, 0), *self.task_problems()])


@dataclass(kw_only=True, slots=True)
class EvaluationConfig(TasksConfig):
    """Checkpoint, sizes and benchmark tasks of `recipes/evaluate.py`."""

    checkpoint: str | None = None
    """Checkpoint (RUN_DIR/checkpoints/step_N) whose weights to evaluate, or a run directory: its newest complete
    checkpoint; null: the weights of model.path."""
    average: bool = False
    """Evaluate the moving average of the weights that the checkpoint of a run with training.ema_decay holds."""
    micro_batch_size: int = 8
    """Sequences per forward pass of one process, at least 1."""
    seq_len: int = 256
    """Maximum sequence length in tokens, at least 2; data.overlong decides what happens to longer samples."""
    step_timeout_seconds: float = 600.0
    """The run fails as hung after twice this many seconds in which no process completes a forward pass; 0 (never) or 1
    to a year."""

    def __post_init__(self) -> None:
        problems = []
        if self.average and self.checkpoint is None:
            problems.append(
                "evaluation.average=true: only a checkpoint holds averaged weights; set evaluation.checkpoint"
            )
        raise_all(
            [
                *problems,
                *at_least("evaluation.micro_batch_size", self.micro_batch_size, 1),
                *at_least("evaluation.seq_len", self.seq_len, 2),
                *_timeout_problems("evaluation", self.step_timeout_seconds),
                *self.task_problems(),
            ]
        )


MOST_TOOL_CALLS = 256
"""Largest generation.tool_calls: the prompts are stored with the tokenized samples."""


@dataclass(kw_only=True, slots=True)
class GenerationConfig:
    """Texts generated and printed before and after training."""

    samples: int = 1
    """Number of held-out prompts to generate an answer for; 0: none."""
    max_new_tokens: int = 48
    """Maximum length of a generated answer in tokens, greater than 0."""
    rows: int = 32
    """Most answers that a process generates at once, at least 1. Fewer need less memory for keys and values, and more
    time."""
    prompts: list[str] = field(default_factory=list)
    """Additional prompts to generate answers for."""
    tool_calls: int = 0
    """Number of held-out answers with tool calls (data=chat_jsonl) to generate greedily and to compare with the calls
    of the data, 0 to 256: metrics.jsonl and result.json have the shares with the right names, in order, and with the
    right names and arguments. An answer that max_new_tokens cuts is wrong, and counted."""
    temperature: float = 0.0
    """0: greedy, the most likely token; above 0: sample from softmax(logits / temperature)."""
    top_p: float = 1.0
    """Sample only from the most likely tokens whose probabilities together reach this value, in (0, 1]; 1: from all
    tokens."""
    seed: int = 0
    """Seed of the sampled tokens, in [0, 2**32 - 1]. The same seed samples the same text on every mesh and for every
    `rows`: in float64 always, in float32 for thousands of tokens, in bfloat16 for some dozens."""

    def __post_init__(self) -> None:
        problems = [
            *at_least("generation.samples", self.samples, 0),
            *within("generation.tool_calls", self.tool_calls, 0, MOST_TOOL_CALLS),
            *above("generation.max_new_tokens", self.max_new_tokens, 0),
            *at_least("generation.rows", self.rows, 1),
            *at_least("generation.temperature", self.temperature, 0),
            *within("generation.seed", self.seed, 0, 2**32 - 1),
        ]
        if not 0 < self.top_p <= 1:
            problems.append(f"generation.top_p={self.top_p}: must be greater than 0 and at most 1")
        elif self.top_p < 1 and self.temperature == 0:
            problems.append(
                f"generation.top_p={self.top_p}: has no effect on greedy generation (generation.temperature=0); set "
                "generation.temperature above 0, or generation.top_p=1"
            )
        raise_all(problems)


@dataclass(kw_only=True, slots=True)
class AnswersConfig:
    """The prompts that `scripts/answer.py` answers, and how often."""

    prompts: str
    """JSONL file with a prompt per line: `prompt`, a user's message or the beginning of a text, or `messages`, a
    conversation up to the answer, with `tools` if it has any. Other keys are ignored."""
    per_prompt: int = 1
    """Answers of each prompt, at least 1; more than one need generation.temperature above 0."""

    def __post_init__(self) -> None:
        raise_all(at_least("answers.per_prompt", self.per_prompt, 1))
