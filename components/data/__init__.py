"""Data loading: sources to tokenized samples to the micro-batches of a rank.

loading.py    build_dataset: tokenized samples for the `data` section of a config; MixtureDataset: several sources
sources/      readers of files, hub datasets, documentation and text; rows to conversations and documents
cache.py      tokenize: the tokens of a split, cached on disk as a shard of a token store
examples.py   Example: token ids and labels with the loss mask; keys that a chat template does not render
dataset.py    Dataset: samples of one split in memory or in the token cache (Tokens), and their statistics (Facts)
packing.py    PackedDataset: several samples per row; SampleOrder, BlockOrder: shuffles that depend on (seed, position)
labels.py     LabeledTexts, ScoredPairs: texts and pairs with a target at their last token
pairs.py      PairDataset: a chosen and a rejected answer to each prompt; PackedPairs: several pairs per row
prompts.py    Prompts: prompts whose answers are sampled; PromptBatches: their order
token_store/  TokenRows: rows of a corpus that was tokenized before, in many shards that a manifest lists
batches.py    TrainBatches, EvalBatches: the rows of this rank, padding, the cursor for resuming
preflight.py  check_files: checks before launch that need neither torch nor pyarrow
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from components import package

if TYPE_CHECKING:
    from components.conversation import Conversation, Message
    from components.data.batches import BatchPlan, EvalBatches, Padding, TrainBatches, collate
    from components.data.dataset import Dataset, Facts, HasPrompts, TokenValues, prompts_of_calls, sample_prompts
    from components.data.examples import IGNORED, Example, PackedRow, encode_conversations, render_example
    from components.data.labels import LabeledTexts, ScoredPairs, build_scored, scored_example
    from components.data.loading import MixtureDataset, MixtureOrder, build_dataset, sources_of
    from components.data.packing import BlockOrder, PackedDataset, SampleOrder
    from components.data.pairs import PackedPairs, PairDataset, PairedRows, RowPair, build_pairs, pack_pairs
    from components.data.preflight import check_files
    from components.data.prompts import PromptBatches, Prompts, RewardedPrompt, build_prompts
    from components.data.token_store.manifest import Manifest, read_manifest
    from components.data.token_store.rows import TokenRows
    from components.data.token_store.writer import index_folder
else:
    __getattr__, __dir__ = package.lazy_names(__name__)
