"""Host operations of one optimizer step for different world sizes, which should not affect them.

python scripts/benchmark/host_ops.py                          # 8 and 16,384 processes, on torch's fake backend
python scripts/benchmark/host_ops.py --worlds 8 512 --mesh dp_shard=-1,tp=8

A single process runs rank 0; collectives of the fake backend return immediately. After two warm-up steps, the operators
that torch dispatches (including collectives) and the executed lines of Python are counted, and the time to build the
mesh is reported. Pipelines are left out, because their stages exchange shapes, which the fake backend does not send.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections import Counter
from typing import Any

from components.terminal import HelpText

WORLDS = [8, 16384]
MESHES = [
    "dp_shard=-1",
    "dp_replicate=-1,dp_shard=2,tp=2",
    "dp_shard=-1,cp=2,tp=2,sequence_parallel=true",
    "dp_shard=-1,tp=4,defer_grad_sync=false",
]
PROBES = ("__eq__", "_check_equals")
"""Functions whose lines are not counted: the number of key comparisons in torch's caches depends on random hashes."""
MODEL = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def count_step(world: int, axes: dict[str, Any], loss: str) -> dict[str, Any]:
    """Return the counts of one step of rank 0 of `world` processes. Call it once per process."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode

    class Operators(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.counts: Counter[str] = Counter()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.counts[str(func)] += 1
            return func(*args, **(kwargs or {}))

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    step, seconds = _prepare(axes, loss)
    step(), step()
    gc.collect()
    gc.disable()
    with Operators() as operators:
        step()
    lines = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return None if frame.f_code.co_name in PROBES else trace

    sys.settrace(trace)
    step()
    sys.settrace(None)
    collectives = {name: number for name, number in operators.counts.items() if "c10d" in name}
    return {
        "operators": sum(operators.counts.values()),
        "collectives": sum(number for name, number in collectives.items() if "wait_tensor" not in name),
        "lines": lines,
        "mesh_seconds": round(seconds, 3),
        "by_operator": dict(sorted(operators.counts.items())),
    }


def _prepare(axes: dict[str, Any], loss: str) -> tuple[Any, float]:
    """Return a function that does one step, and the seconds it took to build the mesh."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from components import distributed, models, training
    from components.config.schema import AdamWConfig, FinetuneConfig, ModelConfig, ParallelismConfig
    from components.config.schema.data import DocsDataConfig
    from components.config.schema.model import LossMethod

    parallelism, cpu = ParallelismConfig(**axes), torch.device("cpu")
    model_config = ModelConfig(path="made here", loss=LossMethod(loss))
    cfg = FinetuneConfig(model=model_config, data=DocsDataConfig(), parallelism=parallelism)
    cfg.logging.peak_tflops = 1.0
    began = time.perf_counter()
    mesh = distributed.build_mesh(parallelism, "cpu")
    seconds = time.perf_counter() - began
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **MODEL))
    models.use_causal_sdpa(model)
    flops = training.step_flops(model, cfg.logging, mesh, cpu, torch.float32)
    layout = distributed.parallelize(model, mesh, parallelism, torch.float32)
    loss_head = training.attach_loss_head(model, cfg.model, cfg.training, cfg.parallelism, mesh, layout.stages, cpu)
    models.materialize(model, cpu)
    replica = distributed.wrap_replicas(model, mesh, parallelism, layout)
    optimizer = training.build_optimizer(model, AdamWConfig())
    settings = training.StepSettings(
        device=cpu, mesh=mesh, loss_head=loss_head, flops=flops, defer_grad_sync=parallelism.defers_grad_sync
    )
    from components.batch import Batch

    tokens = torch.randint(3, MODEL["vocab_size"], (2, 32), generator=torch.Generator().manual_seed(0))
    batches = [Batch.from_labels(tokens, tokens)] * 2
    return lambda: training.train_step(training.Prepared(model, settings, replica), batches, optimizer), seconds


def count_in_subprocess(world: int, mesh: str, loss: str = "chunked") -> dict[str, Any]:
    """Run `count_step` in a subprocess. mesh: As on the command line."""
    command = [sys.executable, "-m", "scripts.benchmark.host_ops", "--one", str(world), mesh, loss]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{mesh} with {world} processes failed: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def axes_of(mesh: str) -> dict[str, Any]:
    """Parse `dp_shard=-1,tp=2` into the keyword arguments of ParallelismConfig."""
    pairs = (part.split("=") for part in mesh.split(","))
    return {"dp_shard": 1, **{key: json.loads(value) for key, value in pairs}}


def main() -> int:
    """Print a table; return 1 if the counts of a mesh depend on the world size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpText)
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS)
    parser.add_argument("--mesh", nargs="+", default=MESHES)
    parser.add_argument("--loss", default="chunked")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        world, mesh, loss = args.one
        print(json.dumps(count_step(int(world), axes_of(mesh), loss)))
        return 0
    print("| mesh | processes | operators | collectives | Python lines | mesh s |\n|---|---|---|---|---|---|")
    equal = True
    for mesh in args.mesh:
        counts = []
        for world in args.worlds:
            each = count_in_subprocess(world, mesh, args.loss)
            counts.append((each["by_operator"], each["lines"]))
            cells = f"{each['operators']:,} | {each['collectives']:,} | {each['lines']:,} | {each['mesh_seconds']}"
            print(f"| {mesh} | {world:,} | {cells} |", flush=True)
        equal &= all(count == counts[0] for count in counts)
    print("equal" if equal else "NOT EQUAL")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
