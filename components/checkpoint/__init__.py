"""Checkpoints that survive a kill at any moment, resume bit for bit, and move between meshes.

save.py       save_checkpoint: written aside, verified, published by one rename; old ones removed
load.py       find_checkpoint, load_checkpoint, load_model_weights; verify
stored.py     choose_checkpoint, StoredWeights: the weights alone, block by block in one process, for the export
manifest.py   which files, which sizes, which hashes: written last, trusted alone
tensors.py    model and optimizer as named tensors, through torch.distributed.checkpoint, in safetensors
random_state.py, folders.py, errors.py

Files are safetensors and JSON: nothing is ever unpickled.
"""

from components.checkpoint.errors import CheckpointError
from components.checkpoint.load import find_checkpoint, load_checkpoint, load_model_weights, verify
from components.checkpoint.save import save_checkpoint
from components.checkpoint.stored import StoredWeights, choose_checkpoint

__all__ = [
    "CheckpointError",
    "StoredWeights",
    "choose_checkpoint",
    "find_checkpoint",
    "load_checkpoint",
    "load_model_weights",
    "save_checkpoint",
    "verify",
]
