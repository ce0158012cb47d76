"""Packing in one process: rows are full, documents do not attend to each other, and training is unchanged."""

from __future__ import annotations

import copy
import itertools
import math
import os
import re
import subprocess
import sys
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM, Qwen3ForCausalLM

from components import data, models, training
from components.config.compute_rules import attention_problems
from components.config.schema import AdamWConfig, ModelConfig
from components.config.schema.cluster import Device
from components.config.schema.model import CONVOLUTION, DOCUMENTS, MIXERS, Attention
from components.config.schema.parallelism import ActivationCheckpointing, MeshShape
from components.config.shape import ModelShape
from components.data.dataset import Dataset, Facts
from components.data.packing import _best_fit, _minimum_slack, plan_rows
from components.models.documents import Documents, _mix, varlen_attention
from components.protocol.errors import ConfigError
from tests.distributed.packed import (
    MODELS,
    SEQ_LEN,
    Step,
    batches_of,
    differences,
    documents,
    one_step,
    packed,
    reference,
)
from tests.distributed.parity import HYBRID_MODELS, MOE_MODELS, build, build_hybrid
from tests.distributed.parity import MODELS as DENSE

CPU = torch.device("cpu")
ALL = {**DENSE, **MOE_MODELS, **MODELS}
AUX = 0.5
PACKED = (
    *("llama", "qwen3", "mistral", "gemma", "gemma3_text", "gpt2", "phi3", "mixtral", "qwen3_moe", "olmoe"),
    *("gpt_oss", "gemma2"),
)
"""Models that are trained on packed rows in one process."""


def rows_of(lengths: list[int], size: int) -> list[list[int]]:
    plan = plan_rows(lengths, size)
    return [plan.documents[a:b].tolist() for a, b in itertools.pairwise(plan.starts.tolist())]


# The plan


@pytest.mark.parametrize("size", [8, 100, 512, 70_000])
def test_every_document_is_in_one_row_within_the_row_size(size: int) -> None:
    lengths = np.random.default_rng(size).integers(1, size + 1, 400).tolist()
    rows = rows_of(lengths, size)
    assert sorted(itertools.chain.from_iterable(rows)) == list(range(400))
    assert max(sum(lengths[each] for each in row) for row in rows) <= size
    assert rows == rows_of(lengths, size)


@pytest.mark.parametrize("planner", [_best_fit, _minimum_slack])
@pytest.mark.parametrize("lengths", [[5], [1] * 17, [8, 8, 8], [5, 4, 3, 3, 2], list(range(1, 9)) * 40])
def test_each_planner_uses_every_document_once(planner: Any, lengths: list[int]) -> None:
    patterns = planner(np.bincount(lengths, minlength=9), 8)
    used = [length for pattern, rows in patterns for length in pattern * rows]
    assert sorted(used) == sorted(lengths)
    assert all(rows > 0 and sum(pattern) <= 8 for pattern, rows in patterns)


def test_rows_are_full_for_the_length_distribution_of_gsm8k() -> None:
    """Rows of 2,048 tokens are 99.9 % full. scripts/benchmark/packing.py measures the real GSM8K."""
    lengths = np.random.default_rng(0).lognormal(5.32, 0.33, 30_000).clip(60, 600).astype(int)
    rows = len(plan_rows(lengths, 2048).starts) - 1
    assert lengths.sum() / (rows * 2048) > 0.999


# Rows


def test_packed_row_contains_document_bounds_and_position_ids() -> None:
    rows = packed()
    plan = data.BatchPlan(global_batch_size=2, micro_batch_size=2, padding=data.Padding(token_id=7).of(rows))
    (batch,) = data.EvalBatches(rows[:1], plan)
    ends, length = rows[0].ends, len(rows[0].input_ids)
    bounds = batch.document_bounds[0].tolist()
    assert bounds[: len(ends) + 1] == [0, *ends]
    assert set(bounds[len(ends) + 1 :]) == {SEQ_LEN}
    assert len(bounds) == rows.documents + 1
    assert rows.documents % 8 == 0
    spans = zip([0, *ends], [*ends, SEQ_LEN], strict=True)
    assert batch.position_ids[0].tolist() == [i for a, b in spans for i in range(b - a)]
    assert batch.input_ids[0].tolist() == rows[0].input_ids + [7] * (SEQ_LEN - length)
    assert all(batch.targets[0, start - 1] == -100 for start in ends if start < SEQ_LEN)
    assert batch.document_bounds[1].tolist() == [0] + [SEQ_LEN] * rows.documents  # filler row of the last micro-batch
    assert set(batch.targets[1].tolist()) == {-100}


