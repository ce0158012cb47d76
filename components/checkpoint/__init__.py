"""Checkpoints that survive a kill at any moment, resume bit for bit, and move between meshes.

save.py       save_checkpoint: written aside, verified, published by one rename; old ones removed
saver.py      Saver: the saves of a run, at once or in the background
retention.py  which of them stay, and how the others go
load.py       find_checkpoint, load_checkpoint, load_model_weights; verify
reader.py     choose_checkpoint, StoredWeights: the weights alone, block by block in one process, for the export
manifest.py   which files, which sizes, which hashes: written last, trusted alone
listing.py    what a run directory holds, told without torch
tensors.py    model and optimizer as named tensors, through torch.distributed.checkpoint, in safetensors
base_fingerprint.py  the fingerprint of weights that are not trained, and so not in it
planners.py   which blocks of them a rank writes and reads
disk_space.py what a checkpoint takes and what is free, for the message about one that could not be written
random_state.py, folders.py, checkpoint_error.py

Files are safetensors and JSON: nothing is ever unpickled. Names are imported at
first use: scripts look at checkpoints without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from components import lazy

if TYPE_CHECKING:
    from components.checkpoint.checkpoint_error import CheckpointError
    from components.checkpoint.load import (
        find_checkpoint,
        load_checkpoint,
        load_model_weights,
        verify,
    )
    from components.checkpoint.reader import StoredWeights, choose_checkpoint
    from components.checkpoint.save import Mark, save_checkpoint
    from components.checkpoint.saver import Saver
    from components.checkpoint.tensors import Optimizers, list_optimizers
else:
    __getattr__ = lazy.attach(__name__)
