"""Sampling from a model's logits, against transformers' warpers of logits and a plain loop over its forward."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from components.chat_template import ChatTemplate
from components.config.schema.model import Attention, ModelConfig, WeightInit
from components.models import Sampling, build_on_meta, fill_weights, generate, load_tokenizer, materialize
from components.models.generation import stop_tokens, stream_tokens
from components.models.weights.export import export_model
from tests.tiny_models import SIZES

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


def uniform(seed: int, prompt: int, position: int) -> float:
    digest = blake2b(f"{seed}:{prompt}:{position}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    return torch.rand((), generator=generator, dtype=torch.float64).item()


@pytest.mark.parametrize("sampling", CASES, ids=str)
def test_probabilities_equal_those_of_transformers(sampling: Sampling) -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(1)) * 3
    found = sampling.probabilities(logits)
    torch.testing.assert_close(found, expected_probabilities(logits, sampling))
    limit = min(sampling.top_k or 300, 300)
    assert (found > 0).sum() == limit if sampling.top_p == 1 else (found > 0).sum() < limit


def test_frequencies_of_sampled_tokens_follow_the_probabilities() -> None:
    sampling = Sampling(0.9, 0.8, seed=1)
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0, 1.5])
    counts = torch.zeros(5)
    for position in range(4000):
        counts[sampling.choose(logits, 0, position)] += 1
    expected = expected_probabilities(logits, sampling)
    assert (counts / 4000 - expected).abs().max() < 0.03  # 3.8 standard deviations
    assert (counts[expected == 0] == 0).all()


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
        model, stop_tokens(model, tokenizer), [1], 4, lambda logits, position: torch.tensor(next(choices))
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


def test_token_depends_on_seed_prompt_and_position_only() -> None:
    logits = torch.zeros(100_000)
    torch.manual_seed(1)
    first = Sampling(1.0, 1.0, 7).choose(logits, 2, 3)
    state = torch.get_rng_state()
    assert Sampling(1.0, 1.0, 7).choose(logits.double(), 2, 3) == first
    assert torch.equal(torch.get_rng_state(), state)
    others = [Sampling(1.0, 1.0, seed).choose(logits, a, b) for seed, a, b in ((8, 2, 3), (7, 3, 3), (7, 2, 4))]
    assert first not in others
    assert first == int(uniform(7, 2, 3) * 100_000)


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
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].detach().float()
            cumulative = expected_probabilities(logits, sampling).double().cumsum(0)
            token = int((cumulative <= uniform(11, index, len(tokens) - start)).sum())
            if token == tokenizer.eos_token_id:
                break
            tokens.append(token)
        expected.append(str(tokenizer.decode(tokens[start:], skip_special_tokens=True)).strip())
    assert generate(model, tokenizer, prompts, 12, sampling=sampling) == expected
    assert generate(model, tokenizer, prompts, 12) != expected
    assert generate(model, tokenizer, prompts, 12, sampling=Sampling(1.3, 0.95, 12)) != expected
