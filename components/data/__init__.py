"""Data: from documentation, conversations, plain text, the hub or your function to micro-batches.

load.py       build_dataset: the `data` section to a Dataset of tokenized samples
sides.py      Side: the conversations or documents that are trained on or held out, read one by one
cache.py      tokenize: a side to tokens, from disk where they are known (tokens.py, token_file.py)
examples.py   Example: token ids and labels; the chat template and which tokens carry the loss
batches.py    TrainBatches, EvalBatches: which rows are this rank's, padding, the cursor for resuming
text.py       encode_documents: plain text, cut into samples of seq_len tokens
order.py      SampleOrder: the shuffle, a pure function of (seed, position)
dataset.py    Dataset: samples in memory, and what became of the rows (Facts)
mixture.py    MixtureDataset: several sources in shares by weight, and their order
packed.py     PackedDataset: several samples to a row, as packing.py plans it
preflight.py  check_files: what can be told without torch, before anything is started
files.py, hub.py, rows.py, pydocs.py   where rows come from, and how they become conversations
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from components import lazy

if TYPE_CHECKING:
    from components.data.batches import BatchPlan, EvalBatches, Padding, TrainBatches, collate
    from components.data.dataset import Dataset, Facts, HasPrompts, sample_prompts
    from components.data.examples import IGNORED, Example, PackedRow, encode_conversations, render_example
    from components.data.load import build_dataset
    from components.data.mixture import MixtureDataset, MixtureOrder, sources_of
    from components.data.order import SampleOrder
    from components.data.packed import PackedDataset
    from components.data.pairs import Pair, PairDataset, build_pairs
    from components.data.preflight import check_files
    from components.data.rows import Conversation, Message
else:
    __getattr__ = lazy.attach(__name__)
