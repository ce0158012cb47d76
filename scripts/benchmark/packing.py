"""Throughput of sequence packing and fill rate of the rows, compared with TRL's and torchtune's packers if installed.

python scripts/benchmark/packing.py                                    # a million documents with GSM8K-like lengths
python scripts/benchmark/packing.py --lengths gsm8k/train.jsonl        # characters / 4 of each line's values
pip install --no-deps --target /tmp/peers trl && python scripts/benchmark/packing.py --peers /tmp/peers
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from components.data.packing import plan_rows
from components.terminal import HelpText

Packer = Callable[[np.ndarray, int], int]
"""(length of each document, tokens per row) -> number of rows."""


def main() -> None:
    """Print a table of packers: number of rows, their fill rate, and packed tokens per second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpText)
    parser.add_argument("--lengths", type=Path, help="JSONL with a document per line, or .npy of lengths")
    parser.add_argument("--documents", type=int, default=1_000_000, help="number to sample; 0: those of the file")
    parser.add_argument("--seq-len", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--peers", type=Path, help="folder with trl and torchtune, if they are not installed")
    parser.add_argument("--peer-documents", type=int, default=20_000, help="fewer for peers, which are slower")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    if options.peers:
        sys.path.append(str(options.peers))
    lengths = documents(options.lengths, options.documents)
    few = lengths[: options.peer_documents or None]
    print(f"{len(lengths):,} documents of {lengths.mean():.0f} tokens, {lengths.min()} to {lengths.max()}")
    print(f"{'packer':20} {'seq_len':>7} {'documents':>9} {'rows':>7} {'filled %':>8} {'at best':>7} {'tokens/s':>14}")
    arms: list[tuple[str, Packer, np.ndarray]] = [("ours", our_rows, lengths), ("ours", our_rows, few)]
    arms += [(name, packer, few) for name, packer in peers()]
    for seq_len in options.seq_len:
        for name, packer, arm_lengths in arms:
            show(name, packer, np.minimum(arm_lengths, seq_len), seq_len, options.repeat)


def documents(file: Path | None, count: int) -> np.ndarray:
    """Return document lengths from a file, or log-normal ones with GSM8K's quantiles under SmolLM2's chat template."""
    generator = np.random.default_rng(0)
    if file is None:
        return generator.lognormal(5.32, 0.33, count or 7_473).clip(90, 600).astype(np.int64)
    if file.suffix == ".npy":
        lengths = np.load(file)
    else:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        lengths = np.array([max(2, sum(len(str(value)) for value in row.values()) // 4) for row in rows])
    return generator.choice(lengths, count) if count else lengths


def our_rows(lengths: np.ndarray, seq_len: int) -> int:
    """Return the number of rows of the plan that `data.pack=true` makes."""
    return len(plan_rows(lengths, seq_len).starts) - 1


def peers() -> list[tuple[str, Packer]]:
    """Return the packers of the peers that can be imported; print why the others are not measured."""
    found: list[tuple[str, Packer]] = []
    for package, make in (("trl", _trl), ("torchtune", _torchtune)):
        try:
            with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
                packer = make()
            found.append((f"{package} {importlib.metadata.version(package)}", packer))
        except ImportError as error:
            print(f"{package}: not measured, import failed: {str(error).strip().splitlines()[0]}")
    return found


def _trl() -> Packer:
    """Return TRL's packer: best fit decreasing, on Arrow tables that contain the tokens."""
    import datasets
    from trl.data_utils import pack_dataset

    datasets.disable_progress_bars()

    def rows(lengths: np.ndarray, seq_len: int) -> int:
        return len(pack_dataset(table(lengths), seq_len, "bfd"))

    made: dict[int, Any] = {}

    def table(lengths: np.ndarray) -> Any:
        if len(lengths) not in made:  # cached by the run that is not timed
            made[len(lengths)] = datasets.Dataset.from_dict({"input_ids": [[1] * n for n in lengths.tolist()]})
        return made[len(lengths)]

    return rows


def _torchtune() -> Packer:
    """Return torchtune's packer: greedy, in the order of the documents."""
    from torchtune.datasets import PackedDataset

    def rows(lengths: np.ndarray, seq_len: int) -> int:
        samples = [{"tokens": [1] * n, "labels": [1] * n} for n in lengths.tolist()]
        with contextlib.redirect_stderr(io.StringIO()):
            return len(PackedDataset(samples, max_seq_len=seq_len))

    return rows


def show(name: str, packer: Packer, lengths: np.ndarray, seq_len: int, repeat: int) -> None:
    """Print one line of the table: the median of `repeat` runs after a warm-up run."""
    packer(lengths, seq_len)
    seconds = []
    for _ in range(repeat):
        began = time.perf_counter()
        rows = packer(lengths, seq_len)
        seconds.append(time.perf_counter() - began)
    tokens = int(lengths.sum())
    filled, at_best = (100 * tokens / (count * seq_len) for count in (rows, -(-tokens // seq_len)))
    speed = tokens / statistics.median(seconds)
    print(f"{name:20} {seq_len:7,} {len(lengths):9,} {rows:7,} {filled:8.3f} {at_best:7.3f} {speed:14,.0f}")


if __name__ == "__main__":
    main()
