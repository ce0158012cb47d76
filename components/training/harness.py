"""Benchmark tasks of lm-eval: loaded before the model, evaluated on the model of a run."""

from __future__ import annotations

import difflib
import os
import random
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from components import data, distributed
from components.chat_template import ChatTemplate
from components.checkpoint.save import random_state, set_random_state
from components.config.schema.training import TasksConfig, TrainingTasksConfig
from components.json_collectives import all_gather_json
from components.protocol.errors import ConfigError, raise_all
from components.training.context import RunContext
from components.training.evaluation import RequestBatches, TaskScores
from components.training.prepared import Prepared

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from components.training.attempt import Attempt
    from components.training.run import Step

_FEWSHOT_SEED = 1234
"""Seed of lm-eval's choice of examples, and of numpy and torch; Python's is 0, as with lm-eval's own command."""
_PLAIN_FILTER = "none"
"""Name of the filter of tasks that do not process answers."""


@dataclass(frozen=True, slots=True)
class BenchmarkTasks:
    """Tasks with their documents."""

    cfg: TasksConfig
    tokenizer: PreTrainedTokenizerBase
    loaded: Mapping[str, Any]
    """Tasks and groups by name, as lm-eval's TaskManager returns them; empty without tasks."""

    def due(self, step: Step) -> bool:
        """Return whether to evaluate after a training step (evaluation.every). The last step is left to the end."""
        every = self.cfg.every if isinstance(self.cfg, TrainingTasksConfig) else 0
        return bool(self.loaded) and every > 0 and step.number % every == 0 and step.number < step.run.total_steps

    def evaluate(self, model: Prepared, run: Attempt) -> None:
        """Evaluate the tasks, and report their scores; nothing without tasks or once a stop request arrives."""
        run.report_tasks(evaluate_tasks(model, self, run))


def load_tasks(cfg: TasksConfig, tokenizer: PreTrainedTokenizerBase) -> BenchmarkTasks:
    """Load the tasks and their data sets, the first rank of each node before the others. A collective.

    Raises ConfigError, without a task being evaluated, if a task is unknown, its data cannot be loaded, or it needs
    what Meshbook does not support.
    """
    if not cfg.tasks:
        return BenchmarkTasks(cfg, tokenizer, {})
    if cfg.apply_chat_template and tokenizer.chat_template is None:
        raise ConfigError("evaluation.apply_chat_template=true: the tokenizer has no chat template; set it to false")
    if cfg.apply_chat_template:
        ChatTemplate(tokenizer).source(None)  # rejects a tokenizer without a default template
    loaded, problems = None, list[str]()
    with _lm_eval_random_state():
        with distributed.FirstRankPerNode() as is_first:
            if is_first:
                try:
                    loaded = _load(cfg)
                except ConfigError as error:  # raised below, on all ranks alike
                    problems = error.problems
        raise_all(next((each for each in all_gather_json(problems) if each), []))
        loaded = loaded or _load(cfg)
    for name, task in loaded["tasks"].items():
        _check_task(name, task)
        if cfg.num_fewshot is not None and task.get_config("num_fewshot") != 0:
            task.set_config(key="num_fewshot", value=cfg.num_fewshot)
        elif task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
    return BenchmarkTasks(cfg, tokenizer, loaded)


def evaluate_tasks(model: Prepared, tasks: BenchmarkTasks, run: RunContext) -> TaskScores:
    """Return the scores of the tasks; none without tasks, or if any rank has a stop request. A collective.

    Weights are those of held-out losses: the averaged ones if training.eval_weights selects them. Every rank builds
    all requests and computes the metrics of all results, and the forward passes are divided over the ranks.
    """
    if not tasks.loaded or run.agreed_to_stop():
        return TaskScores()
    from lm_eval.evaluator import evaluate

    from components.training.mesh_lm import MeshLM, Stopped

    cfg, was_training = tasks.cfg, model.module.training
    lm = MeshLM(model, tasks.tokenizer, *_sizes(cfg, model, tasks.tokenizer, run), run)
    for task in tasks.loaded["tasks"].values():
        task.set_fewshot_seed(seed=_FEWSHOT_SEED)  # here, so that every evaluation has the same examples
    model.module.eval()
    try:
        # Eager, because compiled layers would be recompiled for the many shapes of requests.
        with (
            run.status("evaluating tasks"),
            model.with_weights(model.evaluates_average),
            torch.compiler.set_stance("force_eager"),
            _lm_eval_random_state(),
        ):
            results = evaluate(
                lm,
                tasks.loaded,
                limit=cfg.limit,
                bootstrap_iters=0,  # standard errors of some metrics would fork a process per core on every rank
                log_samples=False,
                apply_chat_template=cfg.apply_chat_template,
                fewshot_as_multiturn=cfg.apply_chat_template,
            )
    except Stopped:
        return TaskScores()
    finally:
        model.module.train(was_training)
    return _scores(results)


