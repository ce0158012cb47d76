"""Generation of many rows at once on every mesh, against one process that computes complete rows one after another."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from components import distributed, models, training
from components.config.schema.model import ModelConfig, WeightInit
from components.config.schema.parallelism import ParallelismConfig
from components.config.schema.training import GenerationConfig
from components.conversation import Prompt, parse_calls
from components.distributed.fsdp import _fsdp_units, param_groups
from components.models import generation
from components.models.tokenizer import byte_tokenizer
from components.protocol.errors import ConfigError
from components.training import evaluation
from components.training.step_cost import record_traffic
from tests.distributed.adapted import LORA, adapter_values
from tests.distributed.packed import MODELS as MASKED
from tests.distributed.parity import HYBRID_MODELS, MOE_MODELS, SMALL, build, build_hybrid
from tests.distributed.parity import MODELS as DENSE
from tests.distributed.test_pipeline import Run, start
from tests.harness import run_ranks
from tests.suites import PARITY
from tests.tiny_models import SIZES

TOKENS, CONTEXT = 24, SMALL["max_position_embeddings"]
CONFIG = {**{key: value for key, value in SIZES.items() if key != "vocab_size"}, "model_type": "llama"}
CFG = ModelConfig(path=None, init=WeightInit.random, tokenizer="bytes", config=CONFIG)
SAMPLED = models.Sampling(temperature=1.0, seed=5)
STOPS = {5, 6, 7, 8}
TP_SP = {"tp": 2, "sequence_parallel": True}
MESHES: dict[str, dict[str, Any]] = {
    "single": {"strategy": "single"},
    "ddp2": {"strategy": "ddp", "dp_replicate": 2},
    "fsdp2": {"dp_shard": 2},
    "cp2": {"cp": 2},
    "tp2": {"tp": 2},
    "tp2_sp": TP_SP,
    "pp2": {"pp": 2},
    "ep2": {"ep": 2},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "fsdp2_tp2": {"dp_shard": 2, "tp": 2},
    "fsdp2_tp2_sp": {"dp_shard": 2, **TP_SP},
    "fsdp2_cp2": {"dp_shard": 2, "cp": 2},
    "ep2_tp2": {"ep": 2, "tp": 2},
    "pp2_tp2_sp": {"pp": 2, **TP_SP},
}
FAMILIES = {**DENSE, **MOE_MODELS, **MASKED, **HYBRID_MODELS}
CASES: dict[int, list[tuple[str, str]]] = {
    1: [("llama", "single")],
    2: [
        *(("llama", mesh) for mesh in ("ddp2", "fsdp2", "cp2", "tp2", "tp2_sp", "pp2")),
        ("mixtral", "ep2"),
        # A window, a soft cap, sinks, and linear layers.
        *((family, mesh) for family in ("gemma3_text", "gpt_oss", "qwen3_next") for mesh in ("fsdp2", "tp2", "cp2")),
        *(("gemma2", "tp2"), ("llama_lora", "fsdp2"), ("llama_lora", "tp2_sp")),
    ],
    4: [("llama", mesh) for mesh in ("hsdp", "fsdp2_tp2", "fsdp2_tp2_sp", "fsdp2_cp2")]
    + [("mixtral", "ep2_tp2"), ("qwen3_next", "fsdp2_tp2_sp"), ("llama", "pp2_tp2_sp")],
}


def world_of(mesh: str) -> int:
    return math.prod(size for size in MESHES[mesh].values() if type(size) is int)


def prompts_of(prefix: int = 0) -> list[Prompt]:
    """Ragged prompts of 1 to 18 tokens, the first two of them again at the end, all after a common prefix."""
    draw = random.Random(3)
    first = [draw.randint(9, 96) for _ in range(prefix)]
    ragged = [first + [draw.randint(9, 96) for _ in range(draw.choice([1, 2, 5, 11, 18]))] for _ in range(9)]
    return [Prompt("", tokens) for tokens in [*ragged, *ragged[:2]]]


def splitmix(value: int) -> int:
    value &= 2**64 - 1
    for bits, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ value >> bits) * factor % 2**64
    return value ^ value >> 31


def gumbel(seed: int, sample: int, position: int, token: int) -> float:
    """Noise of a token, in Python's integers."""
    increment = 0x9E3779B97F4A7C15
    key = splitmix(splitmix(sample * increment + seed) + position)
    uniform = ((splitmix(key + (token + 1) * increment) >> 12) + 0.5) / 2**52
    return -math.log(-math.log(uniform))


def answers_of(model: Any, prompts: list[Prompt], sampling: models.Sampling) -> list[list[int]]:
    """Answers one after another, each token from a forward of the complete row without a cache."""
    answers = []
    for sample, prompt in enumerate(prompts):
        answer: list[int] = []
        while len(answer) < TOKENS and len(prompt.tokens + answer) < CONTEXT:
            with torch.no_grad():
                row = model(input_ids=torch.tensor([prompt.tokens + answer]), use_cache=False).logits[0, -1].double()
            if sampling.temperature:
                scores = (row / sampling.temperature).tolist()
                noisy = [each + gumbel(sampling.seed, sample, len(answer), i) for i, each in enumerate(scores)]
                token = noisy.index(max(noisy))
            else:
                token = int(row.argmax())
            if token in STOPS:
                break
            answer.append(token)
        answers.append(answer)
    return answers


