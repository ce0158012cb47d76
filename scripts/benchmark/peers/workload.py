"""The workload that all arms train: sizes, settings, and the tokens of every step, from a folder that make.py wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

IGNORED = -100
"""Label of a token without loss."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Shape of a Llama. RoPE is scaled as in Llama 3.1 (factor 8) or 3.2 (factor 32), which is built into the peers."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = True
    """Whether the embedding and the LM head share one weight (Llama 3.2), or not (3.1)."""

    @property
    def head_dim(self) -> int:
        """Size of each attention head."""
        return self.hidden // self.heads

    @property
    def rope_factor(self) -> float:
        """Factor by which RoPE's low frequencies are divided."""
        return 32.0 if self.tied else 8.0

    @property
    def linear(self) -> dict[str, tuple[int, int]]:
        """Shapes (out, in) of the linear layers of one decoder layer, by their names in transformers."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (queries, self.hidden),
            "self_attn.k_proj": (keys, self.hidden),
            "self_attn.v_proj": (keys, self.hidden),
            "self_attn.o_proj": (self.hidden, queries),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }

    def flops(self, lengths: list[int], lora_rank: int = 0) -> float:
        """Return the model FLOPs of forward and backward for documents of the given lengths.

        A trained matrix parameter costs 6 FLOPs per token, a frozen one 4; attention costs 12 x head_dim per head and
        pair of a token and one it attends to. See components/training/step_cost.py.
        """
        layer = sum(rows * columns for rows, columns in self.linear.values())
        adapters = self.layers * lora_rank * sum(rows + columns for rows, columns in self.linear.values())
        matrices = self.layers * layer + self.hidden * self.vocabulary
        per_token = 4 * matrices + 6 * adapters if lora_rank else 6 * matrices
        pairs = sum(length * (length + 1) // 2 for length in lengths)
        return per_token * sum(lengths) + 12.0 * self.layers * self.heads * self.head_dim * pairs


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Workload of one arm. Between arms only `layout`, `precision` (of the reference) and `overrides` differ."""

    folder: str
    """Folder with model/, adapter/ and tokens.npz."""
    device: str
    """cpu or cuda."""
    precision: str
    """float32; mixed: matmuls in bfloat16, all else in float32; bfloat16: everything in bfloat16."""
    layout: str
    """rows: one full-length document per row; packed: several documents per row, which do not attend to each other;
    padded: one document per row, padded to the longest of the micro-batch."""
    shape: Shape
    lora_rank: int = 0
    """0: all parameters are trained; otherwise adapters on all linear layers, with alpha twice the rank."""
    seq_len: int
    rows: int
    """Rows per optimizer step; with layout padded, the documents of this many packed rows."""
    micro: int
    """Rows per micro-batch; with layout padded, the documents of this many packed rows."""
    warmup: int
    """Steps that are not measured."""
    steps: int
    """Steps that are measured."""
    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    seed: int = 0
    compile: bool = False
    threads: int = 1
    overrides: tuple[str, ...] = ()
    """Overrides of Meshbook's recipe; other arms ignore them."""

    @property
    def model(self) -> Path:
        """Model folder in transformers' format."""
        return Path(self.folder) / "model"

    @property
    def adapter(self) -> Path:
        """Adapter folder in peft's format."""
        return Path(self.folder) / "adapter"

    @property
    def stored(self) -> torch.dtype:
        """Dtype of the parameters."""
        return torch.bfloat16 if self.precision == "bfloat16" else torch.float32

    @property
    def autocast(self) -> torch.autocast:
        """Autocast context of a forward."""
        return torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.precision == "mixed")

    @property
    def total_steps(self) -> int:
        """Number of steps, including the warm-up."""
        return self.warmup + self.steps

    @property
    def accumulation(self) -> int:
        """Micro-batches per step."""
        return self.rows // self.micro

    @cached_property
    def tokens(self) -> Tokens:
        """Documents and rows that make.py wrote."""
        with np.load(Path(self.folder) / "tokens.npz") as arrays:
            return Tokens(**arrays)

    def micro_batch(self, step: int, number: int) -> dict[str, torch.Tensor]:
        """Return input_ids and labels of a micro-batch, (rows, seq) int64; with layout packed also position_ids."""
        first = step * self.rows + number * self.micro
        rows = [self.tokens.row(row) for row in range(first, first + self.micro)]
        if self.layout == "padded":
            rows = [[document] for row in rows for document in row]
            length = max(len(row[0][0]) for row in rows)
        else:
            length = self.seq_len
        batch = {"input_ids": np.zeros((len(rows), length), np.int64)}
        batch["labels"] = np.full_like(batch["input_ids"], IGNORED)
        positions = np.tile(np.arange(length), (len(rows), 1))
        for index, row in enumerate(rows):
            start = 0
            for ids, labels in row:
                end = start + len(ids)
                batch["input_ids"][index, start:end], batch["labels"][index, start:end] = ids, labels
                positions[index, end:] = np.arange(length - end)  # positions restart at the next document
                start = end
        if self.layout == "packed":
            batch["position_ids"] = positions
        return {name: torch.from_numpy(array) for name, array in batch.items()}

    def micro_batches(self, step: int) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the micro-batches of a step on the device."""
        for number in range(self.accumulation):
            batch = self.micro_batch(step, number)
            if self.device == "cuda":
                yield {name: tensor.pin_memory().to("cuda", non_blocking=True) for name, tensor in batch.items()}
            else:
                yield batch

    def targets(self, step: int) -> int:
        """Return the number of target tokens of a step."""
        rows = range(step * self.rows, (step + 1) * self.rows)
        return sum(int((labels != IGNORED).sum()) for row in rows for _, labels in self.tokens.row(row))

    def lengths(self, step: int) -> list[int]:
        """Return the lengths of a step's documents."""
        rows = range(step * self.rows, (step + 1) * self.rows)
        return [len(ids) for row in rows for ids, _ in self.tokens.row(row)]

    def write(self, file: Path) -> None:
        """Write the workload as JSON, for an arm's process."""
        file.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, file: str | Path) -> Workload:
        """Read a workload that `write` wrote."""
        values: dict[str, Any] = json.loads(Path(file).read_text())
        tuples = {name: tuple(values[name]) for name in ("betas", "overrides")}
        return cls(**{**values, **tuples, "shape": Shape(**values["shape"])})


@dataclass(frozen=True)
class Tokens:
    """Documents, and their assignment to rows in training order."""

    ids: np.ndarray  # (tokens,), of all documents one after the other
    labels: np.ndarray  # (tokens,)
    ends: np.ndarray  # (documents,): end of each document in ids
    row_documents: np.ndarray  # document indices of all rows, one row after the other
    row_starts: np.ndarray  # (rows + 1,): start of each row in row_documents

    def document(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a document's ids and labels."""
        part = slice(self.ends[number - 1] if number else 0, self.ends[number])
        return self.ids[part], self.labels[part]

    def row(self, number: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the documents of a row."""
        part = slice(self.row_starts[number], self.row_starts[number + 1])
        return [self.document(document) for document in self.row_documents[part]]