def test_packing_changes_the_fingerprint_and_is_reported() -> None:
    rows, others = packed(), packed(seed=1)
    assert len({rows.fingerprint, others.fingerprint, rows._samples.fingerprint}) == 3
    assert rows.fingerprint == packed().fingerprint
    assert data.PackedDataset(rows._samples, SEQ_LEN + 8).fingerprint != rows.fingerprint
    facts = rows.facts
    assert f"packed into {len(rows)} rows of {SEQ_LEN} tokens, " in str(facts)
    assert f"{24 / len(rows):.1f} samples each (at most {max(len(row.ends) for row in rows)})" in str(facts)
    assert "packed" not in str(Facts("here"))


def test_global_batches_are_equal_over_dp_sizes_and_continue_after_resume() -> None:
    rows = packed()
    steps = [next_ids([batches_of(rows)], step) for step in range(6)]
    assert [next_ids([batches_of(rows, rank, 2) for rank in (0, 1)], step) for step in range(6)] == steps
    before = batches_of(rows)
    for _ in range(3):
        next(before)
    after = batches_of(rows, micro=2)
    after.load_state_dict(before.state_dict())
    assert torch.cat([each.input_ids for each in next(after)]).tolist() == steps[3]
    with pytest.raises(ConfigError, match="samples differ from"):
        batches_of(data.PackedDataset(rows._samples, SEQ_LEN + 8)).load_state_dict(before.state_dict())


def next_ids(ranks: list[data.TrainBatches], step: int) -> list[list[int]]:
    return torch.cat([each.input_ids for rank in ranks for each in rank.at(step)]).tolist()


# The step


def packed_step(
    plain: torch.nn.Module, *, aux: float = 0.0, prepare: Any = None, micro: int = 2, rows: Any = None
) -> Step:
    model: Any = copy.deepcopy(plain).train()
    assert models.use_causal_sdpa(model)
    loss = training.attach_routers(model, ModelConfig(path="made here", router_aux_coef=aux)) if aux else None
    if prepare:
        prepare(model)
    settings = training.StepSettings(CPU, max_grad_norm=0.0, routers=loss)
    return one_step(model, model, batches_of(rows or packed(), micro=micro).at(0), settings)


@pytest.mark.parametrize("name", PACKED)
def test_packed_rows_train_like_separate_documents(name: str) -> None:
    plain = build(name, torch.float64, ALL[name])
    aux = AUX if getattr(plain.config, "num_experts_per_tok", None) else 0.0
    expected = reference(plain, documents(packed()), aux)
    rtol = 1e-5 if name == "gemma2" else 1e-10  # its softmax is in float32
    assert differences(expected, packed_step(plain, aux=aux), rtol) == []


def test_packed_rows_train_like_separate_documents_in_float32() -> None:
    plain = build("llama", torch.float32)
    assert differences(reference(plain, documents(packed())), packed_step(plain), rtol=1e-6) == []


SHORT = (2, 3, 2, 3)
"""Documents shorter than a convolution."""


