"""From the `data` section to tokenized samples."""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, Literal, TypeVar

from components.config.errors import ConfigError
from components.config.schema.data import CustomDataConfig, DataConfig, DocsDataConfig, RowsDataConfig
from components.data import pydocs
from components.data.cache import tokenize
from components.data.dataset import Dataset, Facts
from components.data.examples import IGNORED, Example
from components.data.files import Place, Row, check_columns, columns_of, files_of_split, is_local, read_rows
from components.data.hub import hub_rows
from components.data.packed import PackedDataset
from components.data.rows import (
    Conversation,
    columns_wanted,
    held_out_place,
    to_conversations,
    training_place,
)
from components.data.tokens import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROMPTS_KEPT = 100  # to generate samples from

Sample = TypeVar("Sample", Conversation, Example)


def build_dataset(
    cfg: DataConfig, tokenizer: PreTrainedTokenizerBase, *, seq_len: int, split: Literal["train", "eval"]
) -> Dataset | PackedDataset:
    """Read, tokenize and return the training samples or the held-out ones; packed into rows where `data.pack` says so.

    A pure function of its arguments and the files: every process calls it and gets the same samples, at once or
    one after another. What is tokenized is kept in `data.cache`, where one process makes what the others read; for a
    hub data set `datasets` fills its own cache, under locks.

    Without an eval split or path, `data.eval_fraction` of the training source is held out, chosen by a hash
    of the prompt: the same samples whatever the seed, the order of rows and the world size, and equal prompts
    are on the same side. `data.max_samples` and `data.max_eval_samples` keep the first of a side.

    Raises ConfigError where a file, column, row or split is wrong, and where no sample with a target is left.
    """
    is_eval = split == "eval"
    facts = Facts(source=_describe(cfg, is_eval))
    examples: Iterable[Example] | Tokens
    prompts: list[str] = []
    if isinstance(cfg, CustomDataConfig):
        examples = _kept(_custom_examples(cfg, tokenizer, seq_len, is_eval), cfg, is_eval)
    else:
        conversations, facts.dropped_bad_rows = _conversations(cfg, is_eval)
        kept = _kept(conversations, cfg, is_eval)
        examples = tokenize(kept, tokenizer, cfg.cache)
        prompts = [_question(conversation) for conversation in kept[:_PROMPTS_KEPT]]
    dataset = Dataset(examples, tokenizer, facts=facts, seq_len=seq_len, overlong=cfg.overlong, prompts=prompts)
    if len(dataset) == 0:
        raise ConfigError(_nothing_left(cfg, facts, seq_len, is_eval))
    return PackedDataset(dataset, seq_len) if cfg.pack else dataset


def _conversations(cfg: DataConfig, is_eval: bool) -> tuple[list[Conversation], int]:
    """Return the conversations of a side's source, before any is held out by hash, and how many were bad."""
    if isinstance(cfg, RowsDataConfig):
        place = (held_out_place(cfg) if is_eval else None) or training_place(cfg)
        return to_conversations(cfg, _rows(cfg, place))
    if isinstance(cfg, DocsDataConfig):
        return pydocs.conversations(_split(cfg, is_eval)), 0
    raise TypeError(f"no source is known of {type(cfg).__name__}")


def _rows(cfg: RowsDataConfig, place: Place) -> Iterator[Row]:
    wanted = columns_wanted(cfg)
    if not is_local(place.path):
        return hub_rows(place, cfg.subset, cfg.revision, wanted)
    files = files_of_split(place)
    columns = columns_of(files[0])
    problems = check_columns(wanted, columns, str(files[0])) if columns else []
    if problems:
        raise ConfigError(problems)
    return chain.from_iterable(read_rows(file, list(wanted.values())) for file in files)


