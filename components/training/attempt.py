"""One attempt of a recipe on this rank: process group, mesh, signals, watchdog, result, read-ahead, manual gc."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

from components import checkpoint, data, distributed, observability
from components.config.schema.cluster import NumaBinding
from components.config.schema.recipes import EvaluateConfig, RecipeConfig
from components.protocol.failures import caller_code, report_hang, report_left
from components.training.context import RunContext
from components.training.evaluation import Evaluation, TaskScores
from components.training.prepared import NOTE, deterministic_kernels
from components.training.state import TrainState
from components.watch.watchdog import StopRequest, Watchdog

if TYPE_CHECKING:
    from components.batch import Batch
    from components.data.batches import TrainBatches
    from components.distributed.mesh import Mesh
    from components.training.prepared import Prepared

_TOOL_CALLS = "tool_calls"
"""Name of the metrics of generation.tool_calls in metrics.jsonl and result.json."""
_CLOSE_SECONDS = 5.0
"""Longest wait for the thread at the end: it assembles at most one batch, but a file system may block it."""


class ReadAhead:
    """Iterator over the micro-batches of the next `steps` optimizer steps; a context manager.

    While the training thread runs a step, another thread reads, collates and pins the micro-batches of the next step,
    and no later ones. Copies to the device remain on the training thread. The cursor of `batches` does not move: the
    caller advances it once a step has been trained, so that a checkpoint continues after that step. An exception of the
    thread is raised, with the thread's traceback, when the step that needs the batch takes it.

    The thread starts with the context, and forks nothing. It is a daemon, because a read that a file system blocks must
    not keep the process alive.
    """

    def __init__(self, batches: TrainBatches, steps: int, device: torch.device) -> None:
        """Read from the cursor of `batches`; batches for a GPU are pinned."""
        self._device = device
        self._upcoming = batches.upcoming(steps)
        self._left = steps
        self._results: SimpleQueue[list[Batch] | BaseException] = SimpleQueue()
        self._wanted = threading.Semaphore(0)
        """Released when a batch is taken: the thread assembles the next one."""
        self._closed = False
        self._thread = threading.Thread(target=self._read, name="read_ahead", daemon=True)

    def __enter__(self) -> ReadAhead:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closed = True
        self._wanted.release()
        self._thread.join(_CLOSE_SECONDS)

    def __iter__(self) -> ReadAhead:
        return self

    def __next__(self) -> list[Batch]:
        if self._left <= 0:
            raise StopIteration
        result = self._results.get()
        if isinstance(result, BaseException):
            self._results.put(result)  # for later calls, since the thread has ended
            raise result
        self._left -= 1
        self._wanted.release()
        return result

    def _read(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # each thread has its own current device, initially the first
            for batches in self._upcoming:
                self._results.put([batch.pinned() for batch in batches] if self._device.type == "cuda" else batches)
                self._wanted.acquire()
                if self._closed:
                    return
        except BaseException as error:
            self._results.put(error)


class Attempt(RunContext):
    """Base class of `Run` and `EvaluationRun`. A context manager.

    On exit without an exception it writes result.json; after an exception the launcher writes it.
    """

    def __init__(self, cfg: RecipeConfig, section: str, step_timeout_seconds: float) -> None:
        """Start the process group, build the mesh and seed the random number generators. A collective.

        Args:
            section: Config section of `step_timeout_seconds`, for the watchdog's message.
        """
        if cfg.run.dir is None:
            raise ValueError("cfg.run.dir is not set: call the recipe's main(), which chooses a run directory")
        self._started = time.perf_counter()
        info = distributed.start_process_group(
            cfg.cluster.device,
            rendezvous_timeout=cfg.cluster.startup_timeout,
            collective_timeout=cfg.cluster.collective_timeout,
        )
        self._cpus = distributed.bind_to_gpu(info.device) if cfg.cluster.numa_binding is NumaBinding.auto else ""
        self._world_size, self._is_main = info.world_size, info.is_main
        caller = caller_code(2)  # the recipe's main: the report of a hang names the call in it that does not return
        self._watch = Watchdog(step_timeout_seconds, report_hang, section, caller)
        mesh = distributed.build_mesh(cfg.parallelism, info.device.type)
        distributed.seed_ranks(cfg.run.seed, mesh)
        self._stop = StopRequest(info.device)
        super().__init__(
            mesh=mesh,
            device=info.device,
            rank=info.rank,
            dir=cfg.run.dir,
            plan=self._batch_plan(mesh, info.device),
            resume_from=self._find_checkpoint(cfg.run.dir),
            data=cfg.data,
        )
        self.state = TrainState()
        """Counters of the run, summed over all its attempts."""
        self.eval_loss: float | None = None
        """Held-out loss of the last evaluation; None if it was stopped, had no units, or was of rewards."""
        self.eval_reward: float | None = None
        """Held-out reward of the last evaluation; None if it was stopped, had no units, or was of a loss."""
        self._eval_accuracy: float | None = None
        self._task_scores: dict[str, float] = {}
        self._report: observability.Reporter
        self._model: Prepared
        self._is_deterministic = cfg.run.deterministic
        self._contexts = ExitStack()
        self._has_begun = False

    def __enter__(self) -> Self:
        if self._is_deterministic:
            self._contexts.enter_context(deterministic_kernels())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None and self._has_begun:
            self._write_result()
        elif isinstance(error, SystemExit) and not error.code:
            report_left(self.rank, self.state.step, error)
        self._contexts.__exit__(kind, error, traceback)

    def _batch_plan(self, mesh: Mesh, device: torch.device) -> data.BatchPlan:
        """Return the assignment of rows to dp ranks and micro-batches."""
        raise NotImplementedError

    def _find_checkpoint(self, folder: str) -> Path | None:
        """Return the checkpoint whose weights are loaded; None if there is none. A collective."""
        raise NotImplementedError

    @property
    def stopped(self) -> bool:
        """Whether the run stops early because of a stop request; the same on every rank."""
        return self._stop.stopped

    @property
    def stopped_early(self) -> bool:
        """Whether the run is complete before its last step; the same on every rank."""
        return False

    def agreed_to_stop(self) -> bool:
        """Return whether any rank has a stop request. A collective, for loops other than the training loop."""
        return self._stop.agreed()

    def status(self, activity: str, total: int | None = None) -> AbstractContextManager[Callable[[], None]]:
        """Return a context that shows a progress bar of `activity`, such as "evaluating", with `total` parts.

        It yields a function that advances the bar by one part. Nothing is shown unless the output is a terminal.
        """
        return self._report.status(activity, total)

    def print(self, *lines: str) -> None:
        """Print lines on rank 0."""
        for line in lines:
            self._report.print(line)

    def report_generations(self, generations: list[tuple[str, str]]) -> None:
        """Print (prompt, answer) pairs on rank 0."""
        prompts, answers = [prompt for prompt, _ in generations], [answer for _, answer in generations]
        self._report.generations(prompts, answers, when=self._when)

    def report_tool_calls(self, shares: Mapping[str, float], answers: int) -> None:
        """Log the shares of generated answers with the right tool calls, like the scores of a benchmark task."""
        metrics = {f"{_TOOL_CALLS}/{name}": share for name, share in shares.items()}
        self.report_tasks(TaskScores(metrics, {_TOOL_CALLS: answers}))

    @property
    def _when(self) -> str:
        """When the generations are made, for their heading."""
        return f"after {self.state.step} steps"

    def report_eval(self, measured: Evaluation) -> None:
        """Log an evaluation; one that was stopped has neither loss nor reward."""
        self._report.evaluation(
            step=self.state.step,
            eval_loss=measured.loss,
            count=measured.count,
            unit=measured.unit,
            metrics=measured.metrics,
            eval_reward=measured.reward,
        )
        self.eval_loss = measured.loss if measured.count and measured.reward is None else None
        self.eval_reward = measured.reward if measured.count else None
        self._eval_accuracy = measured.metrics.get("accuracy") if measured.count else None

    def report_tasks(self, scores: TaskScores) -> None:
        """Log the scores of benchmark tasks; nothing if there are none, or if their evaluation was stopped."""
        self._report.tasks(step=self.state.step, metrics=scores.metrics, documents=scores.documents)
        self._task_scores |= scores.metrics

    def _print_banner(self, model: Prepared, source: str, batch: str, notes: Iterable[object]) -> None:
        observability.print_banner(
            self._report.console,
            observability.BannerFacts(
                mesh=self.mesh.shape,
                coordinates=self.mesh.coordinates,
                device=self.device,
                batch=batch,
                model=f"{source}: {model.summary}",
                local_bytes=0 if model.counts is None else model.counts.local_bytes,
                groups=[str(group) for group in distributed.groups_of_mesh(self.mesh)],
                notes=[self._cpus, *notes, *([NOTE] if self._is_deterministic else [])],
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
                counted_tokens="input" if self._model.settings.counts_inputs else "target",
                compute_dtype=str(self._model.compute_dtype).removeprefix("torch."),
                wall_seconds=round(time.perf_counter() - self._started, 1),
                peak_memory_bytes=observability.peak_memory_bytes(self.device),
                peak_reserved_bytes=observability.peak_reserved_bytes(self.device),
                first_loss=self.state.first_loss,
                last_loss=self.state.last_loss,
                first_eval_loss=self.state.first_eval_loss,
                eval_loss=self.eval_loss,
                first_reward=self.state.first_reward,
                last_reward=self.state.last_reward,
                first_eval_reward=self.state.first_eval_reward,
                eval_reward=self.eval_reward,
                eval_accuracy=self._eval_accuracy,
                tasks=self._task_scores,
                stopped_early=self.stopped_early,
                skipped_steps=self.state.skipped,
                spikes=self.state.spikes,
            )
        )


class EvaluationRun(Attempt):
    """One attempt of a run that evaluates without training."""

    def __init__(self, cfg: EvaluateConfig) -> None:
        """Start the process group, build the mesh and divide batches over dp ranks. A collective."""
        self.cfg = cfg
        super().__init__(cfg, "evaluation", cfg.evaluation.step_timeout_seconds)
        if self.resume_from is not None:
            self.state.step = checkpoint.Manifest.read(self.resume_from).step

    def _batch_plan(self, mesh: Mesh, device: torch.device) -> data.BatchPlan:
        evaluation = self.cfg.evaluation
        rows, size = evaluation.micro_batch_size, mesh.size("dp")
        padding = data.Padding.on(device, mesh.sequence_multiple, evaluation.seq_len)
        return data.BatchPlan(
            global_batch_size=rows * size, micro_batch_size=rows, dp_rank=mesh.rank("dp"), dp_size=size, padding=padding
        )

    def _find_checkpoint(self, folder: str) -> Path | None:
        chosen = self.cfg.evaluation.checkpoint
        return None if chosen is None else checkpoint.locate_checkpoint(chosen)

    def begin(self, model: Prepared, notes: Iterable[object] = ()) -> None:
        """Print the banner and start the watchdog and stop-signal handling. A collective."""
        cfg = self.cfg
        self._model = model
        self._watch.follow(model.called)
        self._report = observability.Reporter(cfg.logging, self.dir, self._is_main)
        source = str(self.resume_from or cfg.model.origin)
        batch = f"{cfg.evaluation.micro_batch_size} sequences x {self.mesh.size('dp')} dp at a time"
        self._print_banner(model, source, batch, notes)
        self._enter(self._report, self._stop, self._watch)

    def report_eval(self, measured: Evaluation) -> None:
        """Log an evaluation; one that was stopped has neither loss nor reward."""
        self._report.accept_start()
        super().report_eval(measured)

    @property
    def _when(self) -> str:
        how = self.cfg.generation
        return f"(temperature {how.temperature:g}, top_p {how.top_p:g})" if how.temperature else "(greedy)"


class GarbageCollection:
    """Context in which Python's automatic collection is off and garbage is collected after every `every` steps.

    Otherwise a rank may pause for a long collection in the middle of a step while all others wait for it. Objects that
    exist on entry (model, optimizer, modules) are frozen, that is excluded from collections. With `every` 0 nothing
    changes.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._steps = 0

    def __enter__(self) -> GarbageCollection:
        if self._every:
            gc.collect()
            gc.freeze()
            gc.disable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._every:
            gc.enable()
            gc.unfreeze()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count the body as one optimizer step, and collect after it if `every` steps have passed."""
        yield
        self._steps += 1
        if self._every and self._steps % self._every == 0:
            gc.collect()
