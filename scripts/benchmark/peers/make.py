"""Creation of a workload's files: a Llama with random weights for transformers, an adapter for peft, and tokens.

It needs no network and, except for adapters, no transformers. Weights are written layer by layer, so that 8B parameters
do not have to fit into memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from scripts.benchmark.peers.workload import IGNORED, Shape, Workload

SHAPES = {
    "tiny": Shape(hidden=256, intermediate=704, layers=4, heads=8, kv_heads=4, vocabulary=2048),
    "1b": Shape(hidden=2048, intermediate=8192, layers=16, heads=32, kv_heads=8, vocabulary=128_256),
    "8b": Shape(hidden=4096, intermediate=14_336, layers=32, heads=32, kv_heads=8, vocabulary=128_256, tied=False),
}
"""A tiny model; Llama 3.2 1B; Llama 3.1 8B."""
STD = 0.02
"""Standard deviation of the weights."""
FOLLOWS = 0.9
"""Share of tokens that are a function of the previous token, so that the loss can decrease."""
SHORTEST = 8
"""Minimum length of a document in tokens."""


def make(workload: Workload, packed: bool) -> None:
    """Write the files of the workload unless they exist already for exactly these settings.

    Args:
        packed: Several documents per row, without loss on the first third of each; otherwise one document per row.
    """
    folder = Path(workload.folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = (workload.shape, str(workload.stored), workload.lora_rank, workload.seed, "with tokenizer")
    sizes = (workload.shape.vocabulary, workload.seq_len, workload.rows, workload.total_steps, packed, workload.seed)
    _once(folder / "weights.txt", repr(weights), lambda: write_weights(workload))
    _once(folder / "tokens.txt", repr(sizes), lambda: write_tokens(workload, packed))


def write_weights(workload: Workload) -> None:
    """Write the model and, if the workload has them, its adapters."""
    write_model(workload.shape, workload.model, workload.stored, workload.seed)
    if workload.lora_rank:
        write_adapter(workload)


def config_of(shape: Shape) -> dict[str, object]:
    """Return the content of config.json of a Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.tied,
        "rms_norm_eps": 1e-5,
        "initializer_range": STD,
        "max_position_embeddings": 131_072,
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": shape.rope_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }


def write_model(shape: Shape, folder: Path, dtype: torch.dtype, seed: int) -> None:
    """Write config.json and the weights, one file per layer."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(shape), indent=1))
    write_tokenizer(shape.vocabulary, folder)
    generator = torch.Generator().manual_seed(seed)
    files: dict[str, str] = {}
    total = 0
    for number, part in enumerate(_parts(shape)):
        file = f"model-{number:05d}.safetensors"
        tensors = {
            name: torch.ones(size, dtype=dtype) if len(size) == 1 else _random_weight(size, dtype, generator)
            for name, size in part.items()
        }
        save_file(tensors, folder / file, {"format": "pt"})
        files |= dict.fromkeys(part, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def write_tokenizer(vocabulary: int, folder: Path) -> None:
    """Write a tokenizer with as many tokens as the model has: Meshbook checks the samples' token ids against it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({str(token): token for token in range(vocabulary)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0", eos_token="0").save_pretrained(folder)


def write_adapter(workload: Workload) -> None:
    """Write the initial adapters of `peft=lora` in peft's format: A initialized from the seed, B zero."""
    from components import models
    from components.config.schema import ModelConfig, PeftConfig, PeftMethod
    from components.models.lora import adapted_layers, initialize_adapters

    model = models.build_on_meta(ModelConfig(path=str(workload.model), tokenizer="bytes"))
    rank = workload.lora_rank
    models.add_adapters(model, PeftConfig(method=PeftMethod.lora, rank=rank, alpha=2.0 * rank))
    for layer in adapted_layers(model).values():
        for name in ("lora_A", "lora_B"):
            setattr(layer, name, torch.nn.Parameter(torch.empty_like(getattr(layer, name), device="cpu")))
    initialize_adapters(model, workload.seed)
    tensors = {
        f"base_model.model.{name}.{matrix}.weight": getattr(layer, matrix).detach()
        for name, layer in adapted_layers(model).items()
        for matrix in ("lora_A", "lora_B")
    }
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(workload.model),
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": [name.rpartition(".")[2] for name in workload.shape.linear],
    }
    workload.adapter.mkdir(exist_ok=True)
    save_file(tensors, workload.adapter / "adapter_model.safetensors", {"format": "pt"})
    (workload.adapter / "adapter_config.json").write_text(json.dumps(config, indent=1))