def _custom_examples(
    cfg: CustomDataConfig, tokenizer: PreTrainedTokenizerBase, seq_len: int, is_eval: bool
) -> list[Example]:
    try:
        factory = pkgutil.resolve_name(cfg.factory)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"data.factory={cfg.factory}: cannot be imported: {error}") from error
    if not callable(factory):
        raise ConfigError(f"data.factory={cfg.factory}: is a {type(factory).__name__}, not a function")
    examples = []
    for number, (ids, labels) in enumerate(factory(tokenizer, seq_len, _split(cfg, is_eval))):
        if len(ids) != len(labels):
            raise ConfigError(
                f"data.factory={cfg.factory}: sample {number} has {len(ids)} input_ids and "
                f"{len(labels)} labels; labels are aligned with input_ids, -100 where there is no loss"
            )
        examples.append(Example([int(token) for token in ids], [int(label) for label in labels]))
    return examples


def _question(conversation: Conversation) -> str:
    """Return what was said right before the first answer."""
    roles = [message["role"] for message in conversation.messages]
    return conversation.messages[roles.index("assistant") - 1]["content"]


def _kept(samples: list[Sample], cfg: DataConfig, is_eval: bool) -> list[Sample]:
    """Return the samples of one side, at most as many as asked for."""
    if not samples:
        raise ConfigError(f"data: {_describe(cfg, is_eval)}: has no rows; name others by data.path or data.split")
    if _held_out_by_hash(cfg):
        samples = _side(samples, cfg.eval_fraction, is_eval)
    return samples[: cfg.max_eval_samples if is_eval else cfg.max_samples]


def _side(samples: list[Sample], fraction: float, is_eval: bool) -> list[Sample]:
    """Return the samples whose prompts have the smallest hashes (held out), or the others.

    A share and not a chance for each: at least one of two is held out, and one is left.
    """
    held_out = min(max(round(len(samples) * fraction), 1), len(samples) - 1) if fraction else 0
    if held_out <= 0:
        return [] if is_eval else samples
    hashes = [blake2b(_prompt(sample), digest_size=8).digest() for sample in samples]
    largest = sorted(hashes)[held_out - 1]
    return [sample for sample, key in zip(samples, hashes, strict=True) if (key <= largest) == is_eval]


def _prompt(sample: Conversation | Example) -> bytes:
    """Return what comes before the first answer."""
    if isinstance(sample, Conversation):
        roles = [message["role"] for message in sample.messages]
        return json.dumps(sample.messages[: roles.index("assistant")]).encode()
    first_target = next((i for i, label in enumerate(sample.labels) if label != IGNORED), None)
    return json.dumps(sample.input_ids[:first_target]).encode()


def _held_out_by_hash(cfg: DataConfig) -> bool:
    return cfg.eval_split is None and not (isinstance(cfg, RowsDataConfig) and cfg.eval_path)


def _split(cfg: DataConfig, is_eval: bool) -> str:
    return (cfg.eval_split if is_eval else None) or cfg.split


def _describe(cfg: DataConfig, is_eval: bool) -> str:
    split = _split(cfg, is_eval)
    match cfg:
        case RowsDataConfig():
            path = cfg.eval_path if is_eval and cfg.eval_path else cfg.path
            source = f"{path} ({split})"
        case CustomDataConfig():
            source = f"{cfg.factory} ({split})"
        case _:
            source = f"documentation of Python's standard library ({split})"
    return f"held out of {source}" if is_eval and _held_out_by_hash(cfg) else source


def _nothing_left(cfg: DataConfig, facts: Facts, seq_len: int, is_eval: bool) -> str:
    if is_eval and _held_out_by_hash(cfg) and cfg.eval_fraction == 0:
        return "data.eval_fraction=0: nothing is held out; set it, data.eval_split or data.eval_path to evaluate"
    if facts.dropped_without_target or facts.dropped_overlong:
        return f"training.seq_len={seq_len}: too short for every sample ({facts}); raise it"
    return f"{facts}: too few; to hold out data.eval_fraction={cfg.eval_fraction} takes two different prompts"
