"""The machinery around a recipe's training loop: resume, step iterator, reports and saves.

`Run` holds no policy. The recipe owns the loop: it calls the model, decides what is trained and evaluated, and may
ignore an evaluation or a save that is due.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from components import checkpoint, data, models, observability
from components.checkpoint.load import STORED_DTYPE
from components.config.schema.cluster import ClusterKind
from components.config.schema.data import Balance
from components.config.schema.optimizer import learning_rate
from components.config.schema.recipes import TrainConfig
from components.config.stored_run import STEP_KEYS, run_title
from components.data.dataset import MixtureFacts
from components.json_collectives import broadcast_json
from components.protocol.errors import ConfigError, raise_all
from components.training.attempt import Attempt, GarbageCollection, ReadAhead
from components.training.optimizers.muon import Muon
from components.training.optimizers.optim import AdamW8bit, keep_group_rates, set_learning_rate
from components.training.state import SaveClock, StepMetrics, StepReader, TrainState
from components.training.step_cost import StepProfile, StepTraffic
from components.watch.faults import arm_bit_flips

if TYPE_CHECKING:
    from collections.abc import Iterator

    from components.batch import Batch
    from components.distributed.mesh import Mesh
    from components.training.evaluation import Evaluation, TaskScores
    from components.training.prepared import Prepared
    from components.training.step import StepNumbers

_LAG = {"cuda": 1}
"""Number of steps after which a step's metrics are read by device, so that the host does not wait for it; else 0."""


