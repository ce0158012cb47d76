"""The mechanics around a recipe's loop: processes, resume, reports, saves, signals, the watchdog.

`Run` owns no policy. It calls neither the model nor a function of the recipe: the recipe writes the loop, decides what
is trained and evaluated, and may ignore what is due.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from components import checkpoint, data, distributed, models, observability
from components.protocol.failures import report_hang
from components.training.garbage import GarbageOffTheStep
from components.training.metrics import StepMetrics, StepReader
from components.training.optim import learning_rate, set_learning_rate
from components.training.state import SaveClock, StopRequest, TrainState
from components.training.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Iterator

    from components.config.schema import FinetuneConfig
    from components.training.prepare import Prepared

LAG = 1
"""Steps after which a step's numbers are read, so that the host never waits for the device."""


class Run:
    """One attempt of a training run on this rank, from the start of the processes to result.json.

    A context. At its end without an exception it writes result.json; after an exception the launcher does.
    """

    def __init__(self, cfg: FinetuneConfig) -> None:
        """Start the processes, build the mesh, seed the generators and divide the batch. A collective."""
        if cfg.run.dir is None:
            raise ValueError("cfg.run.dir is not set: start the recipe through its main, which chooses a directory")
        self.cfg = cfg
        self._dir: str = cfg.run.dir
        self._started = time.perf_counter()
        info = distributed.start_process_group(
            cfg.cluster.device,
            rendezvous_timeout=cfg.cluster.startup_timeout,
            collective_timeout=cfg.cluster.collective_timeout,
        )
        self.device: torch.device = info.device
        """Where this rank computes."""
        self.rank: int = info.rank
        """Of all ranks."""
        self._world_size, self._reports = info.world_size, info.is_main
        caller = sys._getframe(1).f_code  # the recipe's main: what it calls is what a hung rank is reported to do
        self._watch = Watchdog(cfg.training.step_timeout_seconds, report_hang, home=caller)
        self.mesh = distributed.build_mesh(cfg.parallelism, self.device.type)
        """The device mesh."""
        distributed.seed_ranks(cfg.run.seed, self.mesh)
        self.plan = data.BatchPlan.of(cfg.training, self.mesh.rank("dp"), self.mesh.size("dp"))
        """Which rows of each global batch are this rank's."""
        self.resume_from: Path | None = checkpoint.find_checkpoint(self._dir, cfg.run.resume)
        """The checkpoint that `resume` loads; None: there is none."""
        self.state = TrainState()
        """Counters of the run over all its attempts."""
        self.eval_loss: float | None = None
        """Held-out loss of the last evaluation."""
        self._has_begun = False
        self._stop = StopRequest(self.device)
        self._contexts = ExitStack()
        self._step_contexts = ExitStack()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._step_contexts.__exit__(kind, error, traceback)
        if error is None and self._has_begun:
            self._write_result()
        self._contexts.__exit__(kind, error, traceback)

    def resume(self, model: Prepared, optimizer: torch.optim.Optimizer, batches: data.TrainBatches) -> None:
        """Load the checkpoint of an earlier attempt, if there is one. A collective.

        Raises ConfigError where the data or its order differ from the checkpoint's and that is not accepted.
        """
        cfg = self.cfg
        self._model, self._optimizer, self._batches = model, optimizer, batches
        self._watch.follow(model.replica)
        title = observability.run_title(cfg.model, cfg.data, self.mesh.shape)
        # Before the checkpoint is loaded: what the reporter imports draws random numbers.
        self._report = observability.Reporter(cfg.logging, self._dir, self._reports, cfg.training.max_steps, title)
        if self.resume_from is not None:
            saved = checkpoint.load_checkpoint(self.resume_from, model.module, optimizer)
            self.state = TrainState.from_dict(saved["state"])
            batches.load_state_dict(saved["data"], cfg.run.accept_changes)
        self.state.optimizer = type(optimizer).__name__
        self._resumed_at = self.state.step

    def begin(self, samples: data.Dataset, notes: Iterable[object] = ()) -> None:
        """Print the banner and some samples, and be ready for the first step. A collective."""
        cfg, model = self.cfg, self._model
        observability.print_banner(
            self._report.console,
            observability.Facts(
                run_dir=self._dir,
                mesh=self.mesh.shape,
                coordinates=self.mesh.coordinates,
                device=self.device,
                batch=f"{self.plan}, up to {cfg.training.seq_len} tokens each",
                model=model.summary,
                local_bytes=model.counts.local_bytes,
                groups=[str(group) for group in distributed.groups_of_mesh(self.mesh)],
                notes=list(notes),
            ),
        )
        for index in range(min(cfg.logging.examples, len(samples))):
            self.say(f"\nexample {index}, what carries loss in [[ ]]:\n{samples.show(index)}")
        if self.resume_from is not None:
            self.say(f"resumed from {self.resume_from}")
        self._report.continue_from(self.state.step)
        self._reader, self._clock = StepReader(LAG), SaveClock(cfg.checkpoint.every_minutes)
        self._traffic = distributed.StepTraffic(self.mesh, self._report.traffic, enabled=cfg.logging.comm)
        self._profile = observability.StepProfile(cfg.logging.profile, self._dir, self.say)
        self._saver = checkpoint.Saver(self._dir, model.module, self._optimizer, cfg.checkpoint, self.say)
        self._gc = GarbageOffTheStep(cfg.training.gc_every)
        for context in (self._report, self._stop, self._watch, self._saver, self._gc):
            self._contexts.enter_context(context)
        self._has_begun = True

    def steps(self) -> Iterator[Step]:
        """Yield every step that is left, until the last one or a request to stop."""
        cfg = self.cfg
        while self.state.step < cfg.training.max_steps and not self.stopped:
            began = time.perf_counter()
            set_learning_rate(self._optimizer, cfg.optimizer, self.state.step, cfg.training.max_steps)
            number = self.state.step + 1
            for context in (self._traffic.step(), self._watch.step(number), self._profile.step(), self._gc.step()):
                self._step_contexts.enter_context(context)
            asked = (*self._stop.flags(), self._clock.due())
            step = Step(self, number, self._report.next_batch(self._batches), asked, began)
            yield step
            if not step.is_done:
                raise RuntimeError(f"step {number} of run.steps() was not ended: call step.done(train_step(...)) in it")
        self._read_all()

    @property
    def stopped(self) -> bool:
        """Whether all ranks know that the run stops before its end; equal on every rank."""
        return self._stop.stopped

    def agreed_to_stop(self) -> bool:
        """Return whether any rank was asked to stop. A collective, for loops other than that of the steps."""
        return self._stop.agreed()

    def status(self, doing: str) -> AbstractContextManager[None]:
        """Context in which the progress bar shows what the run does besides training."""
        return self._report.status(doing)

    def say(self, text: str) -> None:
        """Print a line on rank 0."""
        self._report.say(text)

    def report_eval(self, loss: float, tokens: int) -> None:
        """Log a held-out loss; without tokens the evaluation was stopped, and there is none."""
        self._read_all()
        self._report.evaluation(step=self.state.step, eval_loss=loss, tokens=tokens)
        self.eval_loss = loss if tokens else None
        self.state.begin(self.eval_loss)

    def report_generations(self, prompts: list[str], answers: list[str]) -> None:
        """Print what the model answers."""
        self._report.generations(prompts, answers, when=f"after {self.state.step} steps")

    def save(self, step: Step) -> None:
        """Save a checkpoint after a step, marked with its held-out loss if the step had one. A collective."""
        self._save(checkpoint.Mark(self.eval_loss if step.due_eval else None, ephemeral=not step.save_is_scheduled))

    def finish(self) -> None:
        """Save what is not saved, and wait until it is written. A collective; the loop may have been left early."""
        self._step_contexts.close()
        self._read_all()
        is_new = self.state.step > self._resumed_at or not (self.resume_from or self.stopped)
        if is_new and (self.cfg.checkpoint.last or self.stopped):
            self._save(checkpoint.Mark(None if self.stopped else self.eval_loss), last=True)
        self._saver.wait()

    def export(self, tokenizer: Any) -> None:
        """Write the folders that transformers and PEFT load, as checkpoint.export and peft.export say. A collective."""
        cfg = self.cfg
        if not cfg.checkpoint.export:
            return
        card = observability.model_card(self._dir, self.state.to_dict(), str(self.mesh.shape))
        for folder in models.export_run(self._model.module, tokenizer, self._dir, cfg.model, cfg.peft, card):
            self.say(f"exported {folder}")

    def _save(self, mark: checkpoint.Mark, last: bool = False) -> None:
        extra = {"state": self.state.to_dict(), "data": self._batches.state_dict()}
        self._saver.save(self.state.step, extra, mark, last=last)
        self._clock.restart()

    def _end_step(self, step: Step, numbers: torch.Tensor) -> None:
        self._step_contexts.close()
        cfg = self.cfg
        self.state.step = step.number
        evaluates = bool(cfg.training.eval_every) and step.number % cfg.training.eval_every == 0
        saves = bool(cfg.checkpoint.every) and step.number % cfg.checkpoint.every == 0
        arrived = self._reader.push(step.number, numbers, step.began, drain=evaluates or saves)
        self._record(arrived)
        if self._stop.heed(arrived):
            return
        by_time = any(each.must_save for each in arrived)
        if by_time:
            self._read_all()
        if step.number < cfg.training.max_steps:
            step.due_eval, step.save_is_scheduled, step.save_is_late = evaluates, saves, by_time

    def _read_all(self) -> None:
        self._record(self._reader.flush())

    def _record(self, steps: Iterable[StepMetrics]) -> None:
        cfg = self.cfg
        for step in steps:
            self.state.record(step)
            lr = learning_rate(cfg.optimizer, step.step - 1, cfg.training.max_steps)
            self._report.step(step, lr=lr, tokens=self.state.tokens, every=cfg.training.log_every)
            self.state.refuse_to_diverge(step, cfg.training)

    def _write_result(self) -> None:
        self._report.finish(
            observability.Result(
                status=self._stop.status,
                steps=self.state.step,
                mesh=str(self.mesh.shape),
                processes=self._world_size,
                compute_dtype=str(self._model.compute_dtype).removeprefix("torch."),
                wall_seconds=round(time.perf_counter() - self._started, 1),
                peak_memory_bytes=observability.peak_memory_bytes(self.device),
                peak_reserved_bytes=observability.peak_reserved_bytes(self.device),
                first_loss=self.state.first_loss,
                last_loss=self.state.last_loss,
                first_eval_loss=self.state.first_eval_loss,
                eval_loss=self.eval_loss,
                skipped_steps=self.state.skipped,
            )
        )


@dataclass(slots=True)
class Step:
    """One turn of the recipe's loop."""

    run: Run
    number: int
    """The first is 1."""
    batches: list[data.MicroBatch]
    """This rank's micro-batches."""
    asked: tuple[float, float, float]
    """(preempt, interrupt, save) of this rank, for the reduction of `train_step`."""
    began: float
    """`time.perf_counter()` when it began."""
    due_eval: bool = False
    """The schedule has an evaluation here (training.eval_every)."""
    save_is_scheduled: bool = False
    """The schedule has a save here (checkpoint.every)."""
    save_is_late: bool = False
    """The last save was checkpoint.every_minutes ago, on some rank."""
    is_done: bool = False
    """`done` was called."""

    @property
    def due_save(self) -> bool:
        """Whether to save now; a run that stops saves at its end."""
        return (self.save_is_scheduled or self.save_is_late) and not self.run.stopped

    def done(self, numbers: torch.Tensor) -> None:
        """End the step with what `train_step` returned; the numbers of the step before it are logged."""
        self.is_done = True
        self.run._end_step(self, numbers)
