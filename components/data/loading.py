"""From the `data` section to tokenized samples."""

from __future__ import annotations

import pkgutil
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import compress
from typing import TYPE_CHECKING, Literal

from components.config.errors import ConfigError
from components.config.kinds import of_source
from components.config.schema.checks import raise_all
from components.config.schema.data import (
    CustomDataConfig,
    DataConfig,
    MixtureDataConfig,
    RowsDataConfig,
    UnusedKeys,
)
from components.data.cache import tokenize
from components.data.dataset import Dataset, Facts
from components.data.examples import IGNORED, Example
from components.data.mixture import MixtureDataset
from components.data.packed import PackedDataset
from components.data.sources.rows import unused_problem
from components.data.sources.split import SourceSplit, describe, hash_of_prompt, held_out_by_hash, holds_out, split_mask, split_of
from components.data.tokens import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build_dataset(
    cfg: DataConfig, tokenizer: PreTrainedTokenizerBase, *, seq_len: int, split: Literal["train", "eval"]
) -> Dataset | PackedDataset | MixtureDataset:
    """Read, tokenize and return the training samples or the held-out ones; packed into rows where `data.pack` says so.

    A pure function of its arguments and the files: every process calls it and gets the same samples, at once or
    one after another. What is tokenized is kept in `data.cache`, where one process makes what the others read; for a
    hub data set `datasets` fills its own cache, under locks.

    Without an eval split or path, `data.eval_fraction` of the training source is held out, chosen by a hash
    of the prompt: the same samples whatever the seed, the order of rows and the world size, and equal prompts
    are on the same side. `data.max_samples` and `data.max_eval_samples` keep the first of a side. Each source of a
    mixture has its own held-out part, and is packed by itself.

    Raises ConfigError where a file, column, row or split is wrong, and where no sample with a target is left.
    """
    if not isinstance(cfg, MixtureDataConfig):
        return _one_source(cfg, tokenizer, seq_len, split == "eval")
    parts, problems = {}, []
    for name, source in cfg.sources.items():
        if split == "eval" and not holds_out(source):
            continue
        try:
            parts[name] = _one_source(
                replace(source, pack=cfg.pack, cache=cfg.cache), tokenizer, seq_len, split == "eval"
            )
        except ConfigError as error:
            problems += of_source(name, error.problems)
    if not parts and not problems:
        problems.append("data.sources: none holds anything out; set data.sources.NAME.eval_fraction of one to evaluate")
    raise_all(problems)
    weights = {name: source.weight or 1.0 for name, source in cfg.sources.items()}
    return MixtureDataset(parts, weights if split == "train" else None)


def _one_source(
    cfg: DataConfig, tokenizer: PreTrainedTokenizerBase, seq_len: int, is_eval: bool
) -> Dataset | PackedDataset:
    facts = Facts(source=describe(cfg, is_eval))
    examples: Iterable[Example] | Tokens
    prompts: list[str] = []
    if isinstance(cfg, CustomDataConfig):
        everything = _custom_examples(cfg, tokenizer, seq_len, is_eval)
        hashes = array("Q", map(hash_of_prompt, everything) if held_out_by_hash(cfg) else [0] * len(everything))
        examples = compress(everything, split_mask(hashes, cfg, is_eval))
    else:
        examples, prompts, facts.dropped_bad_rows, facts.unused = tokenize(SourceSplit(cfg, is_eval), cfg, tokenizer, seq_len)
        if facts.unused and isinstance(cfg, RowsDataConfig) and cfg.unused_keys is UnusedKeys.refuse:
            raise ConfigError(unused_problem(facts.source, facts.unused))
    dataset = Dataset(examples, tokenizer, facts=facts, seq_len=seq_len, overlong=cfg.overlong, prompts=prompts)
    if len(dataset) == 0:
        raise ConfigError(_nothing_left(cfg, facts, seq_len, is_eval))
    return PackedDataset(dataset, seq_len) if cfg.pack else dataset


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
    for number, (ids, labels) in enumerate(factory(tokenizer, seq_len, split_of(cfg, is_eval))):
        if len(ids) != len(labels):
            raise ConfigError(
                f"data.factory={cfg.factory}: sample {number} has {len(ids)} input_ids and "
                f"{len(labels)} labels; labels are aligned with input_ids, -100 where there is no loss"
            )
        examples.append(_checked(f"data.factory={cfg.factory}: sample {number}", ids, labels, len(tokenizer)))
    return examples


def _checked(where: str, ids: Sequence[int], labels: Sequence[int], size: int) -> Example:
    """Return a sample, each of whose values is a token of a tokenizer of `size` tokens, or marks a place without loss.

    Another mark than IGNORED would be trained on as if it were a token, or stop a GPU far from here.
    """
    import numpy as np

    inputs, targets = (np.asarray(values, dtype=np.int64) for values in (ids, labels))  # (seq,) each
    marked = f"{IGNORED} where there is no loss, or "
    for name, values, besides in (("input_ids", inputs, ""), ("labels", targets[targets != IGNORED], marked)):
        if len(strange := values[(values < 0) | (values >= size)]):
            raise ConfigError(
                f"{where} has {strange[0]} among its {name}; must be {besides}at least 0 and below {size:,}, the "
                "number of the tokenizer's tokens"
            )
    return Example(inputs.tolist(), targets.tolist())


def _nothing_left(cfg: DataConfig, facts: Facts, seq_len: int, is_eval: bool) -> str:
    if is_eval and not holds_out(cfg):
        return "data.eval_fraction=0: nothing is held out; set it, data.eval_split or data.eval_path to evaluate"
    if facts.dropped_without_target or facts.dropped_overlong:
        return (
            f"seq_len={seq_len}: too short for every sample ({facts}); raise training.seq_len, or in evaluate.py "
            "evaluation.seq_len"
        )
    return f"{facts}: too few; to hold out data.eval_fraction={cfg.eval_fraction} takes two different prompts"