def built(family: str) -> Any:
    name = family.removesuffix("_lora")
    model: Any = build_hybrid(name) if name in HYBRID_MODELS else build(name, torch.float64, FAMILIES[name])
    if name != family:
        models.add_adapters(model, LORA, exports=False)
        for parameter, value in adapter_values(model).items():
            model.get_parameter(parameter).data.copy_(value)
    return model.double().eval()


def on_mesh(model: Any, mesh: str) -> tuple[training.Prepared, training.RunContext]:
    config = ParallelismConfig(**{"dp_shard": 1, **MESHES[mesh]})
    device_mesh, own = distributed.build_mesh(config, "cpu"), copy.deepcopy(model)
    models.use_causal_sdpa(own)
    anatomy = models.read_anatomy(own)
    layout = distributed.parallelize(own, device_mesh, config, torch.float64, anatomy)
    replica = distributed.wrap_replicas(own, device_mesh, config, layout)
    settings = training.StepSettings(device=torch.device("cpu"), mesh=device_mesh)
    return training.Prepared(own, settings, replica, config), training.RunContext(device_mesh, torch.device("cpu"))


def answers_on(
    model: training.Prepared, run: training.RunContext, prompts: list[Prompt], sampling: models.Sampling, rows: int
) -> list[list[int]]:
    with evaluation.generation_forward(model, run, rows, TOKENS) as forward:
        tokenizer: Any = None
        return models.generate_tokens(model.module, tokenizer, prompts, TOKENS, forward, sampling=sampling)


@pytest.fixture(autouse=True)
def stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of these tests have no tokenizer."""
    original = generation.stop_tokens
    monkeypatch.setattr(
        generation, "stop_tokens", lambda model, tokenizer: STOPS if tokenizer is None else original(model, tokenizer)
    )


@pytest.mark.parametrize(
    "family", FAMILIES if PARITY else ["llama", "gpt2", "gemma3_text", "gpt_oss", "qwen3_next", "bamba"]
)
def test_rows_together_have_the_answers_that_they_have_alone(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, token for token; answers end at different lengths, and prompts are padded, begin alike or are read
    in pieces."""
    model = built(family)
    for prefix in (0, 33):
        prompts = prompts_of(prefix)
        expected = {sampling: answers_of(model, prompts, sampling) for sampling in (models.Sampling(), SAMPLED)}
        assert len(set(map(len, expected[SAMPLED]))) > 3
        assert expected[SAMPLED] != expected[models.Sampling()]
        own = copy.deepcopy(model)
        models.use_causal_sdpa(own)
        before = own.config._attn_implementation
        for sampling, answers in expected.items():
            for rows, at_once in ((1, 8192), (4, 30), (100, 8192)):
                monkeypatch.setattr(generation, "_TOKENS_AT_ONCE", at_once)
                forward = models.RowsForward(own, rows)
                tokenizer: Any = None
                found = models.generate_tokens(own, tokenizer, prompts, TOKENS, forward, sampling=sampling)
                assert found == answers, (prefix, sampling, rows)
        assert own.config._attn_implementation == before


@pytest.mark.parametrize("world", CASES)
def test_answers_on_every_mesh_are_those_of_one_process(world: int) -> None:
    cases = CASES[world]
    if PARITY:
        cases = cases + [(family, mesh) for family in FAMILIES for mesh in MESHES if world_of(mesh) == world]
    prompts, expected = prompts_of(), {}
    for family in dict.fromkeys(family for family, _ in cases):
        model = built(family)
        expected[family] = model, [answers_of(model, prompts, each) for each in (models.Sampling(), SAMPLED)]

    def body(rank: int) -> list[str]:
        problems = []
        for family, mesh in cases:
            model, answers = expected[family]
            try:
                prepared, run = on_mesh(model, mesh)
            except ConfigError:  # on all ranks; of the other tests' cases none
                assert (family, mesh) not in CASES[world]
                continue
            for free in (0, 2**40):  # weights gathered for every token, and once
                evaluation._free_memory = lambda device, free=free: free
                for sampling, wanted in zip((models.Sampling(), SAMPLED), answers, strict=True):
                    found = answers_on(prepared, run, prompts, sampling, rows=3)
                    equal = sum(mine == each for mine, each in zip(found, wanted, strict=True))
                    if equal < len(wanted):
                        problems.append(f"{family} {mesh} {free=} {sampling}: {equal} of {len(wanted)} answers")
        return problems

    problems = [line for lines in run_ranks(world, body, timeout=300) for line in lines]
    assert not problems, "\n".join(sorted(set(problems)))


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
        assert len(parts) <= total  # a bar does not show 3/2

    def report_generations(self, generations: list[tuple[str, str]]) -> None:
        self.pairs += generations

    def report_tool_calls(self, shares: Mapping[str, float], answers: int) -> None:
        self.shares = (dict(shares), answers)