def write_tokens(workload: Workload, packed: bool) -> None:
    """Write the documents, and their assignment to the rows of every step, as the recipe packs and shuffles them."""
    from components.data import SampleOrder
    from components.data.packing import plan_rows

    generator = np.random.default_rng(workload.seed)
    count, seq_len = workload.total_steps * workload.rows, workload.seq_len
    if packed:
        lengths = _lengths(generator, count * seq_len, seq_len)
        plan = plan_rows(lengths, seq_len)
        starts, documents = plan.starts, plan.documents
    else:
        lengths = np.full(count, seq_len, np.int64)
        starts, documents = np.arange(count + 1), np.arange(count)
    ids = _tokens(generator, lengths, workload.shape.vocabulary)
    ends = np.cumsum(lengths)
    labels = ids.copy()
    for end, length in zip(ends, lengths, strict=True):
        labels[end - length : end - length + (max(1, length // 3) if packed else 1)] = IGNORED
    order = SampleOrder(len(starts) - 1, workload.seed).indices(0, count)
    rows = [documents[starts[row] : starts[row + 1]] for row in order]
    np.savez(
        Path(workload.folder) / "tokens.npz",
        ids=ids,
        labels=labels,
        ends=ends,
        row_documents=np.concatenate(rows),
        row_starts=np.cumsum([0, *map(len, rows)]),
    )


def _once(marker: Path, key: str, write: Callable[[], None]) -> None:
    """Call `write` unless the marker file contains `key`; then write the marker."""
    if marker.exists() and marker.read_text() == key:
        return
    marker.unlink(missing_ok=True)
    write()
    marker.write_text(key)


def _parts(shape: Shape) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield the names and shapes of the weights of each file."""
    table, norm = (shape.vocabulary, shape.hidden), (shape.hidden,)
    yield {"model.embed_tokens.weight": table, "model.norm.weight": norm}
    for layer in range(shape.layers):
        norms = {f"{name}_layernorm": norm for name in ("input", "post_attention")}
        sizes = {**shape.linear, **norms}
        yield {f"model.layers.{layer}.{name}.weight": size for name, size in sizes.items()}
    if not shape.tied:
        yield {"lm_head.weight": table}


def _random_weight(size: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(size, generator=generator).mul_(STD).to(dtype)


def _lengths(generator: np.random.Generator, tokens: int, seq_len: int) -> np.ndarray:
    """Draw document lengths as in chat data: median an eighth of a row, with a long tail; total at least `tokens`."""
    drawn = generator.lognormal(np.log(seq_len / 8), 0.8, 16 * tokens // seq_len + 64)
    lengths = drawn.astype(np.int64).clip(SHORTEST, seq_len)
    return lengths[: int(np.searchsorted(np.cumsum(lengths), tokens)) + 1]


def _tokens(generator: np.random.Generator, lengths: np.ndarray, vocabulary: int) -> np.ndarray:
    """Draw documents in which a fixed table determines most next tokens."""
    follower = generator.permutation(vocabulary)
    chance = generator.random(int(lengths.sum()))
    ids = generator.integers(vocabulary, size=len(chance))
    firsts = set((np.cumsum(lengths) - lengths).tolist())
    for position in range(1, len(ids)):
        if chance[position] < FOLLOWS and position not in firsts:
            ids[position] = follower[ids[position - 1]]
    return ids
