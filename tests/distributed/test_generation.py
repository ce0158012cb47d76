"""Generation with weights that FSDP2 gathers once, against one process and against gathering for every token."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from components import distributed, models, training
from components.config.schema.model import ModelConfig, WeightInit
from components.config.schema.training import GenerationConfig
from components.conversation import Prompt, parse_calls
from components.distributed.fsdp import _fsdp_units, param_groups
from components.models.tokenizer import byte_tokenizer
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
        self.shares: tuple[dict[str, float], int] | None = None

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

    def report_tool_calls(self, shares: Mapping[str, float], answers: int) -> None:
        self.shares = (dict(shares), answers)


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


def written(name: str, **arguments: Any) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


ANSWERS = {
    "A": written("weather", city="Oslo", days=1),
    "B": written("weather", city="Rome", days=1),
    "C": written("time", city="Oslo", days=1),
    "D": written("weather", days=1.0, city="Oslo"),
    "E": json.dumps({"name": "weather", "arguments": {"city": "Oslo", "days": 1}}),
    "F": written("weather", city="Oslo", days=True),
}
"""What the model of `chained` answers to a prompt that ends with a letter; it repeats any other letter forever."""


@pytest.fixture
def chained(tmp_path: Path) -> ModelConfig:
    """A Llama of which each token has one successor: embeddings are one-hot, and the layers add nothing."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(list(ANSWERS.values()))
    tokenizer.save_pretrained(tmp_path)
    chains = [(ord(letter), tokenizer.convert_tokens_to_ids(text)) for letter, text in ANSWERS.items()]
    chains += [(answer, tokenizer.eos_token_id) for _, answer in chains] + [(ord("G"), ord("G"))]
    config = AutoConfig.for_model(**{**CONFIG, "vocab_size": len(tokenizer), "tie_word_embeddings": False})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("embed_tokens", "lm_head", "o_proj", "down_proj")):
                parameter.zero_()
        for index, (token, following) in enumerate(chains):
            model.get_input_embeddings().weight[token, index] = 1
            model.get_output_embeddings().weight[following, index] = 1
    model.save_pretrained(tmp_path)
    return ModelConfig(path=str(tmp_path))


@pytest.mark.parametrize("world", [1, 2])
def test_shares_of_right_tool_calls_are_exact_on_every_mesh(world: int, chained: ModelConfig) -> None:
    """Of seven answers: two right ones, one with other numbers, names, no tags, a truth value, and one without end.

    The calls of an eighth held-out answer cannot be read.
    """
    expected = parse_calls(ANSWERS["A"])
    turns = [Prompt(letter, [65, ord(letter)], expected) for letter in [*ANSWERS, "G"]]
    meshes: list[dict[str, Any]] = [{}] if world == 1 else [{"dp_shard": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2}]

    def body(rank: int) -> None:
        for axes in meshes:
            run = start(chained, axes)
            prepared = training.Prepared(run.model, run.settings, run.replica, run.config)
            recorder, held_out = Recorder(run), SimpleNamespace(prompts=[*turns, Prompt("H", [65, 72], [])])
            cfg = GenerationConfig(samples=1, tool_calls=len(turns) + 1, max_new_tokens=TOKENS, temperature=0.9)
            training.show_generations(prepared, models.load_tokenizer(chained), held_out, cfg, recorder)
            shares = {"name_accuracy": 4 / 7, "arguments_accuracy": 2 / 7, "cut": 1 / 7, "unread": 1 / 8}
            assert recorder.shares == (shares, 7), axes
            assert recorder.pairs == []  # the turns are no prompts of samples

    run_ranks(world, body, timeout=120)