@pytest.mark.parametrize("name", HYBRID_MODELS)
def test_each_function_of_a_hybrid_layer_keeps_documents_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients equal those of separate documents; with one function of the family as transformers has it, they do not.

    Nemotron-H's own forward casts its logits to float32.
    """
    plain: Any = build_hybrid(name)
    rows = packed(20, shorter=SHORT)
    assert {len(each.input_ids) for each in documents(rows)} >= {2, 3}
    expected = reference(plain, documents(rows))
    exact = 1e-6 if name == "nemotron_h" else 1e-10
    assert differences(expected, packed_step(plain, rows=rows), exact) == []
    modeling = sys.modules[type(plain).__module__]
    largest = max(gradient.abs().max() for gradient in expected[1].values())
    for function in MIXERS[name]:
        separate = getattr(modeling, function)
        with monkeypatch.context() as patch:
            patch.setattr(modeling, function, partial(as_one_document, separate.args[0], function))
            leaked = packed_step(plain, rows=rows)
        worst = max((leaked[1][each] - exact).abs().max() / largest for each, exact in expected[1].items())
        assert worst > 1e-3, function
        with monkeypatch.context() as patch:
            patch.setattr(modeling, function, partial(separate.args[0]))
            with pytest.raises(ConfigError, match=f"did not pass its keywords to {function}, so its layers would"):
                packed_step(plain, rows=rows)


def as_one_document(function: Any, name: str, /, *args: Any, **kwargs: Any) -> Any:
    kwargs.pop(DOCUMENTS).mixed_by.add(name)
    return function(*args, **kwargs)


@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h", "lfm2"])
def test_kernels_get_documents_as_their_packages_define_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels run on GPUs only, so loops that follow their documentation replace them: fla takes one row and the
    ends of its documents, causal-conv1d and mamba-ssm the number of each token's document."""
    plain: Any = build_hybrid(name)
    rows = packed(20, shorter=SHORT)
    expected = packed_step(plain, rows=rows)
    modeling, calls = sys.modules[type(plain).__module__], []

    def by_ends(original: Any, q: Any, k: Any, v: Any, /, *, g: Any, beta: Any, cu_seqlens: Any, **kw: Any) -> Any:
        assert len(q) == 1
        assert (cu_seqlens[0], cu_seqlens[-1]) == (0, q.shape[1])
        assert cu_seqlens.diff().min() > 0
        calls.append("ends")
        parts = [slice(a, b) for a, b in itertools.pairwise(cu_seqlens.tolist())]
        outputs = [
            original(q[:, part], k[:, part], v[:, part], g=g[:, part], beta=beta[:, part], **kw)[0] for part in parts
        ]
        return torch.cat(outputs, dim=1), None

    def by_number(original: Any, x: Any, /, *others: Any, seq_idx: Any, **kw: Any) -> Any:
        dim = 1 if x.dim() == 4 else 2
        assert dim == 1 or x.stride(1) == 1  # channels last
        assert seq_idx.dtype == torch.int32
        assert seq_idx.shape == (len(x), x.shape[dim])
        calls.append("numbers")
        rows = []
        for row, numbers in enumerate(seq_idx):
            parts = []
            for number in numbers.unique().tolist():
                own = (numbers == number).nonzero().flatten()
                cut = [
                    each[row : row + 1].index_select(dim, own) if torch.is_tensor(each) and each.dim() > 2 else each
                    for each in (x, *others)
                ]
                parts.append(original(*cut, **kw))
            rows.append(torch.cat(parts, dim=dim))
        return torch.cat(rows)

    for function in MIXERS[name]:
        separate = getattr(modeling, function)
        kernel = partial(by_ends if "delta" in function else by_number, separate.args[0])
        update_wrapper(kernel, separate.args[0])
        monkeypatch.setattr(modeling, function, partial(separate.func, kernel, separate.args[1], True))
    monkeypatch.setattr("components.models.documents._is_on_gpu", lambda _: True)
    assert differences(expected, packed_step(plain, rows=rows)) == []
    assert set(calls) == {"numbers", *(["ends"] if name == "qwen3_next" else [])}


def test_a_kernel_that_does_not_import_is_not_used(tmp_path: Path) -> None:
    """transformers computes in PyTorch then, which takes no documents. A process of its own: modules import it once."""
    code = """
import importlib.util, inspect
from transformers.models.lfm2 import modeling_lfm2
from components.models.documents import _has_kernel
function = modeling_lfm2.causal_conv1d_fn
print(importlib.util.find_spec("causal_conv1d") is not None, inspect.getclosurevars(function).nonlocals.get(
    "is_new_implementation"), _has_kernel(function))
"""
    for source, expected in (
        ("raise ImportError('undefined symbol')", "True False False"),
        ("def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None): pass", "True True True"),
        ("", "True False False"),  # a version without the function
    ):
        (tmp_path / "causal_conv1d.py").write_text(source)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
        assert done.stdout.split("\n")[-2] == expected


