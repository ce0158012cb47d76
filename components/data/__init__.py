"""Data: from documentation, conversations, plain text, the hub or your function to micro-batches.

loading.py    build_dataset: the `data` section to a Dataset of tokenized samples
sources/      where rows come from, and how they become conversations or documents
cache.py      tokenize: a split to tokens, from disk where they are known (tokens.py, token_file.py)
examples.py   Example: token ids and labels; the loss mask; chat_template.py: how a conversation is rendered
dataset.py    Dataset: samples in memory, and what became of the rows (Facts)
packed.py     PackedDataset: several samples to a row, as packing.py plans it
pairs.py      PairDataset: a chosen and a rejected answer to one prompt
mixture.py    MixtureDataset: several sources in shares by weight, and their order
order.py      SampleOrder: the shuffle, a pure function of (seed, position)
batches.py    TrainBatches, EvalBatches: which rows are this rank's, padding, the cursor for resuming
preflight.py  check_files: what can be checked without torch, before anything is started
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from components import lazy

if TYPE_CHECKING:
    from components.data.batches import BatchPlan, EvalBatches, Padding, TrainBatches, collate
    from components.data.dataset import Dataset, Facts, HasPrompts, sample_prompts
    from components.data.examples import IGNORED, Example, PackedRow, encode_conversations, render_example
    from components.data.loading import build_dataset
    from components.data.mixture import MixtureDataset, MixtureOrder, sources_of
    from components.data.order import SampleOrder
    from components.data.packed import PackedDataset
    from components.data.pairs import Pair, PairDataset, build_pairs
    from components.data.preflight import check_files
    from components.data.sources.rows import Conversation, Message
else:
    __getattr__ = lazy.attach(__name__)
