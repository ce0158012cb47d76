"""Background saves write the same files as synchronous ones, and a failure loses only the save in flight."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from components import distributed, models, training
from components.checkpoint import CheckpointError, Saver, save_checkpoint, verify
from components.checkpoint.manifest import Manifest
from components.checkpoint.saver import CopyBuffers
from components.config.schema import ParallelismConfig
from components.config.schema.run import CheckpointConfig
from components.protocol.processes import reserve_loopback_port
from tests.distributed import parity
from tests.distributed.test_checkpoint_crash import assert_resumes_from, below, is_killed_at, set_all, start
from tests.harness import run_ranks, start_ranks
from tests.suites import TORTURE

POLICY = CheckpointConfig(keep=9, async_save=True)
HSDP = {"strategy": "fsdp2", "dp_replicate": 2, "dp_shard": 2}
CASES = {
    2: [
        parity.Case("llama_tied", {"strategy": "fsdp2"}),
        parity.Case("llama_tied", {"strategy": "ddp", "dp_replicate": 2, "dp_shard": 1}),
        parity.Case("llama", {"strategy": "fsdp2", "dp_shard": 1, "tp": 2}),
        parity.Case("llama", {"strategy": "fsdp2", "dp_shard": 1, "pp": 2}, accumulation=2),
        parity.Case("mixtral", {"strategy": "fsdp2", "dp_shard": 1, "ep": 2}),
    ],
    4: [parity.Case("llama_tied", HSDP), parity.Case("llama", {"strategy": "fsdp2", "dp_shard": 2, "tp": 2})],
}


def build_on_mesh(case: parity.Case) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[int], None]]:
    """Return a model on the case's mesh, its AdamW, and a function that trains it for one step."""
    config = ParallelismConfig(**case.parallelism)
    mesh = distributed.build_mesh(config, "cpu")
    model = parity.build(case.model, torch.float32).train()
    models.use_causal_sdpa(model)
    layout = distributed.parallelize(model, mesh, config, torch.float32)
    called = distributed.wrap_replicas(model, mesh, config, layout)
    optimizer = training.build_optimizer(model, parity.OPTIMIZER)
    settings = training.StepSettings(device=torch.device("cpu"), mesh=mesh)

    def step(number: int) -> None:
        training.train_step(
            training.Prepared(model, settings, called), parity.micro_batches(case, mesh, number), optimizer
        )

    return model, optimizer, step


def contents(path: Path) -> dict[str, Any]:
    """State in each file of a checkpoint; of safetensors the data hash and the parsed header, whose order varies."""
    return {file.name: state_in(file) for file in path.iterdir() if file.name not in ("manifest.json", "config.yaml")}


def state_in(file: Path) -> Any:
    if file.suffix == ".json":
        values = json.loads(file.read_text())
        values.pop("config", None)
        return values
    written = file.read_bytes()
    start = 8 + int.from_bytes(written[:8], "little")
    header = json.loads(written[8:start])
    metadata = header["__metadata__"]
    metadata["DCP_SHARDING_INFO"] = json.loads(metadata["DCP_SHARDING_INFO"])  # torch's own, whose order varies too
    return header, hashlib.sha256(written[start:]).hexdigest()


def hold_background_writes(gate: threading.Event) -> None:
    """Simulate a slow disk: background threads cannot open a shard for writing until the gate is set."""

    def block(name: str, args: tuple[Any, ...]) -> None:
        if in_background(name, args):
            gate.wait(60)

    sys.addaudithook(block)


def in_background(name: str, args: tuple[Any, ...]) -> bool:
    if name != "open" or "r" in str(args[1]) or not str(args[0]).endswith(".safetensors"):
        return False
    return threading.current_thread() is not threading.main_thread()


def join(name: str) -> None:
    """Wait for the threads with this name."""
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join()


def saved_names(run_dir: Path) -> set[str]:
    return {path.name for path in (run_dir / "checkpoints").iterdir()}


@pytest.mark.parametrize("world", CASES)
def test_async_save_writes_the_same_files_as_a_synchronous_save(world: int, tmp_path: Path) -> None:
    """Bit for bit on every mesh, although training continues before anything is written."""

    def body(rank: int) -> None:
        gate = threading.Event()
        hold_background_writes(gate)
        for number, case in enumerate(CASES[world]):
            sync_dir, async_dir = tmp_path / f"{number}_now", tmp_path / f"{number}_later"
            model, optimizer, train = build_on_mesh(case)
            train(1)
            torch.rand(5)
            extra = {"data": {"index": 1}}
            save_checkpoint(sync_dir, 1, model, optimizer, extra, POLICY)
            gate.clear()
            saver = Saver(async_dir, model, optimizer, POLICY)
            saver.save(1, extra)
            extra["data"]["index"] = 2
            train(2)  # runs training collectives while those of the write are pending
            torch.rand(5)
            gate.set()
            path = saver.wait()
            assert path == async_dir / "checkpoints" / "step_1"
            train(3)
            if rank == 0:
                now, later = contents(sync_dir / "checkpoints" / "step_1"), contents(path)
                assert now == later, case
                assert len(now) > world, case
                assert Manifest.read(path).mesh == Manifest.read(sync_dir / "checkpoints" / "step_1").mesh
            assert verify(path) == []

    run_ranks(world, body, timeout=120)


