"""Construction of tokenized datasets from the `data` section of a config."""

from __future__ import annotations

import pkgutil
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import compress
from typing import TYPE_CHECKING, Literal

import numpy as np

from components.config.kinds import of_source
from components.config.schema.checks import raise_all
from components.config.schema.data import (
    BadRows,
    ChatDataConfig,
    CustomDataConfig,
    DataConfig,
    DocsDataConfig,
    MixtureDataConfig,
    PreferencesDataConfig,
    RowsDataConfig,
    SftDataConfig,
    TextDataConfig,
    TokensDataConfig,
    UnusedKeys,
)
from components.conversation import Prompt
from components.data.cache import TokenizedSplit, tokenize
from components.data.dataset import Dataset, Facts, Tokens
from components.data.examples import IGNORED, Example
from components.data.mixture import MixtureDataset
from components.data.packing import PackedDataset
from components.data.sources.columns import AnswerConfig
from components.data.sources.rows import BadRowReport, no_good_row, refused_rows, unused_problem
from components.data.sources.split import (
    SourceSplit,
    describe,
    hash_of_prompt,
    held_out_by_hash,
    holds_out,
    sample_limit,
    split_mask,
    split_of,
)
from components.data.token_store.rows import TokenRows, build_rows
from components.protocol.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONVERSATIONS = (ChatDataConfig, DocsDataConfig, PreferencesDataConfig, SftDataConfig)
"""Data that the chat template renders."""


def build_dataset(
    cfg: DataConfig, tokenizer: PreTrainedTokenizerBase, *, seq_len: int, split: Literal["train", "eval"]
) -> Dataset | PackedDataset | TokenRows | MixtureDataset:
    """Read and tokenize the samples of the train or eval split; pack them into rows if `data.pack` is set.

    The result depends only on the arguments and the files: every process calls this function and gets the same
    samples, concurrently or one after another. Tokens are cached in `data.cache`, where one process writes what the
    others read. For hub datasets, `datasets` fills its own cache under file locks.

    Without an eval split or path, `data.eval_fraction` of the training source is held out, selected by a hash
    of the prompt. The selection does not depend on the seed, the order of rows or the world size, and equal prompts
    are in the same split. `data.max_samples` and `data.max_eval_samples` keep the first samples of a split. Each
    source of a mixture has its own held-out samples and is packed separately.

    Raises ConfigError if a file, column, row or split is invalid, or if no sample with a target remains.
    """
    if not isinstance(cfg, MixtureDataConfig):
        return _build_source(cfg, tokenizer, seq_len, split == "eval")
    parts, problems = {}, []
    for name, source in cfg.sources.items():
        if split == "eval" and not holds_out(source):
            continue
        try:
            parts[name] = _build_source(
                replace(source, pack=cfg.pack, cache=cfg.cache), tokenizer, seq_len, split == "eval"
            )
        except ConfigError as error:
            problems += of_source(name, error.problems)
    if not parts and not problems:
        problems.append(
            "data.sources: no source has held-out samples; to evaluate, set data.sources.NAME.eval_fraction of one"
        )
    raise_all(problems)
    weights = {name: source.weight or 1.0 for name, source in cfg.sources.items()}
    return MixtureDataset(parts, weights if split == "train" else None)


def _build_source(
    cfg: DataConfig, tokenizer: PreTrainedTokenizerBase, seq_len: int, is_eval: bool
) -> Dataset | PackedDataset | TokenRows:
    if isinstance(cfg, TokensDataConfig):
        return build_rows(cfg, tokenizer, seq_len=seq_len, is_eval=is_eval)
    facts = Facts(source=describe(cfg, is_eval))
    examples: Iterable[Example] | Tokens
    bad = BadRowReport()
    prompts: list[Prompt] = []
    if isinstance(cfg, CustomDataConfig):
        all_examples = _custom_examples(cfg, tokenizer, seq_len, is_eval)
        hashes = array("Q", map(hash_of_prompt, all_examples) if held_out_by_hash(cfg) else [0] * len(all_examples))
        examples = compress(all_examples, split_mask(hashes, cfg, is_eval))
    else:
        source = SourceSplit(cfg, is_eval)
        examples, prompts, bad, facts.unused, facts.notes = tokenize(source, cfg, tokenizer, seq_len)
        if isinstance(cfg, _CONVERSATIONS) and not tokenizer.chat_template:
            facts.notes.append(
                "the tokenizer has no chat template: messages are joined with line breaks, without roles"
            )
        facts.notes = [*facts.notes, *source.folder_notes]
        if facts.unused and isinstance(cfg, RowsDataConfig) and cfg.unused_keys is UnusedKeys.refuse:
            raise ConfigError(unused_problem(facts.source, facts.unused))
    dataset = Dataset(
        examples,
        tokenizer,
        facts=facts,
        seq_len=seq_len,
        overlong=cfg.overlong,
        prompts=prompts,
        bad=bad,
    )
    if not (isinstance(cfg, AnswerConfig) and cfg.label_column is None):  # the answers of pairs are checked together
        if isinstance(cfg, RowsDataConfig):
            refuse_bad_rows([cfg], [dataset], tokenizer, seq_len, is_eval)
        if len(dataset) == 0:
            raise ConfigError(no_samples_problem(cfg, dataset, seq_len, is_eval))
    return PackedDataset(dataset, seq_len) if cfg.pack else dataset