@pytest.mark.parametrize("mesh", ["ddp2", "fsdp2", "ep2"])
def test_a_rank_whose_rows_end_first_waits_for_the_others(mesh: str) -> None:
    """All rows of rank 1 end with their first token, and it has one row less; nothing is asked of it but to take part
    in forwards that need all ranks."""
    model, prompts = built("mixtral"), prompts_of()[:7]
    expected = answers_of(model, prompts, models.Sampling())
    longest_first = sorted(range(len(prompts)), key=lambda index: (-len(prompts[index].tokens), index))
    short = set(longest_first[1::2])

    def body(rank: int) -> tuple[list[list[int]], int]:
        prepared, run = on_mesh(model, mesh)
        evaluation._free_memory = lambda device: 0
        with evaluation.generation_forward(prepared, run, rows=8, tokens=TOKENS) as forward:
            tokenizer: Any = None
            forwards: list[int] = []

            def call(**inputs: Any) -> Any:
                forwards.append(len(inputs["input_ids"]))
                return forward.call(**inputs)

            answers = models.generate_tokens(
                prepared.module, tokenizer, prompts, TOKENS, replace(forward, call=call),
                ends=lambda sample, answer: sample in short,
            )  # fmt: skip
            return answers, len(forwards)

    (answers, long), (others, few) = run_ranks(2, body, timeout=60)
    assert answers == others == [each[:1] if index in short else each for index, each in enumerate(expected)]
    assert few < long if mesh == "ddp2" else few == long


def test_equal_prompts_and_a_common_beginning_are_computed_once() -> None:
    model, seen = built("llama"), list[tuple[int, ...]]()

    def call(**inputs: Any) -> Any:
        seen.append(tuple(inputs["input_ids"].shape))
        return model(**inputs)

    tokenizer: Any = None
    begun = prompts_of(33)[0].tokens[:33]
    prompts = [Prompt("", begun + [9 + length] * length) for length in (18, 5, 1, 1)]
    for given in ([prompts[0]] * 4, prompts):
        models.generate_tokens(model, tokenizer, given, 2, models.RowsForward(call), sampling=SAMPLED)
    # The row with one more token joins where it begins.
    assert seen == [(1, 51), (4, 1), (1, 33), (2, 17), (3, 1), (4, 1)]


@pytest.mark.parametrize("world", [1, 2])
def test_weights_are_gathered_once_or_for_every_token_as_memory_allows(world: int) -> None:
    """A run generates, prints what it did, and its shards are as before."""

    def body(rank: int) -> None:
        run = start(CFG, {}) if world == 1 else start(CFG, {"dp_shard": 2})
        before = {name: each.to_local().clone() for name, each in run.model.named_parameters()}
        tokenizer = models.load_tokenizer(CFG)
        prompts = [Prompt(text, models.encode_prompt(tokenizer, text)) for text in ("*7 1,", "the longer one")]
        run.model.generation_config.eos_token_id = None
        needed, lines, calls, answers = distributed.unsharded_bytes(run.model), [], [], []
        for cache, free in ((0, 2 * needed - 1), (2**40, 2**40), (0, 2**40)):
            prepared, recorder = training.Prepared(run.model, run.settings, run.replica, run.config), Recorder(run)
            evaluation._free_memory = lambda device, free=free: free
            evaluation._cache_bytes = lambda model, tp, cache=cache: cache
            cfg = GenerationConfig(samples=2, max_new_tokens=TOKENS)
            with record_traffic() as traffic:
                training.show_generations(prepared, tokenizer, SimpleNamespace(prompts=prompts), cfg, recorder)
            gathers = sum(each.calls for (_, name), each in traffic.volumes.items() if name == "all_gather")
            calls.append(gathers)
            lines += recorder.lines
            answers.append(recorder.pairs)
        for name, value in before.items():
            assert torch.equal(run.model.get_parameter(name).to_local(), value), name
        assert all(group.is_sharded for unit in _fsdp_units(run.model) for group in param_groups(unit))
        assert answers[0] == answers[1] == answers[2]
        assert [prompt for prompt, _ in answers[0]] == ["*7 1,", "the longer one"]
        assert all(line.startswith("generation: weights gathered for each token (") for line in lines[:2])
        assert lines[2].startswith("generation: weights gathered once (")
        assert lines[2].endswith("(0.00 GiB, keys and values up to 0.00 GiB; 1024.00 GiB free)")
        if world == 2:
            # The root has no parameters; the last layer and the norm with the head stay gathered.
            freed = len(_fsdp_units(run.model)) - 3
            # Four gathers are those of the choice and of the answers.
            assert calls == [4 + 2 + TOKENS * freed, 4 + TOKENS * freed, 4 + freed], calls

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
