"""Division of benchmark requests into forward passes, signed log-probabilities, and rejected tasks."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from components.config.schema.data import IGNORED
from components.config.schema.training import EvaluationConfig, TrainingTasksConfig
from components.data.batches import Padding
from components.models.tokenizer import byte_tokenizer
from components.protocol.errors import ConfigError
from components.training.evaluation import RequestBatches, SignedLogProbability
from components.training.harness import BenchmarkTasks, _check_names, _check_task, _scores, load_tasks

LENGTHS = [3, 9, 30, 1, 9, 7, 2, 8, 8, 5, 1]


@pytest.mark.parametrize("dp", [1, 2, 3, 5])
@pytest.mark.parametrize("rows", [None, 1, 4])
def test_every_request_counts_once_in_passes_of_one_shape_on_all_ranks(dp: int, rows: int | None) -> None:
    padding = Padding(multiple=4, limit=32)
    ranks = [
        RequestBatches(dp_rank=rank, dp_size=dp, padding=padding, tokens=24, rows=rows).split(LENGTHS)
        for rank in range(dp)
    ]
    assert len({tuple(each.length for each in passes) for passes in ranks}) == 1
    counted = [index for passes in ranks for each in passes if each.counts for index in each.indices]
    assert sorted(counted) == list(range(len(LENGTHS)))
    lengths = [each.length for each in ranks[0]]
    assert lengths == sorted(lengths, reverse=True)
    for passes in ranks:
        for each in passes:
            assert each.indices
            assert each.length % 4 == 0
            assert all(LENGTHS[index] <= each.length for index in each.indices)
            most = rows or max(1, 24 // each.length)
            assert len(each.indices) <= most


def test_signed_values_give_log_probabilities_and_the_most_likely_tokens() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 7, dtype=torch.float64)
    logits[0, 1, 2:4] = 9.0  # two most likely tokens: the first one counts
    logits[1, 4] = math.nan
    targets = torch.tensor([[3, 2, 0, IGNORED, 6], [1, 5, 4, 2, 2]])
    targets[0, 0], targets[0, 2] = logits[0, 0].argmax(), logits[0, 2].argmax()
    log_probs, is_miss = SignedLogProbability.decode(SignedLogProbability().per_token(logits, targets))
    wanted = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    real = (targets != IGNORED) & ~wanted.isnan()
    torch.testing.assert_close(log_probs[real], wanted[real], rtol=1e-15, atol=0)
    assert log_probs[0, 3] == 0
    assert not is_miss[0, 3]
    assert is_miss[1, 4]  # of NaN logits no token is the most likely one
    assert is_miss[real].tolist() == (logits.argmax(-1) != targets)[real].tolist()
    targets[0, 1] = 3
    assert SignedLogProbability.decode(SignedLogProbability().per_token(logits, targets))[1][0, 1]
    with pytest.raises(TypeError, match="per token only"):
        SignedLogProbability().of_logits(logits, targets)


def task(**values: Any) -> Any:
    options = values.pop("options", {})
    return SimpleNamespace(**{"OUTPUT_TYPE": "loglikelihood", **values}, get_config=lambda name: options)


def test_unknown_and_unsupported_tasks_are_rejected_by_name() -> None:
    pytest.importorskip("lm_eval", reason="the extra `evaluation` is not installed; make install-dev installs it")
    cfg = EvaluationConfig(tasks=["pick", "hellaswg"])
    with pytest.raises(ConfigError, match=r"'hellaswg' is neither a task, .*; did you mean hellaswag\?"):
        _check_names(cfg, ["pick", "hellaswag"])
    with pytest.raises(ConfigError, match="'hellaswg' is neither a task, .*; lm-eval ls tasks lists the names"):
        _check_names(cfg, ["pick"])
    _check_names(cfg, ["pick", "hellaswg"])
    rejected = {
        "runs code that the model writes": task(UNSAFE_CODE=True),
        "has images or audio": task(MULTIMODAL=True),
        r"sets generation_kwargs \['num_beams'\]": task(
            OUTPUT_TYPE="generate_until", options={"num_beams": 4, "until": ["x"]}
        ),
    }
    for why, each in rejected.items():
        with pytest.raises(ConfigError, match=f"evaluation.tasks: odd {why}, which is not supported here; remove it"):
            _check_task("odd", each)
    _check_task("plain", task(OUTPUT_TYPE="generate_until", options={"until": ["x"], "do_sample": False}))
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="apply_chat_template=true: the tokenizer has no chat template"):
        load_tasks(EvaluationConfig(tasks=["pick"], apply_chat_template=True), tokenizer)


def test_scores_are_named_by_task_metric_and_filter() -> None:
    values = {"alias": "a", "acc,none": 0.5, "acc_stderr,none": "N/A", "exact_match,strict-match": 1, "sample_len": 3}
    results = {
        "results": {"sub": values, "all": {"acc,none": 0.25, "acc_stderr,none": 0.1}},
        "group_subtasks": {"all": ["sub"]},
        "n-samples": {"sub": {"original": 9, "effective": 3}},
    }
    scores = _scores(results)
    assert scores.metrics == {"sub/acc": 0.5, "sub/exact_match/strict-match": 1.0, "all/acc": 0.25}
    assert scores.documents == {"all": None}


def test_tasks_are_due_every_n_steps_but_not_at_the_last() -> None:
    def due(every: int, loaded: dict[str, Any]) -> list[int]:
        tasks = BenchmarkTasks(TrainingTasksConfig(tasks=["a"], every=every), byte_tokenizer(), loaded)
        run: Any = SimpleNamespace(total_steps=6)
        return [number for number in range(1, 7) if tasks.due(SimpleNamespace(number=number, run=run))]  # type: ignore[arg-type]

    assert due(2, {"tasks": {}}) == [2, 4]
    assert due(0, {"tasks": {}}) == []
    assert due(2, {}) == []