def test_slow_write_does_not_block_training(tmp_path: Path) -> None:
    def body(rank: int) -> list[str]:
        gate, messages = threading.Event(), []
        hold_background_writes(gate)
        run = start(1.0)
        saver = Saver(tmp_path, *run, POLICY, messages.append)
        saver.save(1, {"step": 1})
        for step in range(2, 30):
            set_all(run, float(step))
            dist.all_reduce(torch.ones(3))
        assert not (tmp_path / "checkpoints" / "step_1").exists()
        assert messages[0].startswith("saving step 1 in the background")
        assert len(messages) == 1
        threading.Timer(0.5, gate.set).start()
        saver.save(29, {"step": 29})  # waits for the previous save, whose buffers it reuses
        assert_resumes_from(tmp_path, {1, 29})
        set_all(run, 30.0)
        saver.wait()
        assert saver.wait() is None
        assert_resumes_from(tmp_path, {29})
        return messages

    for messages in run_ranks(2, body):
        assert messages[1] == f"saved {tmp_path}/checkpoints/step_1"
        assert "of it for the previous checkpoint" in messages[2]
        assert messages[3] == f"saved {tmp_path}/checkpoints/step_29"


def test_copy_buffers_are_allocated_once(tmp_path: Path) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    def body(rank: int) -> None:
        wide = nn.Linear(2048, 2048)  # 16 MB
        optimizer = torch.optim.AdamW(wide.parameters())
        wide(torch.ones(1, 2048)).sum().backward()
        saver = Saver(tmp_path, wide, optimizer, CheckpointConfig(keep=1, every=1, async_save=True))
        assert not saver.buffers.copies
        optimizer.step()
        join("buffers for checkpoints")  # allocated in the background before the first save
        allocated = {name: buffer.data_ptr() for name, buffer in saver.buffers.copies.items()}
        optimizer.step()
        history = []
        for step in range(6):
            saver.save(step, {})
            saver.wait()
            addresses = {name: buffer.data_ptr() for name, buffer in saver.buffers.copies.items()}
            history.append((addresses, resident()))
        assert all(addresses == allocated for addresses, _ in history)
        assert len(allocated) == 8
        of_parameters = {tensor.data_ptr() for tensor in wide.state_dict().values()}
        assert not of_parameters & set(allocated.values())
        assert history[-1][1] - history[1][1] < 8e6, [memory for _, memory in history]

    run_ranks(2, body)


def test_copy_buffers_are_reallocated_when_tensors_change() -> None:
    buffers = CopyBuffers()
    first = buffers.fill({"a": torch.ones(4, 3).t(), "b": torch.ones(())})
    assert torch.equal(first["a"], torch.ones(3, 4))
    assert first["a"].is_contiguous()
    second = buffers.fill({"a": torch.full((3, 4), 2.0), "c": torch.ones(2, dtype=torch.bfloat16)})
    assert second["a"].data_ptr() == first["a"].data_ptr()
    assert torch.equal(second["a"], torch.full((3, 4), 2.0))
    assert set(buffers.copies) == {"a", "c"}
    assert buffers.fill({"a": torch.ones(5)})["a"].shape == (5,)


