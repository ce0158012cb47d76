"""The random number generator states of a rank as JSON: torch (CPU and current GPU), Python, numpy."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Return this rank's random state as JSON values."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    return {
        "torch": _encode(torch.get_rng_state()),
        "cuda": _encode(torch.cuda.get_rng_state()) if torch.cuda.is_initialized() else None,
        "python": [version, list(internal), gauss],
        "numpy": [name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore a state returned by `random_state`."""
    torch.set_rng_state(_decode(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_decode(state["cuda"]))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.cpu().tolist())).decode()


def _decode(state: str) -> torch.Tensor:
    return torch.tensor(list(base64.b64decode(state)), dtype=torch.uint8)
