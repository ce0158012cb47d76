"""Random seeds: global generators that are equal on all ranks of a stage, and separate streams by coordinates."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch

from components.config.errors import ConfigError

LARGEST_SEED = 2**32 - 1  # the limit of numpy.random.seed


def _set_seed(seed: int, rank: int, pp_rank: int = 0) -> None:
    """Seed torch (CPU and all CUDA devices), `random` and numpy (KempnerForge, distributed/setup.py).

    The seed is the same on all ranks of a pipeline stage and differs between stages. `rank` is unused and kept for
    the published signature; use `stream(seed, rank)` for a stream that differs between ranks.

    Raises ConfigError, before any generator is seeded, if the seed is out of numpy's range.
    """
    effective = seed + pp_rank
    if not 0 <= effective <= LARGEST_SEED:
        raise ConfigError(f"run.seed={seed}: with pipeline rank {pp_rank} it must lie between 0 and {LARGEST_SEED}")
    torch.manual_seed(effective)
    torch.cuda.manual_seed_all(effective)
    random.seed(effective)
    np.random.seed(effective)


def stream(seed: int, *coordinates: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator seeded by a hash of `seed` and `coordinates`, so that other coordinates give another stream.

    For randomness that must differ between ranks although `_set_seed` seeds them alike, such as data augmentation per
    dp rank, or dropout on activations sharded over tp.
    """
    digest = hashlib.sha256(repr((seed, *coordinates)).encode()).digest()
    generator = torch.Generator(device=device)
    generator.manual_seed(int.from_bytes(digest[:8], "big"))
    return generator