def test_rank_killed_during_a_background_write_loses_only_that_checkpoint(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        run = start(1.0)
        saver = Saver(tmp_path, *run, POLICY)
        saver.save(1, {"step": 1})
        saver.wait()
        if rank == 1:
            sys.addaudithook(lambda *event: os.kill(os.getpid(), signal.SIGKILL) if in_background(*event) else None)
        set_all(run, 2.0)
        saver.save(2, {"step": 2})
        with saver:
            while True:
                dist.all_reduce(torch.ones(3))
                time.sleep(0.01)

    outcomes = start_ranks(2, body, timeout=30)
    assert outcomes[1].signal == "SIGKILL"
    assert outcomes[0].exception is not None  # raised by the all-reduce of the training loop

    def resumed(rank: int) -> None:
        assert_resumes_from(tmp_path, {1})
        saver = Saver(tmp_path, *start(2.0), POLICY)
        saver.save(2, {"step": 2})
        saver.wait()
        assert saved_names(tmp_path) == {"step_1", "step_2"}

    run_ranks(2, resumed)


@pytest.mark.parametrize("event", range(0, 60, 4))
def test_process_killed_at_any_file_operation_keeps_a_complete_checkpoint(event: int, tmp_path: Path) -> None:
    def begin() -> Callable[[], None]:
        run = start(1.0)
        saver = Saver(tmp_path, *run, CheckpointConfig(keep=1, async_save=True))
        saver.save(1, {"step": 1})
        saver.wait()

        def save_twice() -> None:
            for step in (2, 3):
                set_all(run, float(step))
                saver.save(step, {"step": step})
            set_all(run, 4.0)
            saver.wait()

        return save_twice

    killed = is_killed_at(event, begin, below(tmp_path))
    assert_resumes_from(tmp_path, {1, 2, 3})
    assert killed or saved_names(tmp_path) == {"step_3"}


def test_failed_write_raises_on_every_rank(tmp_path: Path) -> None:
    """The next call that waits for the save raises the same message on every rank; the next save then succeeds."""

    def body(rank: int) -> list[str]:
        run, messages = start(1.0), []
        saver = Saver(tmp_path, *run, POLICY)
        for wait_for_save in (saver.wait, lambda: saver.save(2, {"step": 2}), lambda: saver.__exit__(None, None, None)):
            if rank == 1:  # only this rank's disk is full
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
            saver.save(1, {"step": 1})
            with pytest.raises(CheckpointError, match="step_1.tmp-.* could not be written") as caught:
                wait_for_save()
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            messages.append(str(caught.value))
            dist.barrier()
            assert saved_names(tmp_path) == set()
        saver.save(1, {"step": 1})
        saver.wait()
        assert_resumes_from(tmp_path, {1})
        return messages

    first, second = run_ranks(2, body)
    assert first == second
    assert all("File too large" in message for message in first)


def test_last_save_waits_for_the_previous_one_and_both_are_published(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        gate = threading.Event()
        hold_background_writes(gate)
        run = start(1.0)
        saver = Saver(tmp_path, *run, POLICY)
        saver.save(1, {"step": 1})
        set_all(run, 2.0)
        threading.Timer(0.3, gate.set).start()
        saver.save(2, {"step": 2}, last=True)
        found = assert_resumes_from(tmp_path, {2})  # already published when save returns
        serials = {path.name: Manifest.read(path).serial for path in found.parent.iterdir()}
        assert serials == {"step_1": 1, "step_2": 2}

    run_ranks(2, body)


def test_last_save_is_written_although_a_file_in_place_of_the_folder_failed_the_previous_one(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        run = start(1.0)
        saver = Saver(tmp_path, *run, POLICY)
        (tmp_path / "checkpoints").touch()
        dist.barrier()
        saver.save(1, {"step": 1})
        set_all(run, 2.0)
        join("checkpoint of step 1")
        (tmp_path / "checkpoints").unlink(missing_ok=True)
        dist.barrier()
        with pytest.raises(CheckpointError, match="step_1") as caught:
            saver.save(2, {"step": 2}, last=True)
        assert_resumes_from(tmp_path, {2})
        assert saver.wait() is None  # the failure was already raised
        return str(caught.value)

    first, second = run_ranks(2, body)
    assert first == second
    assert "rank 1: NotADirectoryError" in first or "rank 1: FileExistsError" in first


FAILING_RUN = """
import contextlib, sys, threading, time
import torch
import torch.distributed as dist
with contextlib.suppress(ImportError):
    # At exit torch's compiler imports it if it is installed. It evaluates strings, after which Python no longer knows
    # of an unhandled KeyboardInterrupt and exits with status 1.
    import tabulate
from components import distributed
from components.checkpoint import Saver
from components.config.schema.run import CheckpointConfig

def hang(name, args):
    if name == "open" and str(args[0]).endswith(".safetensors"):
        time.sleep(100)

distributed.start_process_group("cpu")
if dist.get_rank() == 1:
    sys.addaudithook(hang)
model = torch.nn.Linear(4, 4)
saver = Saver(sys.argv[1], model, torch.optim.AdamW(model.parameters()), CheckpointConfig(async_save=True))
with saver:
    saver.save(1, {})
    time.sleep(0.3)
    print(time.monotonic(), flush=True)
    raise {raised}
"""


@pytest.mark.parametrize(
    ("raised", "status", "max_seconds"),
    [("RuntimeError('of training')", 1, 40), *([("KeyboardInterrupt", -2, 30)] if TORTURE else [])],
)
def test_run_that_fails_does_not_wait_for_a_hanging_write(
    raised: str, status: int, max_seconds: float, tmp_path: Path
) -> None:
    """One rank's disk hangs, the other rank's background thread waits for it in a collective, and training fails."""
    script = tmp_path / "ends.py"
    script.write_text(FAILING_RUN.replace("{raised}", raised + "\n"))
    reserved = reserve_loopback_port()
    common = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(reserved.getsockname()[1]), "PYTHONPATH": str(Path(__file__).parents[2])}  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path)], env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        end_times = {}
        while len(end_times) < len(ranks):
            time.sleep(0.02)
            end_times |= {rank: time.monotonic() for rank in ranks if rank not in end_times and rank.poll() is not None}
    finally:
        for rank in ranks:
            rank.kill()
        reserved.close()
    for rank in ranks:
        output, errors = rank.communicate()
        assert rank.returncode == status, errors
        assert end_times[rank] - float(output) < max_seconds
        assert "the checkpoint of step 1 is lost" in errors
        assert raised.partition("(")[0] in errors.splitlines()[-1]
