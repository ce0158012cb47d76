"""Checkpoints that survive a kill at any moment, resume bit for bit, and can be loaded on another mesh.

save.py            save_checkpoint: write to a temporary folder, publish by one rename, apply the retention policy
saver.py           Saver: the saves of a run, synchronous or in the background
replica_check.py   ReplicaCheck: ranks with the same data must hold the same bits, or one of them computes wrongly
load.py            find_checkpoint, locate_checkpoint, load_checkpoint, load_model_weights, stored_dtype_of, verify
                   choose_checkpoint, StoredWeights: the weights in one process, block by block, for the export
manifest.py        the manifest: files, sizes and hashes, written last; CheckpointError; the checkpoints of a run
                   directory, the retention policy and safe removal; without torch
tensors.py         model and optimizer state as named tensors
stored_tensors.py  their blocks in a checkpoint's files, written and read; fingerprint of a LoRA run's base weights
mirror.py          Mirror: copies of the checkpoints in an object store (checkpoint.remote)

Files are safetensors and JSON: nothing is ever unpickled. Names are imported at first use, so that scripts can inspect
checkpoints without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from components import package

if TYPE_CHECKING:
    from components.checkpoint.load import (
        StoredWeights,
        choose_checkpoint,
        find_checkpoint,
        load_checkpoint,
        load_model_weights,
        locate_checkpoint,
        stored_dtype_of,
        verify,
    )
    from components.checkpoint.manifest import CheckpointError, Manifest, saved_at
    from components.checkpoint.mirror import Mirror
    from components.checkpoint.replica_check import ReplicaCheck
    from components.checkpoint.save import Mark, save_checkpoint
    from components.checkpoint.saver import Saver
    from components.checkpoint.stored_tensors import load_adapter
    from components.checkpoint.tensors import Optimizers, list_optimizers
else:
    __getattr__, __dir__ = package.lazy_names(__name__)
