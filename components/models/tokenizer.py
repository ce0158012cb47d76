"""Tokenizers from the hub, a folder or a GGUF file, and one of bytes; errors of the hub."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.config.model_files import ModelFiles, locate, no_template, shipped_templates
from components.config.schema.model import ModelConfig
from components.protocol.errors import ConfigError
from components.protocol.processes import CpuLimitError, limited
from components.protocol.run_files import RECORD, read_json
from components.protocol.safe_parsing import is_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_BYTES = "bytes"
"""Value of `model.tokenizer` that selects one token per byte."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")
"""Files of which a folder with a tokenizer contains at least one."""

_CONTROL_TOKEN = re.compile("<([|\uff5c])[^<>|\uff5c\\s]+\\1>|<(?:start|end)_of_turn>")
"""Form of the tokens with which chat templates begin and end messages."""
_PROBE_SECONDS, _PROBE_BYTES = 5.0, 2**29
"""Limits on the CPU time and the memory of a chat template that is looked at."""

_BYTE_SPECIAL_TOKENS = {
    "bos_token": "<|bos|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|pad|>",
    "additional_special_tokens": ["<|im_start|>"],
}
"""The end-of-turn token is also the end-of-text token, as in ChatML models, so that generation has one stop token."""

BYTE_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML; assistant messages are marked for `apply_chat_template(return_assistant_tokens_mask=True)`."""


def load_tokenizer(cfg: ModelConfig, checkpoint: Path | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of `cfg.tokenizer`, or of `cfg.path` if that is None, with the template `cfg.chat_template`.

    The last ids are those of `cfg.new_tokens`. It pads on the right. If it has no
    pad token, the end-of-text token becomes the pad token, which is logged.

    Args:
        checkpoint: Checkpoint of a training run that the tokenizer is used with. With one of recipes/pretrain.py, whose
            model is not trained on chats, the tokenizer only has the template `cfg.chat_template`, if it is set.

    Raises:
        ConfigError: The tokenizer is missing or unreachable, has neither a pad nor an end-of-text token, lacks the
            template, or has one of the new tokens already.
    """
    tokenizer = _padded(cfg)
    _add_tokens(tokenizer, cfg.new_tokens)
    if cfg.chat_template is not None:
        is_own = _set_default_template(tokenizer, cfg, cfg.chat_template)
        if not is_own:
            _check_control_tokens(tokenizer, cfg)
    elif checkpoint is not None and read_json(checkpoint.parent.parent / RECORD).get("recipe") == "pretrain":
        tokenizer.chat_template = None
    return tokenizer


def _padded(cfg: ModelConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer, with a pad token. Raises ConfigError."""
    if cfg.tokenizer == _BYTES:
        return byte_tokenizer()
    key, path = ("model.path", cfg.path) if cfg.tokenizer is None else ("model.tokenizer", cfg.tokenizer)
    if path is None:
        raise ConfigError(
            "model.tokenizer=null: a model without model.path needs a tokenizer; set model.tokenizer to one, or to "
            "bytes for one token per byte"
        )
    tokenizer = _load(cfg, path, key)
    named: Any = tokenizer.chat_template
    templates = list(named.values()) if isinstance(named, dict) else [named]
    if not all(isinstance(template, str | None) for template in templates):
        raise ConfigError(f"{key}={path}: chat_template in tokenizer_config.json must be a text; correct the file")
    if not isinstance(tokenizer.model_max_length, int | float):
        raise ConfigError(f"{key}={path}: model_max_length in tokenizer_config.json must be a number; correct the file")
    tokenizer.padding_side = "right"
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ConfigError(
                f"{key}={path}: the tokenizer has neither a pad nor an end-of-text token; add one to its "
                "tokenizer_config.json, or set model.tokenizer to another"
            )
        tokenizer.pad_token = tokenizer.eos_token
        logger.info("the tokenizer has no pad token: padding rows with %s", tokenizer.eos_token)
    return tokenizer


def _add_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> None:
    """Give new tokens the ids after the last. Raises ConfigError for a token that exists."""
    from transformers import AddedToken

    known, before = tokenizer.get_vocab(), len(tokenizer)
    if existing := [token for token in tokens if token in known]:
        raise ConfigError(
            f"model.new_tokens={existing}: the tokenizer has {'this token' if len(existing) == 1 else 'these tokens'} "
            f"already (id {known[existing[0]]}); leave out what it has"
        )
    for special, run in groupby(tokens, lambda token: token.startswith("<|") and token.endswith("|>")):
        added = [AddedToken(token, normalized=False, special=special) for token in run]
        tokenizer.add_tokens(added, special_tokens=special)
    ids = tokenizer.convert_tokens_to_ids(list(tokens))
    if ids != list(range(before, before + len(tokens))):
        raise ConfigError(
            f"model.new_tokens={list(tokens)}: the ids of this tokenizer are not consecutive, so that they cannot be "
            "added after the last; save it with the tokens, and set model.tokenizer to the result"
        )


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a tokenizer without the pad token that `load_tokenizer` gave it, if it had none. Raises OSError."""
    from transformers import PreTrainedTokenizerBase as Base

    if isinstance(tokenizer, Base) and tokenizer.init_kwargs.get("pad_token") is None:  # a user's may be another class
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)


