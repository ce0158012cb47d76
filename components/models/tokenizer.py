"""Tokenizers: from the hub, a folder or a GGUF file, or one token per byte made in memory."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from components.config.errors import ConfigError
from components.config.model_files import locate
from components.config.schema.model import ModelConfig
from components.models.weights.hub_files import explain_loading_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

BYTES = "bytes"
"""The value of `model.tokenizer` that asks for one token per byte."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")
"""A folder with a tokenizer has one of these."""

BYTE_SPECIAL_TOKENS = {
    "bos_token": "<|bos|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|pad|>",
    "additional_special_tokens": ["<|im_start|>"],
}
"""The end of a turn is the end of a text too, as in the ChatML models, so that generation needs one stop token."""

BYTE_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML; what the assistant says is marked for `apply_chat_template(return_assistant_tokens_mask=True)`."""


def load_tokenizer(cfg: ModelConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer of `cfg.tokenizer`, or of `cfg.path` where that is null.

    It always has a pad token: the end-of-text token where it came without one (logged), padding on the right.

    Raises:
        ConfigError: Nothing there, not reachable, or it has neither a pad nor an end-of-text token.
    """
    if cfg.tokenizer == BYTES:
        return byte_tokenizer()
    key, path = ("model.path", cfg.path) if cfg.tokenizer is None else ("model.tokenizer", cfg.tokenizer)
    if path is None:
        raise ConfigError("model.tokenizer=null: without model.path name one, or bytes for one token per byte")
    tokenizer = _load(cfg, path, key)
    tokenizer.padding_side = "right"
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ConfigError(
                f"{key}={path}: the tokenizer has neither a pad nor an end-of-text token; add one to its "
                "tokenizer_config.json, or set model.tokenizer to another"
            )
        tokenizer.pad_token = tokenizer.eos_token
        logger.info("The tokenizer has no pad token: rows are padded with %s", tokenizer.eos_token)
    return tokenizer


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer whose tokens are the 256 byte values (id = byte) and four special tokens.

    Nothing is merged, added or normalised: `encode(text)` is the UTF-8 of `text`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    characters = bytes_to_unicode()
    backend = Tokenizer(models.BPE(vocab={characters[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **BYTE_SPECIAL_TOKENS
    )
    tokenizer.chat_template = BYTE_CHAT_TEMPLATE
    return tokenizer


def _load(cfg: ModelConfig, path: str, key: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    files = locate(path, key)
    folder = Path(files.name_or_folder)
    if files.is_local and not files.gguf_file and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"{key}={path}: the folder has no tokenizer ({', '.join(TOKENIZER_FILES)}); set model.tokenizer to one, "
            "or to bytes for one token per byte"
        )
    try:
        if files.gguf_file:
            # AutoTokenizer would first build the model's config with the gguf package, which takes 3.5 s of its
            # 4; the tokenizer it then returns is this one.
            return PreTrainedTokenizerFast.from_pretrained(files.name_or_folder, gguf_file=files.gguf_file)
        return AutoTokenizer.from_pretrained(
            files.name_or_folder,
            revision=cfg.revision if cfg.tokenizer is None else None,
            trust_remote_code=cfg.trust_remote_code,
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise explain_loading_error(error, files, key, "tokenizer") from error
