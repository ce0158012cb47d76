"""Training stall and memory of a checkpoint save, asynchronous and synchronous, and time of a comparison of replicas.

python scripts/benchmark/save.py                                          # parameters and AdamW of SmolLM2-135M: 1.6 GB
torchrun --nproc-per-node 2 scripts/benchmark/save.py                     # sharded over two processes
python scripts/benchmark/save.py --layers 4 --repeats 15 --folder /mnt/x  # smaller, more often, on another disk
torchrun --nproc-per-node 2 scripts/benchmark/save.py --replicas 1024     # compare replicas, and train on 1,024 tokens

Each asynchronous save is paired with one plain copy of as many bytes between buffers that were touched before, both by
one thread. Times are those of the slowest rank, and medians over the repeats. Processor time is that of the training
thread, for machines that other processes use too. Memory is that of rank 0, above its memory before the first save.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from components import distributed
from components.checkpoint import ReplicaCheck, Saver
from components.config.schema.parallelism import ParallelismConfig, Strategy
from components.config.schema.run import CheckpointConfig
from components.json_collectives import all_gather_json, broadcast_json
from components.terminal import HelpText
from scripts.benchmark.peers.meter import peak, reset_peak


def main() -> None:
    """Print a line per measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpText)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--replicas", type=int, default=0, metavar="TOKENS", help="measure checkpoint.check_replicas")
    parser.add_argument("--folder", default=None, help="parent of the folder to write to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # equal replicas
    info = distributed.start_process_group("cpu")
    model, optimizer = trained(options.layers, 1 if options.replicas else info.world_size)
    if options.replicas:
        figures = measure_comparison(model, optimizer, options.repeats, options.replicas)
        if info.is_main:
            print("\n".join(f"{name:48} {value}" for name, value in figures.items()))
        return
    folder = Path(broadcast_json(tempfile.mkdtemp(prefix="benchmark_save-", dir=options.folder)))
    try:
        figures = measure(folder, model, optimizer, options.repeats)
    finally:
        distributed.barrier()
        if info.is_main:
            shutil.rmtree(folder)
    if info.is_main:
        print("\n".join(f"{name:48} {value}" for name, value in figures.items()))


def trained(layers: int, world_size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model with random weights in the shapes of SmolLM2-135M, and its AdamW after one step."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if world_size > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=world_size == 1)
    step_once(optimizer)
    return model, optimizer


def step_once(optimizer: torch.optim.Optimizer) -> None:
    """Do an optimizer step with a constant gradient."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad()


def measure(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, repeats: int) -> dict[str, str]:
    """Return the measurements as text, by name. A collective."""
    policy = CheckpointConfig(keep=1, every=1, async_save=True)
    held = reset_peak()
    saver = Saver(folder, model, optimizer, policy, report=lambda _: None)
    waited = [timed(lambda: saver.save(0, {}, last=True)).wall for _ in range(3)]
    sync_peak = peak() - held

    step_once(optimizer)  # after it, the saver's step hook allocates the host buffers in the background
    time.sleep(3)
    reset_peak()
    first = timed(lambda: saver.save(1, {}))
    saver.wait()
    async_peak = peak() - held
    copies = [copy.to_local() if isinstance(copy, DTensor) else copy for copy in saver.buffers.copies.values()]
    size = sum(copy.numel() * copy.element_size() for copy in copies)
    source, target = (torch.ones(size, dtype=torch.uint8) for _ in range(2))
    plain_copies, stalls, writes = [], [], []
    for step in range(2, 2 + repeats):
        plain_copies.append(timed(lambda: target.copy_(source)))
        stalls.append(timed(lambda: saver.save(step, {})))  # noqa: B023
        writes.append(timed(saver.wait).wall)
    copy = statistics.median(each.wall for each in plain_copies)
    stall = statistics.median(each.wall for each in stalls)
    ratios = [ours.wall / plain.wall for ours, plain in zip(stalls, plain_copies, strict=True)]
    processor_ratios = [ours.processor / plain.processor for ours, plain in zip(stalls, plain_copies, strict=True)]
    return {
        "state of a rank": f"{size / 1e9:.2f} GB",
        "copy of the state": f"{copy:.3f} s ({size / copy / 1e9:.1f} GB/s)",
        "stall of an asynchronous save": f"{stall:.3f} s = {spread(ratios)} x the copy; "
        f"{spread(processor_ratios)} x in processor time; {repeats} pairs",
        "stall of the first asynchronous save": f"{first.wall:.3f} s, {first.processor:.3f} s of processor time",
        "background write after the stall": f"{statistics.median(writes):.2f} s",
        "synchronous save": f"{statistics.median(waited):.2f} s",
        "peak memory of a save": f"{async_peak / 1e9:.2f} GB asynchronous, {sync_peak / 1e9:.2f} GB synchronous",
    }


def measure_comparison(model: nn.Module, optimizer: torch.optim.Optimizer, repeats: int, tokens: int) -> dict[str, str]:
    """Return the time of a comparison of complete replicas, and its ratio to an optimizer step. A collective.

    Args:
        tokens: Tokens of a step on each rank, in sequences of 256; its gradients are not reduced.
    """
    degrees = ParallelismConfig(strategy=Strategy.ddp, dp_replicate=-1, dp_shard=1)
    check = ReplicaCheck(distributed.build_mesh(degrees, "cpu"), model, optimizer, every=100)
    ids = torch.arange(tokens).view(-1, 256) % 49152

    def train() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    check.compare(0)  # allocates memory
    compared = [timed(lambda: check.compare(0)) for _ in range(repeats)]
    steps = [timed(train) for _ in range(2)]
    comparison, step = (statistics.median(each.processor for each in times) for times in (compared, steps))
    return {
        "comparison of 12 bytes per parameter": f"{comparison:.3f} s of processor time, "
        f"{statistics.median(each.wall for each in compared):.3f} s; median of {repeats}",
        f"step of {tokens:,} tokens": f"{step:.2f} s of processor time, without a reduction of the gradients",
        "overhead if compared every 100 steps": f"{comparison / step:.4f} % of a step",
    }


def spread(values: list[float]) -> str:
    """Format the median, with minimum and maximum."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


@dataclass(frozen=True, slots=True)
class Seconds:
    """Wall time and processor time of the slowest rank, in seconds."""

    wall: float
    processor: float


def timed(do: Callable[[], object]) -> Seconds:
    """Call `do` on all ranks after a barrier, and return its time on the slowest rank."""
    distributed.barrier()
    wall, processor = time.perf_counter(), time.thread_time()
    do()
    taken = all_gather_json((time.perf_counter() - wall, time.thread_time() - processor))
    return Seconds(*map(max, zip(*taken, strict=True)))


if __name__ == "__main__":
    main()