def _set_default_template(tokenizer: PreTrainedTokenizerBase, cfg: ModelConfig, chosen: str) -> bool:
    """Make the chat template that `model.chat_template` selects a tokenizer's default; return whether it had it before.

    Of several templates all are kept: those that are replaced with the prefix `original_`. One of another origin also
    replaces the template for conversations with tools. Raises ConfigError.
    """
    own = tokenizer.chat_template
    named: dict[str, str] = own if isinstance(own, dict) else {} if own is None else {"default": own}
    shipped = shipped_templates()
    if chosen in {*named, *shipped} and any(Path(chosen, name).is_file() for name in (".", *TOKENIZER_FILES)):
        raise ConfigError(
            f"model.chat_template={chosen}: is the name of a chat template, and a file or a model in this folder; "
            f"write ./{chosen} for the latter, or rename it to use the template"
        )
    replaced = {"default"} if chosen in named or is_template(chosen) else {"default", "tool_use"}
    if is_template(chosen):
        text = chosen
    elif chosen in named:
        text = named[chosen]
    elif chosen in shipped:
        text = shipped[chosen].read_text(encoding="utf-8")
    elif cfg.template_model is not None:
        text = _template_of_model(cfg, chosen)
    else:
        raise ConfigError(no_template(chosen, named))
    if not isinstance(own, dict):
        tokenizer.chat_template = text
        return chosen in named
    others = {name: each for name, each in own.items() if name not in replaced}
    for name in sorted(replaced & own.keys()):
        if own[name] not in (text, *others.values()):
            others[f"original_{name}"] = own[name]
    tokenizer.chat_template = {**others, "default": text}
    return chosen in named


def _template_of_model(cfg: ModelConfig, path: str) -> str:
    """Return the default chat template of another model's tokenizer. Raises ConfigError."""
    template: Any = _load(cfg, path, "model.chat_template").chat_template
    found = template.get("default") if isinstance(template, dict) else template
    if isinstance(found, str):
        return found
    names = f"several ({', '.join(sorted(template))}), none of them named default" if template else "none"
    raise ConfigError(
        f"model.chat_template={path}: needs one chat template, but the tokenizer of that model has {names}; set it to "
        "a file with the template, or to another model"
    )


