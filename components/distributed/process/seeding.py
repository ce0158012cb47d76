"""Random streams: one for all ranks, and as many distinct ones as somebody asks for."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch

from components.config.errors import ConfigError

LARGEST_SEED = 2**32 - 1  # numpy's


def _set_seed(seed: int, rank: int, pp_rank: int = 0) -> None:
    """Set deterministic seeds for reproducibility: torch (CPU and all CUDA devices), `random` and numpy.

    The streams are equal on all ranks of a pipeline stage and differ between stages (seed page 003,
    KempnerForge). `rank` is part of the page's signature and changes nothing; a stream of a rank's own is
    `stream(seed, rank)`.

    Raises ConfigError, before any generator is touched, where numpy could not take the seed.
    """
    effective = seed + pp_rank
    if not 0 <= effective <= LARGEST_SEED:
        raise ConfigError(f"run.seed={seed}: with pipeline rank {pp_rank} it must lie between 0 and {LARGEST_SEED}")
    torch.manual_seed(effective)
    torch.cuda.manual_seed_all(effective)
    random.seed(effective)
    np.random.seed(effective)


def stream(seed: int, *coordinates: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator of a stream that depends on `seed` and `coordinates` only: others, another stream.

    For what must differ between ranks although `_set_seed` seeds them alike: data augmentation by dp rank,
    dropout on activations sharded over tp.
    """
    digest = hashlib.sha256(repr((seed, *coordinates)).encode()).digest()
    generator = torch.Generator(device=device)
    generator.manual_seed(int.from_bytes(digest[:8], "big"))
    return generator