def refuse_bad_rows(
    cfgs: Sequence[RowsDataConfig],
    found: Sequence[Dataset],
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
    is_eval: bool,
) -> None:
    """Raise ConfigError for `data.bad_rows=refuse` with the bad rows of a source, in both of its splits, if it has any.

    Args:
        cfgs: Configs that read the same rows, such as those of both answers of pairs.
        found: The dataset of each.
    """
    if cfgs[0].bad_rows is BadRows.drop or not any(each.bad.count for each in found):
        return
    bad, others = BadRowReport(), len(found[0].fates)
    bad.add({}, found[0].bad.count - len(found[0].bad.samples))  # the same rows for all configs
    splits: list[Sequence[Dataset | TokenizedSplit]] = [found]
    has_other = holds_out(cfgs[0]) and held_out_by_hash(cfgs[0]) and sample_limit(cfgs[0], not is_eval) is None
    if has_other and not isinstance(cfgs[0], TextDataConfig):
        other = [tokenize(SourceSplit(each, not is_eval), each, tokenizer, seq_len) for each in cfgs]
        others += len(other[0].tokens.starts)
        splits.append(other)
    for split in splits:
        problems = {where: each.bad.problems[where] for each in reversed(split) for where in each.bad.problems}
        rejected = len(set().union(*(each.bad.samples for each in split)))
        bad.add(problems, rejected)
        others -= rejected
    raise ConfigError(refused_rows(bad, others))


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
                f"{len(labels)} labels; labels must be aligned with input_ids, with -100 for ignored targets"
            )
        examples.append(_checked(f"data.factory={cfg.factory}: sample {number}", ids, labels, len(tokenizer)))
    return examples


def _checked(where: str, ids: Sequence[int], labels: Sequence[int], size: int) -> Example:
    """Validate the values of a sample against a vocabulary of `size` tokens.

    Any other mark than IGNORED would be trained on as a token id, or fail later with a device-side assertion.
    """
    inputs, targets = (np.asarray(values, dtype=np.int64) for values in (ids, labels))  # (seq,) each
    or_ignored = f"{IGNORED} (ignored), or "
    for name, values, alternative in (("input_ids", inputs, ""), ("labels", targets[targets != IGNORED], or_ignored)):
        if len(invalid := values[(values < 0) | (values >= size)]):
            raise ConfigError(
                f"{where} has {invalid[0]} among its {name}; must be {alternative}at least 0 and below {size:,}, the "
                "size of the tokenizer's vocabulary"
            )
    return Example(inputs.tolist(), targets.tolist())


def no_samples_problem(cfg: DataConfig, dataset: Dataset, seq_len: int, is_eval: bool) -> str:
    facts = dataset.facts
    if is_eval and not holds_out(cfg):
        return (
            "data.eval_fraction=0: there are no held-out samples; "
            "to evaluate, set it, data.eval_split or data.eval_path"
        )
    if dataset.bad.samples and len(dataset.bad.samples) == len(dataset.fates):
        other = ", or raise data.eval_fraction" if is_eval and held_out_by_hash(cfg) else ""
        return no_good_row(facts.source, dataset.bad, f"correct these{other}")
    if facts.dropped_without_target or facts.dropped_overlong:
        return (
            f"seq_len={seq_len}: too short for every sample ({facts}); raise training.seq_len (in evaluate.py "
            "evaluation.seq_len)"
        )
    other = "data.eval_split or data.eval_path" if isinstance(cfg, RowsDataConfig) else "data.eval_split"
    if isinstance(cfg, CustomDataConfig):
        other += " (such as eval, which calls data.factory with this split)"
    return (
        f"{facts}: too few samples; holding out data.eval_fraction={cfg.eval_fraction} requires at least two different "
        f"prompts; add samples, or set {other}"
    )
