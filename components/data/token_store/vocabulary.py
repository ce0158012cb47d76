"""Hash of a tokenizer's vocabulary: two tokenizers with the same one give an id the same meaning. Imports no numpy.

The hash covers the tokens of tokenizer.json's model and their ids. Added tokens are left out: a chat model often
renames reserved ids of its base model, and may be trained on the base model's tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from components.config.errors import ConfigError
from components.config.model_files import locate
from components.config.schema.model import ModelConfig
from components.protocol.safe_json import load_json

HASH_OF_BYTES = "10f4878bace996e3bf5360c36043a0d6"
"""Hash of the vocabulary of model.tokenizer=bytes."""


def hash_of_tokens(vocabulary: Mapping[str, int] | Sequence[Any]) -> str:
    """Return the hash of a vocabulary of tokenizer.json: ids by token, or a list of (token, score) in order of ids."""
    ids = vocabulary if isinstance(vocabulary, Mapping) else {entry[0]: id for id, entry in enumerate(vocabulary)}
    pairs = sorted((id, token) for token, id in ids.items())
    return xxhash.xxh3_128(json.dumps(pairs).encode()).hexdigest()


def hash_of_tokenizer(tokenizer: Any) -> str | None:
    """Return the hash of the vocabulary of a transformers tokenizer; None if it is a slow one, which stores none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return None if backend is None else hash_of_tokens(json.loads(backend.to_str())["model"]["vocab"])


def hash_of_files(model: ModelConfig) -> str | None:
    """Return the hash of the vocabulary of a run's tokenizer, read without transformers.

    None if it needs the hub or a GGUF file, or has no tokenizer.json: then the ranks compare.
    """
    if model.tokenizer == "bytes":
        return HASH_OF_BYTES
    path = model.tokenizer or model.path
    try:
        files = None if path is None else locate(path)
        if files is None or not files.is_local or files.gguf_file:
            return None
        stored = load_json(Path(files.name_or_folder, "tokenizer.json"))
        return hash_of_tokens(stored["model"]["vocab"])
    except (ConfigError, OSError, ValueError, LookupError, TypeError):
        return None  # a missing or damaged tokenizer has its own message