def _load(cfg: TasksConfig) -> Mapping[str, Any]:
    from lm_eval.tasks import TaskManager
    from yaml import YAMLError

    path = None if cfg.task_path is None else os.path.expanduser(cfg.task_path)
    key = f"evaluation.tasks={cfg.tasks}"
    try:
        manager = None if path is None else TaskManager(include_path=path, include_defaults=False)
        if manager is None or not set(cfg.tasks) <= set(manager.all_tasks):
            manager = TaskManager(include_path=path)  # takes seconds: reads all files of lm-eval's own tasks
        _check_names(cfg, manager.all_tasks)
        loaded: Mapping[str, Any] = manager.load(list(cfg.tasks))
    except ConfigError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError, RuntimeError, YAMLError) as error:
        # What lm-eval and datasets raise for tasks whose files, data sets or packages are missing or wrong.
        detail = " ".join(str(error).split()) or "no details"
        raise ConfigError(
            f"{key}: cannot be loaded ({type(error).__name__}: {detail:.300}); a data set must be a local file, in the "
            "cache of Hugging Face, or reachable; change evaluation.tasks or the task"
        ) from error
    return loaded


def _check_names(cfg: TasksConfig, known: Collection[str]) -> None:
    for name in cfg.tasks:
        if name in known:
            continue
        similar = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {similar[0]}?" if similar else "; lm-eval ls tasks lists the names"
        raise ConfigError(
            f"evaluation.tasks={cfg.tasks}: {name!r} is neither a task, group or tag of lm-eval nor of "
            f"evaluation.task_path={cfg.task_path}{hint}"
        )


def _check_task(name: str, task: Any) -> None:
    """Reject a task that needs what Meshbook does not support."""
    from components.training.mesh_lm import GENERATION_KEYS

    reason = ""
    if getattr(task, "UNSAFE_CODE", False):
        reason = "runs code that the model writes"
    elif getattr(task, "MULTIMODAL", False):
        reason = "has images or audio"
    elif task.OUTPUT_TYPE == "generate_until":
        unknown = set(task.get_config("generation_kwargs") or {}) - GENERATION_KEYS
        reason = f"sets generation_kwargs {sorted(unknown)}" if unknown else ""
    if reason:
        raise ConfigError(f"evaluation.tasks: {name} {reason}, which is not supported here; remove it")


def _sizes(
    cfg: TasksConfig, model: Prepared, tokenizer: PreTrainedTokenizerBase, run: RunContext
) -> tuple[RequestBatches, int]:
    """Return how requests are divided, and the model's context length in tokens."""
    from lm_eval.models.utils import resolve_max_length

    plan, multiple = run.plan, run.mesh.sequence_multiple
    longest = resolve_max_length(model.module.config, tokenizer)
    longest -= longest % multiple  # a padded row must not be longer than the model's positions
    padding = data.Padding.on(run.device, multiple, longest)
    rows = plan.padding.length or plan.padding.limit or longest
    batches = RequestBatches(
        dp_rank=plan.dp_rank,
        dp_size=plan.dp_size,
        padding=replace(padding, token_id=tokenizer.pad_token_id),
        tokens=plan.micro_batch_size * rows,
        rows=cfg.batch_size,
    )
    return batches, longest


def _scores(results: Mapping[str, Any]) -> TaskScores:
    """Return the metrics of lm-eval's results, which has them by task and by "METRIC,FILTER"."""
    metrics: dict[str, float] = {}
    for task, values in results["results"].items():
        for key, value in values.items():
            name, comma, chosen = key.partition(",")
            if comma and isinstance(value, int | float) and not name.endswith("_stderr"):
                metrics["/".join([task, name, *([] if chosen == _PLAIN_FILTER else [chosen])])] = float(value)
    inside = {child for children in results["group_subtasks"].values() for child in children}
    counts = results["n-samples"]
    documents = {
        task: counts[task]["effective"] if task in counts else None for task in results["results"] if task not in inside
    }
    return TaskScores(metrics, documents)


@contextmanager
def _lm_eval_random_state() -> Iterator[None]:
    """Seed as lm-eval's own command does, without its progress bars; restore this rank's random state afterwards.

    Tasks draw examples, and training must not depend on whether tasks were evaluated. Downloads have bars on terminals.
    """
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from lm_eval.api import task as module

    before, bar = random_state(), module.tqdm
    module.tqdm = partial(bar, disable=True)
    hides_downloads = not sys.stderr.isatty() and not are_progress_bars_disabled()
    if hides_downloads:
        disable_progress_bars()
    random.seed(0)
    np.random.seed(_FEWSHOT_SEED)
    torch.manual_seed(_FEWSHOT_SEED)
    try:
        yield
    finally:
        module.tqdm = bar
        if hides_downloads:
            enable_progress_bars()
        set_random_state(before)
