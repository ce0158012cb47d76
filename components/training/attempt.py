"""One attempt of a recipe on this rank: its processes, mesh, signals, watchdog, reports and result."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

from components import data, distributed, observability
from components.config.schema.recipes import EvaluateConfig, RecipeConfig
from components.protocol.failures import report_hang
from components.resilience.frames import caller_code
from components.resilience.stop_requests import StopRequest
from components.resilience.watchdog import Watchdog
from components.training.evaluation import Evaluation
from components.training.state import TrainState

if TYPE_CHECKING:
    from components.training.setup.prepared import Prepared


class Attempt:
    """What `Run` and `EvaluationRun` have in common. A context.

    At its end without an exception it writes result.json; after an exception the launcher does.
    """

    def __init__(self, cfg: RecipeConfig, section: str, step_timeout_seconds: float) -> None:
        """Start the processes, build the mesh and seed the generators. A collective.

        Args:
            section: Of the config, whose `step_timeout_seconds` this is.
        """
        if cfg.run.dir is None:
            raise ValueError("cfg.run.dir is not set: start the recipe through its main, which chooses a directory")
        self.dir: str = cfg.run.dir
        """The run directory."""
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
        caller = caller_code(2)  # the recipe's main: what it calls is what a hung rank is reported to do
        self._watch = Watchdog(step_timeout_seconds, report_hang, section, caller)
        self.mesh = distributed.build_mesh(cfg.parallelism, self.device.type)
        """The device mesh."""
        distributed.seed_ranks(cfg.run.seed, self.mesh)
        self.resume_from: Path | None = None
        """The checkpoint whose weights are loaded; None: there is none."""
        self.state = TrainState()
        """Counters of the run over all its attempts."""
        self.eval_loss: float | None = None
        """Held-out loss of the last evaluation."""
        self._report: observability.Reporter
        self._model: Prepared
        self._stop = StopRequest(self.device)
        self._contexts = ExitStack()
        self._has_begun = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None and self._has_begun:
            self._write_result()
        self._contexts.__exit__(kind, error, traceback)

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

    def say(self, *lines: str) -> None:
        """Print lines on rank 0."""
        for line in lines:
            self._report.say(line)

    def report_generations(self, answered: list[tuple[str, str]]) -> None:
        """Print prompts with the model's answers."""
        prompts, answers = [prompt for prompt, _ in answered], [answer for _, answer in answered]
        self._report.generations(prompts, answers, when=self._when)

    @property
    def _when(self) -> str:
        """Of generations."""
        return f"after {self.state.step} steps"

    def _log_eval(self, measured: Evaluation) -> None:
        self._report.evaluation(
            step=self.state.step,
            eval_loss=measured.loss,
            count=measured.count,
            unit=measured.unit,
            metrics=measured.metrics,
        )
        self.eval_loss = measured.loss if measured.count else None

    def _print_banner(self, model: Prepared, source: str, batch: str, notes: Iterable[object]) -> None:
        observability.print_banner(
            self._report.console,
            observability.BannerFacts(
                run_dir=self.dir,
                mesh=self.mesh.shape,
                coordinates=self.mesh.coordinates,
                device=self.device,
                batch=batch,
                model=f"{source}: {model.summary}",
                local_bytes=0 if model.counts is None else model.counts.local_bytes,
                groups=[str(group) for group in distributed.groups_of_mesh(self.mesh)],
                notes=list(notes),
            ),
        )

    def _enter(self, *contexts: AbstractContextManager[object]) -> None:
        for context in contexts:
            self._contexts.enter_context(context)
        self._has_begun = True

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


class EvaluationRun(Attempt):
    """One attempt of a run that evaluates and does not train."""

    def __init__(self, cfg: EvaluateConfig) -> None:
        """Start the processes, build the mesh and divide the batch. A collective."""
        super().__init__(cfg, "evaluation", cfg.evaluation.step_timeout_seconds)
        self.cfg = cfg
        rank, size, rows = self.mesh.rank("dp"), self.mesh.size("dp"), cfg.evaluation.micro_batch_size
        padding = data.Padding.on(self.device, self.mesh.sequence_multiple, cfg.evaluation.seq_len)
        self.plan = data.BatchPlan(
            global_batch_size=rows * size, micro_batch_size=rows, dp_rank=rank, dp_size=size, padding=padding
        )
        """Which rows are this rank's."""
        if cfg.evaluation.checkpoint is not None:
            self.resume_from = Path(cfg.evaluation.checkpoint)

    def begin(self, model: Prepared, notes: Iterable[object] = ()) -> None:
        """Print the banner, and be ready for the first forward. A collective."""
        cfg = self.cfg
        self._model = model
        self._watch.follow(model.called)
        self._report = observability.Reporter(cfg.logging, self.dir, self._reports)
        source = cfg.evaluation.checkpoint or cfg.model.path or "from scratch"
        batch = f"{cfg.evaluation.micro_batch_size} sequences x {self.mesh.size('dp')} dp at a time"
        self._print_banner(model, source, batch, notes)
        self._enter(self._report, self._stop, self._watch)

    def report_eval(self, measured: Evaluation) -> None:
        """Log what `evaluate` measured; an evaluation that was stopped has no loss."""
        self._log_eval(measured)

    @property
    def _when(self) -> str:
        return "(greedy)"
