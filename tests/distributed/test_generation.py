"""Generation with weights that FSDP2 gathers once, against one process and against gathering for every token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from components import distributed, models, training
from components.config.schema.model import ModelConfig, WeightInit
from components.config.schema.training import GenerationConfig
from components.conversation import Prompt
from components.distributed.fsdp import _fsdp_units, param_groups
from components.training import evaluation
from components.training.step_cost import record_traffic
from tests.distributed.test_pipeline import Run, start
from tests.harness import run_ranks
from tests.tiny_models import SIZES

PROMPTS = ["*7 1,", "the longer of the two prompts"]
TOKENS = 5
CONFIG = {**{key: value for key, value in SIZES.items() if key != "vocab_size"}, "model_type": "llama"}
CFG = ModelConfig(path=None, init=WeightInit.random, tokenizer="bytes", config=CONFIG)
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 5}
MESHES: dict[int, list[dict[str, Any]]] = {
    1: [{}, {"strategy": "single"}],
    2: [{"dp_shard": 2}, {"cp": 2}, {"pp": 2}],
    4: [{"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2, "tp": 2}],
}


class Recorder(training.RunContext):
    """A run that keeps what it would print."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.mesh, run.settings.device)
        self.lines: list[str] = []
        self.pairs: list[tuple[str, str]] = []

    def print(self, *lines: str) -> None:
        self.lines += lines

    @contextmanager
    def status(self, activity: str, total: int | None = None) -> Iterator[Callable[[], None]]:
        parts: list[str] = []
        yield lambda: parts.append(activity)
        assert total is not None
        assert 0 < len(parts) <= total  # a bar does not show 3/2

    def report_generations(self, generations: list[tuple[str, str]]) -> None:
        self.pairs += generations


def generated(run: Run, free: int, **sampling: Any) -> tuple[list[str], list[str], dict[str, int]]:
    """Return the answers, the printed lines, and the calls of each collective, with `free` bytes of memory."""
    prepared = training.Prepared(run.model, run.settings, run.replica, run.config)
    recorder, tokenizer = Recorder(run), models.load_tokenizer(CFG)
    tokenizer.chat_template = None
    evaluation._free_memory = lambda device: free
    prompts = [Prompt(text, models.encode_prompt(tokenizer, text)) for text in PROMPTS]
    cfg = GenerationConfig(samples=2, max_new_tokens=TOKENS, **sampling)
    with record_traffic() as traffic:
        training.show_generations(prepared, tokenizer, SimpleNamespace(prompts=prompts), cfg, recorder)
    calls: dict[str, int] = {}
    for (_, operation), volume in traffic.volumes.items():
        calls[operation] = calls.get(operation, 0) + volume.calls
    return [answer for _, answer in recorder.pairs], recorder.lines, calls


@pytest.fixture(scope="module")
def expected() -> list[list[str]]:
    """Greedy and sampled answers of one process that recomputes complete rows."""
    model, tokenizer = models.build_on_meta(CFG), models.load_tokenizer(CFG)
    tokenizer.chat_template = None
    models.materialize(model, "cpu")
    models.fill_weights(model, CFG, seed=5)
    whole: Any = SimpleNamespace(call=lambda **inputs: model(**inputs, use_cache=False), multiple=1, keeps_cache=False)
    answers = [
        models.generate(model, tokenizer, PROMPTS, TOKENS, whole, sampling=sampling)
        for sampling in (models.Sampling(), models.Sampling(**SAMPLED))
    ]
    assert answers[0] != answers[1]
    return answers


@pytest.mark.parametrize("world", [1, 2, 4])
def test_answers_are_those_of_one_process_gathered_once_or_for_every_token(
    world: int, expected: list[list[str]]
) -> None:
    def body(rank: int) -> None:
        for axes in MESHES[world]:
            run = start(CFG, axes)
            sharded = axes.get("strategy") != "single" and "pp" not in axes
            before = {name: each.to_local().clone() for name, each in run.model.named_parameters()} if sharded else {}
            for sampling, answers in (({}, expected[0]), (SAMPLED, expected[1])):
                each_token, other_lines, more_calls = generated(run, 2 * distributed.unsharded_bytes(run.model) - 1)
                once, lines, calls = generated(run, 2**40, **sampling)
                assert once == answers, axes
                assert each_token == expected[0], axes
                assert not sharded or all(
                    group.is_sharded for unit in _fsdp_units(run.model) for group in param_groups(unit)
                )
                for name, value in before.items():
                    assert torch.equal(run.model.get_parameter(name).to_local(), value), name
                if not sharded:
                    assert lines == other_lines == []
                    continue
                assert lines == ["generation: weights gathered once (0.00 GiB of 1024.00 GiB free)"]
                assert "weights gathered per token (at once 0.00 GiB" in other_lines[0]
                if axes == {"dp_shard": 2}:
                    # The root has no parameters; the last layer and the norm with the head stay gathered.
                    freed = len(_fsdp_units(run.model)) - 3
                    # Two gathers are those of the choice.
                    assert calls["all_gather"] == 2 + freed, calls
                    assert more_calls["all_gather"] == 2 + 2 + len(PROMPTS) * TOKENS * freed, more_calls

    run_ranks(world, body, timeout=120)


def test_bytes_are_those_of_the_compute_dtype() -> None:
    def body(rank: int) -> tuple[int, int, int]:
        run = start(CFG, {"dp_shard": 2})
        in_float32 = distributed.unsharded_bytes(run.model)
        config = run.config
        model = models.build_on_meta(CFG)
        distributed.parallelize(model, run.mesh, config, torch.bfloat16)
        parameters = sum(each.numel() for each in model.parameters())
        return in_float32, distributed.unsharded_bytes(model), parameters

    for in_float32, in_bfloat16, parameters in run_ranks(2, body):
        assert (in_float32, in_bfloat16) == (4 * parameters, 2 * parameters)


def test_free_memory_of_a_cpu_is_a_share_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    used = torch.device("cpu")
    monkeypatch.setattr(evaluation, "usable_memory", lambda: 2**44)
    monkeypatch.setattr(evaluation, "get_local_world_size_preinit", lambda: 4)
    assert 2**42 - 2**36 < evaluation._free_memory(used) < 2**42
    monkeypatch.setattr(evaluation, "usable_memory", lambda: 2**20)
    assert evaluation._free_memory(used) == 0