class Run(Attempt):
    """One attempt of a training run on this rank, from process-group start-up to result.json."""

    def __init__(self, cfg: TrainConfig) -> None:
        """Start the process group, build the mesh, seed the random number generators and divide the global batch.

        A collective.
        """
        self.cfg = cfg
        super().__init__(cfg, "training", cfg.training.step_timeout_seconds)
        self.total_steps = cfg.training.max_steps or 0
        """Optimizer steps of the whole run. With training.epochs it is 0 until `begin`, which reads the data."""
        self._step_contexts = ExitStack()
        self._comparison_is_due = False
        """Whether the replicas are still to be compared after the last step (checkpoint.check_replicas)."""
        self._evaluated_step: int | None = None
        """Number of steps before the last evaluation of this attempt."""
        self._last_save: Path | None = None
        """The run's last checkpoint, once it is written."""
        self._longest_step = 0.0
        """Seconds of the longest step of this attempt but the first, which loads and compiles kernels."""
        self._lead_is_short = False

    def _batch_plan(self, mesh: Mesh, device: torch.device) -> data.BatchPlan:
        padding = data.Padding.on(device, mesh.sequence_multiple, self.cfg.training.seq_len)
        plan = data.BatchPlan.of(self.cfg.training, self.cfg.data, mesh.rank("dp"), mesh.size("dp"), padding)
        return replace(plan, deals=self.cfg.data.balance is Balance.auto, pp=mesh.size("pp"))

    def _find_checkpoint(self, folder: str) -> Path | None:
        self._mirror = checkpoint.Mirror.open(self.cfg.checkpoint, folder)
        self._damaged: list[Path] = []
        return checkpoint.find_checkpoint(folder, self.cfg.run.resume, self._mirror, self._damaged)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._step_contexts.__exit__(kind, error, traceback)
        super().__exit__(kind, error, traceback)

    def begin(
        self,
        model: Prepared,
        optimizer: checkpoint.Optimizers,
        batches: data.TrainBatches,
        held_out: data.EvalBatches | None = None,
    ) -> None:
        """Load the checkpoint to resume from, if there is one, and print the banner. A collective.

        Args:
            optimizer: One optimizer, or several by name. All share one gradient norm and one decision to skip an
                update.
            held_out: Held-out batches, for the banner only.

        Raises ConfigError if the data or its order differ from the checkpoint's and run.accept_changes does not allow
        it, or if training.epochs gives fewer steps than the batch-size ramp, the profile or the final decay needs.
        """
        cfg = self.cfg
        if held_out is not None and isinstance(
            held_out.dataset, data.Dataset | data.PackedDataset | data.MixtureDataset
        ):
            data.prompts_of_calls(held_out.dataset, cfg.generation.tool_calls)  # raises if they cannot be compared
        if cfg.training.ema_decay is not None and model.average is None:
            raise ConfigError(
                f"training.ema_decay={cfg.training.ema_decay}: this recipe's model has no average; prepare it with "
                "training.prepare or model.with_average(cfg.training), or set training.ema_decay=null"
            )
        for key, value, off, present in (
            ("skip_spikes", cfg.training.skip_spikes, "null", model.settings.spikes),
            ("neftune_alpha", cfg.training.neftune_alpha or None, "0", model.settings.noise),
        ):
            if value is not None and present is None:
                raise ConfigError(
                    f"training.{key}={value:g}: this recipe's model was not prepared for it; prepare it with "
                    f"training.prepare, or set training.{key}={off}"
                )
        self._model, self._optimizer, self._batches = model, optimizer, batches
        for each in checkpoint.list_optimizers(optimizer):
            keep_group_rates(each, cfg.optimizer)
        self._average = None if model.average is None else model.average.tensors
        self._watch.follow(model.called)
        title = run_title(cfg.model, cfg.data, self.mesh.shape)
        # Must precede the load of the checkpoint, which restores the random states: the reporter's imports draw random
        # numbers.
        self._report = observability.Reporter(cfg.logging, self.dir, self._is_main, self._count_steps(batches), title)
        if self.resume_from is not None:
            saved = checkpoint.load_checkpoint(self.resume_from, model.module, optimizer, self._average)
            self.state = TrainState.from_dict(saved["state"])
            batches.load_state_dict(saved["data"], cfg.run.accept_changes)
            if model.settings.spikes is not None:
                model.settings.spikes.load_state(saved.get("spikes", [[], []]))
            self._resumed_average = bool(saved.get("has_average"))
            if model.average is not None and not self._resumed_average:
                model.average.restart()
        self.total_steps = self._count_steps(batches)  # from the cursor that was loaded
        self.state.optimizer = " and ".join(type(each).__name__ for each in checkpoint.list_optimizers(optimizer))
        self._resumed_at = self.state.step
        self._replicas = checkpoint.ReplicaCheck(
            self.mesh, model.module, optimizer, cfg.checkpoint.check_replicas, self._average
        )
        arm_bit_flips(checkpoint.list_optimizers(optimizer))
        self._print_start(model, batches.dataset, held_out)
        self._report.begin(self.state.step, self.total_steps, self._saved_at())
        self._reader = StepReader(_LAG.get(self.device.type, 0))
        self._clock = SaveClock(cfg.checkpoint.every_minutes)
        self._traffic = StepTraffic(self.mesh, self._report.traffic, enabled=cfg.logging.comm)
        self._profile = StepProfile(cfg.logging.profile, self.dir, self.print)
        self._saver = checkpoint.Saver(
            self.dir, model.module, optimizer, cfg.checkpoint, self.print, self._average, self._mirror
        )
        self._saver.damaged += self._damaged
        self._gc = GarbageCollection(cfg.training.gc_every)
        self._enter(self._report, self._stop, self._watch, self._saver, self._gc)

    @property
    def _own_checkpoint(self) -> Path | None:
        """Checkpoint of this run that it resumes from; None if it begins, or starts from another run's checkpoint."""
        folder = self.resume_from
        is_own = folder is not None and folder.parent.parent.absolute() == Path(self.dir).absolute()
        return folder if is_own else None

    def _saved_at(self) -> float | None:
        """Return when this run saved the checkpoint that it resumes from, in seconds since the epoch; None if it
        begins, or starts from another run's checkpoint."""
        folder = self._own_checkpoint
        return checkpoint.saved_at(folder) if folder is not None and self._is_main else None

    def _count_steps(self, batches: data.TrainBatches) -> int:
        """Return the optimizer steps of the whole run, the same on every rank: all have the same data and cursor."""
        cfg = self.cfg
        if cfg.training.epochs is None:
            return self.total_steps
        steps = batches.steps_for(cfg.training.epochs)
        raise_all(
            [
                *cfg.training.ramp_end_problems(steps),
                *cfg.training.stage_end_problems(self.plan.stages, steps),
                *cfg.logging.profile.end_problems(cfg.training, steps),
                *cfg.optimizer.decay_problems(cfg.training, steps),
            ]
        )
        return steps

    def _print_start(self, model: Prepared, train_set: Any, held_out: data.EvalBatches | None) -> None:
        cfg = self.cfg
        facts = replace(self.plan, steps=self.total_steps).facts(train_set)
        stages = self._batches.stages(self.total_steps)
        if isinstance(facts, MixtureFacts) and stages:
            facts = facts.with_counts([sum(rows) for rows in zip(*(counts for *_, counts in stages), strict=True)])
        held_out_facts = None if held_out is None else held_out.facts
        each = {"pairs": "per answer"}.get(facts.batch_unit, "each")
        batch = f"{self.plan.describe(facts.batch_unit)}, up to {cfg.training.seq_len} tokens {each}"
        if cfg.training.epochs is not None:
            batch += f"; epochs={cfg.training.epochs:g}: {self.total_steps} steps"
        data_notes = [("train data", facts), ("warning", facts.warning), ("held-out data", held_out_facts or "")]
        if isinstance(facts, MixtureFacts):
            data_notes.insert(1, ("stages", "\n".join(self._describe_stage(facts, *stage) for stage in stages)))
        optimizers = [
            optimizer.note
            for optimizer in checkpoint.list_optimizers(self._optimizer)
            if isinstance(optimizer, Muon | AdamW8bit)
        ]
        self._print_banner(
            model,
            cfg.model.origin,
            batch,
            [
                *model.notes,
                model.settings.spikes.note(self.total_steps) if model.settings.spikes is not None else "",
                *data_notes,
                self._batches.balance,
                *optimizers,
                self._replicas.note,
            ],
        )
        for index in range(min(cfg.logging.examples, len(train_set))):
            self.print(f"\nexample {index}, target tokens in [[ ]]:\n{train_set.show(index)}")
        if self.resume_from is not None:
            self.print(f"resumed from {self.resume_from}")
            if self._average is not None and not self._resumed_average:
                self.print(f"the checkpoint holds no average of the weights: it starts at step {self.state.step}")
            elif self._average is None and self._resumed_average:
                self.print("the average of the weights in the checkpoint is not continued: training.ema_decay=null")

    def _describe_stage(self, facts: MixtureFacts, first: int, end: int, counts: list[int]) -> str:
        """Return the steps, rows and learning rates of a stage from step `first` (0-based) to `end`."""
        peak = self.cfg.optimizer.warmup_steps - 1
        rates = [f"{self._lr(step):.3g}" for step in (first, peak, end - 1) if first <= step < end]
        length = self.plan.length_of(first)
        cut = "" if length is None else f", cut to {length:,} tokens"
        rate = " to ".join(dict.fromkeys(rates))
        return f"steps {first + 1:,} to {end:,}: {facts.describe_rows(counts)}{cut}; lr {rate}"

    def _lr(self, step: int) -> float:
        return learning_rate(self.cfg.optimizer, step, self.total_steps, self.plan.stages)

    def steps(self) -> Iterator[Step]:
        """Yield the remaining steps, until `total_steps`, an early stop or a stop request."""
        with ReadAhead(self._batches, self.total_steps - self.state.step, self.device) as batches:
            while self.state.step < self.total_steps and not self.stopped and not self.stopped_early:
                step = self._begin_step(batches)
                yield step
                if not step.is_done:
                    raise RuntimeError(
                        f"step {step.number} of run.steps() was not ended: call step.done(train_step(...)) in it"
                    )
        self._read_all()

    def _begin_step(self, batches: ReadAhead) -> Step:
        if self._comparison_is_due:  # the recipe did not make the save that was due
            self._compare_replicas()
        began, number = time.perf_counter(), self.state.step + 1
        for optimizer in checkpoint.list_optimizers(self._optimizer):
            set_learning_rate(optimizer, self.cfg.optimizer, self.state.step, self.total_steps, self.plan.stages)
        for context in (self._traffic.step(), self._watch.step(number), self._profile.step(), self._gc.step()):
            self._step_contexts.enter_context(context)
        self._stop.flags[2] = self._clock.due()
        if (noise := self._model.settings.noise) is not None:
            noise.step = number
        return Step(self, number, self._report.next_batch(batches), self._stop.flags, began)

    def log(self, step: Step, **values: torch.Tensor | float) -> None:
        """Log additional values of a step to metrics.jsonl and the trackers. Call it before `step.done`.

        `reward` is the mean reward of the step's answers, which is reported in place of the loss. Device scalars are
        read with the step's other metrics, so the host does not wait. Values are not reduced over ranks: those of rank
        0 are logged.
        """
        if step.is_done:
            raise RuntimeError(
                f"run.log(step, ...) was called after step.done() of step {step.number}: call it before step.done()"
            )
        if reserved := sorted(values.keys() & STEP_KEYS):
            raise ValueError(
                f"run.log(step, {reserved[0]}=...): every line of metrics.jsonl has {reserved[0]} already; "
                f"choose another name than {', '.join(sorted(STEP_KEYS))}"
            )
        self._reader.log(values)

    def report_eval(self, measured: Evaluation) -> None:
        """Log an evaluation; one that was stopped has neither loss nor reward."""
        self._read_all()
        policy = self.cfg.training
        if policy.early_stop_patience is not None and self.state.step % policy.eval_every == 0:
            # Rank 0's numbers on all ranks: a difference in the last bit must not let them decide differently.
            loss, reward = broadcast_json([measured.loss, measured.reward] if measured.count else [None, None])
            self.state.count_eval(loss, policy.early_stop_min_delta, reward)
            count = {"without_improvement": float(self.state.evals_without_improvement)}
            measured = replace(measured, metrics={**measured.metrics, **count})
        super().report_eval(measured)
        self._evaluated_step = self.state.step
        self.state.begin(self.eval_loss, self.eval_reward)
        if self.stopped_early:
            self.print(f"stopped early: no improvement in {self.state.evals_without_improvement} evaluations")

    def report_tasks(self, scores: TaskScores) -> None:
        """Log the scores of benchmark tasks; nothing if there are none, or if their evaluation was stopped."""
        self._read_all()
        super().report_tasks(scores)

    @property
    def stopped_early(self) -> bool:
        """Whether evaluations stopped improving (training.early_stop_patience); the same on every rank."""
        patience = self.cfg.training.early_stop_patience
        is_last = self.state.step >= self.total_steps
        return patience is not None and not is_last and self.state.evals_without_improvement >= patience

    @property
    def due_eval(self) -> bool:
        """Whether to evaluate after the loop: the run is complete, and its last step was not evaluated yet."""
        return not self.stopped and self._evaluated_step != self.state.step

    def _mark(self, *, ephemeral: bool = False) -> checkpoint.Mark:
        """Return the mark of a checkpoint, with the evaluation after the current step if there was a complete one."""
        if self._evaluated_step != self.state.step or self.stopped:
            return checkpoint.Mark(ephemeral=ephemeral)
        return checkpoint.Mark(self.eval_loss, ephemeral, self.eval_reward)

    def save(self, step: Step) -> None:
        """Save a checkpoint after a step, with its evaluation if it was evaluated before. A collective.

        A stop request that arrives during a save in the foreground ends the run after this step, without another save.
        """
        folder = self._save(self._mark(ephemeral=not step.save_is_scheduled))
        if folder is not None and self._stop.agreed(wait=True):
            self._last_save = folder

    def finish(self) -> None:
        """Save the last checkpoint if it is due, and wait for all writes. A collective.

        The loop may have been left early. If nothing was trained, the checkpoint that the run resumed from is the last
        one: it is copied to checkpoint.remote if the copy of an earlier attempt failed.
        """
        self._step_contexts.close()
        self._report.accept_start()
        self._read_all()
        if not self.stopped:
            self.state.raise_if_none_finite()
        self._profile.finish()
        self._save_last()

    def export(self, tokenizer: Any) -> None:
        """Export the model for transformers and PEFT, according to checkpoint.export and peft.export. A collective.

        A run that was stopped is not exported; it is saved, and exports when it resumes.
        """
        cfg = self.cfg
        if self._stop.agreed(wait=True):
            self._save_last()
        if self.stopped or not cfg.checkpoint.export:
            return
        averaged = cfg.checkpoint.export_average and self._model.average is not None
        state = {**self.state.to_dict(), STORED_DTYPE: self._model.stored_dtype}
        card = observability.render_model_card(self.dir, state, str(self.mesh.shape), averaged=averaged)
        with self._model.with_weights(averaged), self.status("exporting"):
            base_weights = f"{self._model.stored_dtype} {self._saver.base_fingerprint}"
            folders = models.export_run(self._model.module, tokenizer, self.dir, cfg.peft, card, base_weights)
        for folder in folders:
            self.print(f"exported {folder}")
        if self._mirror is not None:
            with self.status("copying the export"):
                self._mirror.upload_export(folders)

    def _save_last(self) -> None:
        """Save the last checkpoint if it is due and not saved yet, and wait for all writes."""
        is_new = self.state.step > self._resumed_at or not (self.resume_from or self.stopped)
        if self._last_save is not None:
            self._saver.copy(self._last_save)
        elif is_new and (self.cfg.checkpoint.last or self.stopped):
            self._last_save = self._save(self._mark(), last=True)
        elif is_new:
            self._compare_replicas()  # the export must not hold wrong numbers either
        elif self._own_checkpoint is not None:
            self._saver.copy(self._own_checkpoint)
        self._saver.wait()

    def _save(self, mark: checkpoint.Mark, last: bool = False) -> Path | None:
        self._compare_replicas()
        has_average = self._average is not None
        extra = {"state": self.state.to_dict(), "data": self._batches.state_dict(), "has_average": has_average}
        if self._model.settings.spikes is not None:
            extra["spikes"] = self._model.settings.spikes.state()
        if self._model.stored_dtype is not None:
            extra[STORED_DTYPE] = self._model.stored_dtype
        with self.status("saving"):
            folder = self._saver.save(self.state.step, extra, mark, last=last)
        self._warn_of_short_lead()
        self._clock.restart()
        return folder

    def _end_step(self, step: Step, numbers: StepNumbers) -> None:
        self._step_contexts.close()
        self._report.accept_start()
        cfg = self.cfg
        self._batches.advance()
        self.state.step = step.number
        evaluates = bool(cfg.training.eval_every) and step.number % cfg.training.eval_every == 0
        saves = bool(cfg.checkpoint.every) and step.number % cfg.checkpoint.every == 0
        arrived = self._reader.push(step.number, numbers, step.began, drain=evaluates or saves)
        self._record(arrived)
        if self._stop.update((each.preempt, each.interrupt) for each in arrived):
            return
        by_time = any(each.must_save for each in arrived)
        if by_time:
            self._read_all()
        is_last = step.number >= self.total_steps
        if not is_last:
            step.due_eval, step.save_is_scheduled, step.save_is_late = evaluates, saves, by_time
        # Where a save follows, `_save` compares right before it: after an evaluation, and only once.
        self._comparison_is_due = self._replicas.due(step.number)
        if self._comparison_is_due and not step.due_save and not is_last:
            self._compare_replicas()

    def _compare_replicas(self) -> None:
        """Compare the replicas after the last step. A collective; raises CorruptRank."""
        self._comparison_is_due = False
        self._replicas.compare(self.state.step)

    def _read_all(self) -> None:
        self._record(self._reader.flush())

    def _record(self, steps: Iterable[StepMetrics]) -> None:
        cfg = self.cfg
        for step in steps:
            self.state.record(step)
            self._report.step(step, lr=self._lr(step.step - 1), tokens=self.state.tokens, every=cfg.training.log_every)
            if step.step > self._resumed_at + 1:
                self._longest_step = max(self._longest_step, step.seconds)
                self._warn_of_short_lead()
            self.state.raise_if_diverged(step, cfg.training)

    def _warn_of_short_lead(self) -> None:
        """Print once that the job's signal comes too late for two steps and a save, the most that a stop takes."""
        cluster, step, save = self.cfg.cluster, self._longest_step, self._saver.longest_write
        writes = 2 if self.cfg.checkpoint.async_save else 1  # a save in the background ends first
        needed = 2 * step + writes * save
        if self._lead_is_short or cluster.kind is ClusterKind.local or needed <= cluster.signal_lead_seconds:
            return
        self._lead_is_short = True
        saves = f" and {'a save' if writes == 1 else 'two saves'} of {save:.1f} s" if save else ", without the save,"
        self.print(
            f"warning: cluster.signal_lead_seconds={cluster.signal_lead_seconds}: a stop may take {needed:.1f} s (two "
            f"steps of {step:.1f} s{saves} as measured), and the job could be killed before it has saved; set it to "
            f"{math.ceil(1.5 * needed)} or more at the next start"
        )


@dataclass(slots=True)
class Step:
    """One step of the recipe's training loop."""

    run: Run
    number: int
    """Number of the step, starting at 1."""
    batches: list[Batch]
    """This rank's micro-batches."""
    requests: torch.Tensor
    """This rank's (preempt, interrupt, save) requests as 0 or 1, which `train_step` sums over all ranks at its end."""
    began: float
    """`time.perf_counter()` at the start of the step."""
    due_eval: bool = False
    """Whether an evaluation is scheduled after this step (training.eval_every)."""
    save_is_scheduled: bool = False
    """Whether a save is scheduled after this step (checkpoint.every)."""
    save_is_late: bool = False
    """Whether the last save was at least checkpoint.every_minutes ago on some rank."""
    is_done: bool = False
    """Whether `done` was called."""

    @property
    def due_save(self) -> bool:
        """Whether to save now; False in a run that is stopping, which saves in `Run.finish`."""
        ends = self.run.stopped or self.run.stopped_early
        return (self.save_is_scheduled or self.save_is_late) and not ends

    def done(self, numbers: StepNumbers) -> None:
        """End the step with the metrics that `train_step` returned, and log them; on a GPU those of the step before."""
        self.is_done = True
        self.run._end_step(self, numbers)