def test_causal_conv1d_gets_strides_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's part of a projection has 2 x d + heads / tp columns, and the kernel wants multiples of 8."""
    seen: list[torch.Tensor] = []

    def kernel(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append(hidden)
        return hidden

    monkeypatch.setattr("components.models.documents._is_on_gpu", lambda _: True)
    for columns, copied in ((148, True), (152, False)):
        hidden = torch.randn(1, 24, columns)[..., :80].transpose(1, 2)
        _mix(kernel, CONVOLUTION, True, hidden, torch.randn(80, 4))
        assert seen[-1].stride() == ((24 * 80, 1, 80) if copied else (24 * columns, 1, columns))
        assert torch.equal(seen[-1], hidden)


def test_documents_of_windows_are_read_from_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    generator, reads, original = torch.Generator().manual_seed(0), [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(1) or original(tensor))
    for _ in range(50):
        ends = torch.randint(0, 20, (3, 4), generator=generator).sort(1).values
        bounds = torch.cat([torch.zeros(3, 1, dtype=torch.int64), ends, torch.full((3, 2), 20)], 1).int()
        whole, reads[:] = Documents(bounds), []
        for first, end in ((-3, 5), (2, 10), (7, 20)):
            window = whole.window(first, end)
            found, again = window.spans(), window.window(1, 3).spans()
            assert len(reads) == 1
            assert found == Documents(window.bounds).spans()
            assert again == Documents(window.window(1, 3).bounds).spans()
            del reads[1:]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral", "qwen3_next"])
def test_recomputed_and_compiled_layers_do_not_mix_documents(name: str) -> None:
    plain = build(name, torch.float64, (ALL | HYBRID_MODELS)[name])
    expected = reference(plain, documents(packed()))
    for prepare in (
        lambda model: models.checkpoint_activations(model, ActivationCheckpointing.full),
        lambda model: models.compile_layers(model, backend="aot_eager"),
    ):
        assert differences(expected, packed_step(plain, prepare=prepare)) == []


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_changed_document_leaves_the_logits_of_others_bitwise_equal(name: str) -> None:
    model: Any = build(name, torch.float32, ALL[name]).eval()
    models.use_causal_sdpa(model)
    rows = packed()
    row = next(i for i, each in enumerate(rows) if len(each.ends) >= 3)
    plan = data.BatchPlan(global_batch_size=1, micro_batch_size=1, padding=data.Padding().of(rows))
    (batch,) = data.EvalBatches(rows[row : row + 1], plan)
    inputs = batch.model_inputs()
    inputs.pop("input_ids")
    ends = rows[row].ends
    before = model(input_ids=batch.input_ids, use_cache=False, **inputs).logits
    for start, end in itertools.pairwise([0, *ends]):
        changed = batch.input_ids.clone()
        changed[0, start:end] = 96 - changed[0, start:end]
        after = model(input_ids=changed, use_cache=False, **inputs).logits
        assert torch.equal(after[0, :start], before[0, :start])
        assert torch.equal(after[0, end:], before[0, end:])
        assert not torch.equal(after[0, start:end], before[0, start:end])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_step_has_no_host_sync(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device .item() raises. In bfloat16 the shapes of torch's varlen kernel propagate there."""
    calls = []

    def count_calls(*args: Any) -> torch.Tensor:
        calls.append(args)
        return varlen_attention(*args)

    monkeypatch.setattr("components.models.attention.varlen_attention", count_calls)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(build("qwen3", torch.float32).config).to(dtype)
    models.use_causal_sdpa(model)
    settings = training.StepSettings(torch.device("meta"))
    optimizer = training.build_optimizer(model, AdamWConfig())
    vector = training.train_step(training.Prepared(model, settings), batches_of(packed(), micro=2).at(0), optimizer)
    assert vector.vector.is_meta
    assert bool(calls) == (dtype == torch.bfloat16)


@pytest.mark.parametrize("has_gqa", [True, False])
def test_varlen_kernel_gets_arguments_equivalent_to_the_mask(has_gqa: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel runs only on GPUs, so a loop over documents that follows its documentation replaces it.

    The kernel of torch 2.11 has no grouped-query attention.
    """
    plain = build("mistral", torch.float64, ALL["mistral"])
    assert plain.config.num_key_value_heads < plain.config.num_attention_heads
    expected = packed_step(plain)
    calls = []

    def without_gqa(
        query: Any, key: Any, value: Any, ends: Any, _: Any, max_q: int, *rest: Any, scale: Any, window_size: Any
    ) -> Any:
        return with_gqa(
            query, key, value, ends, _, max_q, *rest, scale=scale, window_size=window_size, enable_gqa=False
        )

    def with_gqa(
        query: Any, key: Any, value: Any, ends: Any, _: Any, max_q: int, max_k: int,
        *, scale: Any, window_size: Any, enable_gqa: bool,
    ) -> Any:  # fmt: skip
        assert enable_gqa == (key.shape[1] < query.shape[1]) == has_gqa
        longest = int(ends.diff().max())
        assert max_q == max_k == 2 ** math.ceil(math.log2(longest)) < SEQ_LEN
        calls.append(ends.shape)
        parts = []
        for a, b in itertools.pairwise(ends.tolist()):
            position = torch.arange(b - a)
            distance = position[:, None] - position
            mask = (distance >= 0) & ((distance <= window_size[0]) | (window_size[0] < 0))
            each = (tensor[a:b].transpose(0, 1) for tensor in (query, key, value))
            output = F.scaled_dot_product_attention(*each, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
            parts.append(output.transpose(0, 1))
        return torch.cat(parts)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", with_gqa if has_gqa else without_gqa)
    monkeypatch.setattr("components.models.attention.supports_varlen", lambda *_: True)
    assert differences(expected, packed_step(plain)) == []
    assert set(calls) == {(2 * packed().documents + 1,)}  # fixed size, whatever the rows contain


# Models that cannot be packed


class DropsKeywords(LlamaForCausalLM):
    """A model whose layers receive no keyword arguments."""

    def forward(self, input_ids: torch.Tensor, documents: Any, position_ids: Any, use_cache: bool) -> Any:
        self.model.layers[0].forward = lambda hidden, **kw: hidden
        self.model.layers[1].forward = lambda hidden, **kw: hidden
        return super().forward(input_ids, position_ids=position_ids, documents=documents, use_cache=use_cache)


def rejection(model: Any) -> str:
    settings = training.StepSettings(CPU)
    with pytest.raises(ConfigError) as error:
        training.evaluate(training.Prepared(model, settings), batches_of(packed()).at(0))
    return str(error.value)


def test_model_that_attends_across_documents_is_rejected() -> None:
    plain = build("llama", torch.float32)
    model = DropsKeywords(copy.deepcopy(plain.config))
    models.use_causal_sdpa(model)
    assert "DropsKeywords does not pass keywords on to its attention" in rejection(model)
    eager = copy.deepcopy(plain)
    eager.set_attn_implementation("eager")
    assert not models.use_causal_sdpa(eager)
    message = (
        "uses eager attention, which does not receive document bounds; set model.attention=sdpa or data.pack=false"
    )
    assert message in rejection(eager)
    capped = build("gemma2", torch.float32, ALL["gemma2"])
    capped.config._attn_implementation = "flex_attention"
    models.use_causal_sdpa(capped)
    assert "uses flex_attention attention, which does not receive document bounds; set model.attention=eager or" in (
        rejection(capped)
    )
    mixed = copy.deepcopy(plain)
    mixed.model.short = torch.nn.Conv1d(2, 2, 3)
    models.use_causal_sdpa(mixed)
    assert "mixes neighboring tokens by Conv1d, also across documents; set data.pack=false" in rejection(mixed)


def test_packed_rows_of_causal_lms_that_do_not_call_their_base_model_with_the_bounds() -> None:
    """Falcon's swallows keywords, so it is rejected; OPT's calls the decoder within its base model."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}
    falcon = build("falcon", torch.float32, {"model_type": "falcon", **sizes})
    models.use_causal_sdpa(falcon)
    assert "data.pack=true: FalconForCausalLM computes attention in its own code" in rejection(falcon)
    values = {"model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, **sizes}
    opt = build("opt", torch.float64, values)
    assert differences(reference(opt, documents(packed())), packed_step(opt)) == []


def test_build_dataset_packs_if_data_pack_is_set() -> None:
    from components.config.schema.data import DocsDataConfig
    from components.models.tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer()
    cfg = DocsDataConfig(pack=True, max_eval_samples=6)
    rows = data.build_dataset(cfg, tokenizer, seq_len=512, split="eval")
    assert isinstance(rows, data.PackedDataset)
    assert rows.show(0).count("--- next document ---") == len(rows[0].ends) - 1
    assert data.sample_prompts(rows, 2)
    assert isinstance(rows._samples, Dataset)


@pytest.mark.parametrize("attention", list(Attention))
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_advice_on_attention_leads_to_a_config_that_works(family: str, attention: Attention) -> None:
    """For packed rows under cp: eager for models with a soft cap or sinks, sdpa for all others."""

    def problems(name: str) -> list[str]:
        model, mesh = ModelConfig(path="mine", attention=Attention(name)), MeshShape(cp=2)
        return attention_problems(model, mesh, Device.cuda, packs=True, trains=True, shape=ModelShape(family=family))

    found = problems(attention)
    advice = {name for each in found for name in re.findall(r"set .*model\.attention=(\w+)", each)}
    supported = "sdpa" if family == "llama" else "eager"
    assert advice == ({supported} if found else set())
    assert bool(found) == (attention != supported)
    assert problems(supported) == []