def _check_control_tokens(tokenizer: PreTrainedTokenizerBase, cfg: ModelConfig) -> None:
    """Reject a chat template whose control tokens the tokenizer would split, because no answer would end with one.

    The template of a file, which may use such texts on purpose, only causes a warning.
    """
    from jinja2 import TemplateError

    turns: list[Any] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 2
    function = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {**function, "arguments": {}}}],
    }
    called = [*turns[:1], call, {"role": "tool", "name": "f", "content": "c"}, turns[1]]
    text = ""
    for messages, options in (
        (turns, {"add_generation_prompt": True}),
        (turns, {}),
        (called[:2], {"tools": [{"type": "function", "function": function}]}),
        (called, {"tools": [{"type": "function", "function": function}]}),
    ):
        try:
            with limited(_PROBE_SECONDS, _PROBE_BYTES):  # templates are untrusted code
                text += str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
        except (CpuLimitError, MemoryError, TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            # Some have no tools; what a conversation needs fails again where it is used.
            logger.debug("some control tokens of the chat template are not checked: %r", error)
    tokens = dict.fromkeys(match[0] for match in _CONTROL_TOKEN.finditer(text))
    missing = [token for token in tokens if len(tokenizer.encode(token, add_special_tokens=False)) != 1]
    if not missing:
        return
    listed = ",".join(f'"{token}"' for token in missing)
    problem = (
        f"model.chat_template={cfg.template_name}: the tokenizer has no tokens {', '.join(missing)}, with which the "
        f"template begins and ends messages; add them by 'model.new_tokens=[{listed}]', or set model.tokenizer to a "
        "tokenizer that has them"
    )
    if not is_template(cfg.chat_template or ""):
        raise ConfigError(problem)
    logger.warning("%s", problem)


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer whose tokens are the 256 byte values (id = byte) and four special tokens.

    It has no merges, no normalization and adds no tokens: `encode(text)` is the UTF-8 encoding of `text`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    characters = bytes_to_unicode()
    backend = Tokenizer(models.BPE(vocab={characters[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **_BYTE_SPECIAL_TOKENS
    )
    tokenizer.chat_template = BYTE_CHAT_TEMPLATE
    return tokenizer


def _load(cfg: ModelConfig, path: str, key: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    files = locate(path, key)
    folder = Path(files.name_or_folder)
    if files.is_local and not files.gguf_file and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        remedy = "set model.tokenizer to one, or to bytes for one token per byte"
        if key == "model.chat_template":
            remedy = "set it to a folder that has one, or to a file with a template"
        raise ConfigError(f"{key}={path}: the folder has no tokenizer ({', '.join(TOKENIZER_FILES)}); {remedy}")
    try:
        if files.gguf_file:
            # AutoTokenizer returns this tokenizer too, but first spends 3.5 s on the model's config.
            return PreTrainedTokenizerFast.from_pretrained(files.name_or_folder, gguf_file=files.gguf_file)
        return AutoTokenizer.from_pretrained(
            files.name_or_folder,
            revision=cfg.revision if key == "model.path" else None,
            trust_remote_code=cfg.trust_remote_code,
        )
    except Exception as error:  # tokenizers raises no narrower class for a damaged file, and transformers any
        if cfg.trust_remote_code and not isinstance(error, OSError | ValueError | KeyError | ImportError):
            raise  # of the code of the model's repository
        raise explain_loading_error(error, files, key, "tokenizer") from error


def explain_loading_error(error: Exception, files: ModelFiles, key: str, what: str) -> ConfigError:
    """Return the ConfigError for an exception that transformers raised while loading `what` from `files`.

    Args:
        key: Config key of the path.
        what: "config", "tokenizer" or "weights".
    """
    given = f"{key}={files.name_or_folder}"
    causes = _causes(error)
    names = {type(cause).__name__ for cause in causes}
    text = " ".join(str(cause) for cause in causes)
    if "trust_remote_code" in text:
        return ConfigError(
            f"{given}: its {what} runs code from its repository; review that code, then set "
            "model.trust_remote_code=true"
        )
    if names & {"GatedRepoError"}:
        return ConfigError(
            f"{given}: access is gated; accept its license on the hub and log in (hf auth login), or set {key} to a "
            "local folder"
        )
    if names & {"RepositoryNotFoundError", "RevisionNotFoundError"}:
        return ConfigError(f"{given}: the hub has no such model or revision; check {key} and model.revision")
    if not files.is_local and (names & _UNREACHABLE or "offline" in text or "connect" in text.lower()):
        return ConfigError(
            f"{given}: its {what} is not in the local cache and the hub cannot be reached; set {key} to a local folder"
        )
    return ConfigError(f"{given}: the {what} cannot be read: {error_line(error)}")


def error_line(error: Exception) -> str:
    """Return the first line of an exception's message, with the next one after a colon; or the name of its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 1 + lines[0].endswith(":")])


_UNREACHABLE = {
    "ConnectError",
    "ConnectionError",
    "ConnectTimeout",
    "LocalEntryNotFoundError",
    "OfflineModeIsEnabled",
    "ProxyError",
    "ReadTimeout",
}
"""Exceptions of huggingface_hub and its HTTP client; by name, because the client library differs between versions."""


def _causes(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain
