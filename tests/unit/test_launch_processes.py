"""Processes of a run: number, role, default variables, out-of-memory failures, and ranks that the user starts."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from components.config.rules import legal_node_counts
from components.config.schema import (
    Device,
    FinetuneConfig,
    LocalClusterConfig,
    ModelConfig,
    ParallelismConfig,
    SlurmClusterConfig,
    WeightInit,
)
from components.config.schema.data import DocsDataConfig
from components.launch.backend import Recipe
from components.launch.local import allocator_defaults
from components.launch.machine import device_problems, processes_of, usable_cores, visible_gpus
from components.launch.rank import run_here
from components.launch.run_checks import problems_before_start
from components.launch.run_directory import RunDirectory
from components.protocol.errors import EXIT_INVALID, ConfigError
from components.protocol.failures import Kind, failure_status, is_out_of_memory
from components.protocol.processes import (
    LocalRank,
    Role,
    current_job,
    current_rank,
    detect_role,
    killed_for_memory,
    rank_and_size,
    usable_memory,
    without_ranks,
)
from components.protocol.run_files import attempt_logs
from tests.config.composed import config_of


def config(procs: str = "auto", device: Device = Device.auto, **degrees: int) -> FinetuneConfig:
    return FinetuneConfig(
        cluster=LocalClusterConfig(procs_per_node=procs, device=device),
        parallelism=ParallelismConfig(**degrees),
        model=ModelConfig(init=WeightInit.random, config={"model_type": "llama"}, tokenizer="bytes"),
        data=DocsDataConfig(),
    )


def job(nodes: str, procs: str) -> FinetuneConfig:
    cfg = config()
    cfg.cluster = SlurmClusterConfig(nodes=nodes, procs_per_node=procs)
    return cfg


@pytest.mark.parametrize(
    ("cfg", "gpus", "processes"),
    [
        pytest.param(config(), 0, 1, id="no GPU: -1 counts as 1"),
        pytest.param(config(tp=2), 0, 2, id="product of the explicit degrees"),
        pytest.param(config(dp_replicate=2, dp_shard=3, tp=2), 0, 12, id="product over all axes"),
        pytest.param(config(), 8, 8, id="one per GPU"),
        pytest.param(config(tp=2), 8, 8, id="GPUs decide, not the degrees"),
        pytest.param(config(device=Device.cpu, tp=2), 8, 2, id="unused GPUs"),
        pytest.param(config("3", tp=2), 8, 3, id="explicit count"),
        pytest.param(job(nodes="3", procs="8"), 2, 24, id="GPUs of the login node do not count"),
        pytest.param(job(nodes="4-6", procs="8"), 0, 48, id="the largest number of nodes"),
    ],
)
def test_process_count_follows_gpus_degrees_and_explicit_counts(cfg: FinetuneConfig, gpus: int, processes: int) -> None:
    assert processes_of(cfg, gpus) == processes


@pytest.mark.parametrize(
    ("value", "gpus"),
    [
        *(("0", 1), ("0,1,2", 3), ("", 0), ("-1", 0), ("0,-1,1", 1), ("NoDevFiles", 0), (" 3, 5", 2), ("0,1,x,3", 2)),
        *(("0,1,0", 0), ("GPU-1a,GPU-2b", 2), ("GPU-1a,GPU-1a", 0), ("GPU-1a,2", 1), ("0,GPU-1a", 1), ("MIG-x", 1)),
        *(("MIG-GPU-1a/1/0,MIG-GPU-1a/2/0", 2), ("MIG-x,GPU-1a", 1), ("gpu0", 0), ("(null)", 0), ("0,", 1)),
    ],
)
def test_cuda_visible_devices_sets_the_gpu_count(
    tmp_path: Path, value: str, gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch reads the variable, which does as CUDA does."""
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": value}, tmp_path) == gpus
    if value.strip() == value:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert len(torch.cuda._parse_visible_devices()) == gpus


def test_ranks_on_several_mig_devices_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    assert device_problems(config("1"), 1, gpus=2) == []
    (problem,) = device_problems(config("2"), 2, gpus=2)
    assert problem.startswith("CUDA_VISIBLE_DEVICES=MIG-a,MIG-b: 2 processes on MIG devices")


def test_gpus_are_counted_by_device_files_without_cuda_visible_devices(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    assert visible_gpus({}, tmp_path) == 0
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert visible_gpus({}, tmp_path) == 2


def test_gpus_are_counted_by_the_driver_list_without_device_files(tmp_path: Path) -> None:
    for bus in ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0"):
        (tmp_path / "proc/driver/nvidia/gpus" / bus).mkdir(parents=True)
    assert visible_gpus({}, tmp_path) == 3


def test_each_process_requires_its_own_gpu() -> None:
    assert device_problems(config("2"), 2, gpus=2) == []
    assert device_problems(config("2"), 2, gpus=0) == []
    assert device_problems(config("2", Device.cpu), 2, gpus=1) == []
    assert "2 processes, but 1 visible GPUs" in device_problems(config("2"), 2, gpus=1)[0]
    assert "no GPU is visible" in device_problems(config(device=Device.cuda), 1, gpus=0)[0]


def test_cpu_processes_are_limited_to_four_per_core_and_by_memory() -> None:
    cores = usable_cores()
    assert device_problems(config(str(4 * cores)), 4 * cores, gpus=0, memory=2**50) == []
    (many,) = device_problems(config("99"), 4 * cores + 1, gpus=0, memory=2**50)
    assert many.startswith(
        f"cluster.procs_per_node=99: {4 * cores + 1} processes on this machine; the limit is 4 per core"
    )
    assert many.endswith("set cluster.oversubscribe=true")
    (degree,) = device_problems(config(tp=2, cp=9999), 19998, gpus=0)
    assert degree.startswith("parallelism.cp=9999: 19998 processes on this machine")
    assert device_problems(config("2"), 2, gpus=0, memory=2**29) == []
    (large,) = device_problems(config("3"), 3, gpus=0, memory=2**29)
    assert "they need 0.8 GiB before loading a model, but only 0.5 GiB are usable" in large
    for few_gpus in (0, 8):
        cfg = config("9999", Device.cpu)
        assert len(device_problems(cfg, 9999, gpus=few_gpus, memory=2**50)) == 1
        cfg.cluster.oversubscribe = True
        assert device_problems(cfg, 9999, gpus=few_gpus, memory=2**20) == []
    shared = config("2")
    shared.cluster.oversubscribe = True
    assert "2 processes, but 1 visible GPUs" in device_problems(shared, 2, gpus=1)[0]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, "expandable_segments:False"),
    ],
)
def test_allocator_grows_segments_unless_the_user_decides(environ: dict[str, str], expected: str) -> None:
    assert allocator_defaults(environ) == {"PYTORCH_ALLOC_CONF": expected}


def test_node_counts_are_those_of_the_config_that_the_ranks_read() -> None:
    """On five nodes a micro-batch of 5 is reduced to 3, of which one node has no legal number."""
    cfg = config_of(
        *("finetune", "model=llama_2m", "parallelism.pp=2", "parallelism.pp_schedule=Interleaved1F1B"),
        *("cluster=slurm", "cluster.nodes=1-5", "cluster.procs_per_node=2", "cluster.device=cpu"),
        *("training.global_batch_size=15", "training.micro_batch_size=5"),
    )
    requested, _ = legal_node_counts(cfg, [])
    counts: list[int] = []
    (problem,) = problems_before_start(cfg, 10, node_counts=counts)
    assert (requested, counts) == ([1, 3, 5], [5])
    assert problem.startswith("cluster.nodes=1-5: on 1 nodes: training.global_batch_size=15: leaves 15 micro-batches")


ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:129] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4398046511104 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    ("error_type", "message"),
    [
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB"),
        ("MemoryError", ""),
        ("_ArrayMemoryError", "Unable to allocate 8.00 TiB"),
        ("RuntimeError", ALLOCATOR),
        ("RuntimeError", "CUDA error: out of memory"),
        ("OSError", "[Errno 12] Cannot allocate memory"),
        ("RuntimeError", "std::bad_alloc"),
    ],
)
def test_out_of_memory_errors_are_recognized(error_type: str, message: str) -> None:
    assert is_out_of_memory(error_type, message)
    assert failure_status(Kind.exception, error_type, message) == "oom"


@pytest.mark.parametrize(
    ("error_type", "message"),
    [
        ("RuntimeError", "shape '[2, 3]' is invalid for input of size 5"),
        ("ValueError", "this text is about programs that ran out of memory"),
        ("PeerFailure", "rank 1 was ended by SIGKILL (out of memory, or killed by a person)"),
        ("OSError", "[Errno 2] No such file or directory"),
    ],
)
def test_other_errors_are_not_out_of_memory(error_type: str, message: str) -> None:
    assert failure_status(Kind.exception, error_type, message) == "failed"


def write_files(root: Path, **files: str) -> Path:
    for name, text in files.items():
        file = root / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.mark.parametrize(
    ("lines", "counter"),
    [
        ("0::/user/job_7\n", "sys/fs/cgroup/user/job_7/memory.events"),
        ("0::/hidden/by/the/container\n", "sys/fs/cgroup/memory.events"),
        ("5:cpu:/\n4:hugetlb,memory:/slurm/job_7\n0::/\n", "sys/fs/cgroup/memory/slurm/job_7/memory.oom_control"),
        ("4:memory:/hidden\n", "sys/fs/cgroup/memory/memory.oom_control"),
    ],
)
def test_out_of_memory_kills_are_read_from_the_cgroup_of_the_process(tmp_path: Path, lines: str, counter: str) -> None:
    write_files(tmp_path, proc__self__cgroup=lines, proc__vmstat="oom_kill 99\n")
    assert killed_for_memory(tmp_path) == 99  # the cgroup has no counter yet
    (tmp_path / counter).parent.mkdir(parents=True)
    (tmp_path / counter).write_text("max 12\noom 4\noom_kill 3\n")
    assert killed_for_memory(tmp_path) == 3


def test_out_of_memory_kills_are_zero_without_any_counter(tmp_path: Path) -> None:
    assert killed_for_memory(tmp_path) == 0


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc__self__cgroup": "0::/job\n", "sys__fs__cgroup__job__memory.max": "1073741824\n"}, 2**30),
        ({"proc__self__cgroup": "0::/job\n", "sys__fs__cgroup__job__memory.max": "max\n"}, None),
        ({"proc__self__cgroup": "4:memory:/j\n", "sys__fs__cgroup__memory__j__memory.limit_in_bytes": "4096"}, 4096),
        ({"proc__self__cgroup": "4:memory:/j\n", "sys__fs__cgroup__memory__memory.limit_in_bytes": str(2**63)}, None),
        (  # Slurm limits the job and the step, which are parents of the task
            {
                "proc__self__cgroup": "0::/job_7/step_0/user/task_0\n",
                "sys__fs__cgroup__job_7__memory.max": "4096\n",
                "sys__fs__cgroup__job_7__step_0__memory.max": "8192\n",
                "sys__fs__cgroup__job_7__step_0__user__task_0__memory.max": "max\n",
            },
            4096,
        ),
        ({"proc__self__cgroup": "4:memory:/j/s\n", "sys__fs__cgroup__memory__j__memory.limit_in_bytes": "4096"}, 4096),
    ],
)
def test_usable_memory_is_limited_by_the_cgroup(tmp_path: Path, files: dict[str, str], expected: int | None) -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert usable_memory(write_files(tmp_path, **files)) == (expected or total)


RANKS, ROUNDS = 4, 25
CONFIG = FinetuneConfig(model=ModelConfig(path="model"), data=DocsDataConfig())


def reject_config(cfg: FinetuneConfig) -> None:
    raise ConfigError("parallelism.tp: no plan")


def run_rank(rank: int, folder: Path, barrier: Any) -> None:
    os.environ["RANK"] = str(rank + 1)  # ranks start at 1, because rank 0 would take the lease
    sys.stderr = (folder / f"stderr_{rank}").open("w", buffering=1)
    recipe = Recipe("finetune", reject_config, FinetuneConfig, Path(__file__))
    for number in range(ROUNDS):
        run = folder / f"run_{number}"
        directory = RunDirectory(run, fresh=True, created=[run], lock=None, attempt=0)
        barrier.wait(20)
        assert run_here(recipe, CONFIG, directory) == EXIT_INVALID


def test_config_rejected_on_all_ranks_is_reported_once_and_leaves_no_directory(tmp_path: Path) -> None:
    for number in range(ROUNDS):
        attempt_logs(tmp_path / f"run_{number}", 0).mkdir(parents=True)
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(RANKS)
    ranks = [context.Process(target=run_rank, args=(rank, tmp_path, barrier)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0] * RANKS
    printed = "".join((tmp_path / f"stderr_{rank}").read_text() for rank in range(RANKS))
    assert printed.count("parallelism.tp: no plan\n") == ROUNDS
    assert not list(tmp_path.glob("run_*"))


def lose_a_peer(cfg: FinetuneConfig) -> None:
    raise RuntimeError("Connection closed by peer [127.0.0.1]:4837")


@pytest.mark.parametrize("fresh", [True, False])
def test_ranks_that_lose_a_rejected_peer_exit_without_a_traceback(
    fresh: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only one pipeline stage rejects the config; the stage that waits for its hidden states is not the cause."""
    run = tmp_path / "run"
    attempt_logs(run, 0).mkdir(parents=True)
    for rank, main in ((1, reject_config), (2, lose_a_peer)):
        monkeypatch.setenv("RANK", str(rank))
        directory = RunDirectory(run, fresh=fresh, created=[run], lock=None, attempt=0)
        recipe = Recipe("finetune", main, FinetuneConfig, Path(__file__))
        assert run_here(recipe, CONFIG, directory) == EXIT_INVALID
    assert run.exists() != fresh
    printed = capsys.readouterr().err
    assert "parallelism.tp: no plan" in printed
    assert "rank 2: another rank rejected the config" in printed


def test_lost_peer_without_a_rejected_config_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    attempt_logs(run, 0).mkdir(parents=True)
    monkeypatch.setenv("RANK", "2")
    recipe = Recipe("finetune", lose_a_peer, FinetuneConfig, Path(__file__))
    with pytest.raises(RuntimeError, match="Connection closed"):
        run_here(recipe, CONFIG, RunDirectory(run, fresh=True, created=[run], lock=None, attempt=0))
    assert "Connection closed" in (run / "result.json").read_text()


def run_out_of_memory(cfg: FinetuneConfig) -> None:
    raise RuntimeError("can't allocate memory: you tried to allocate 8 bytes")


def test_other_failure_besides_a_rejected_config_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the run directory is gone: only a lost peer can be a consequence of a rejected config."""
    monkeypatch.setenv("RANK", "2")
    directory = RunDirectory(tmp_path / "run", fresh=True, created=[], lock=None, attempt=0)
    with pytest.raises(RuntimeError, match="allocate"):
        run_here(Recipe("finetune", run_out_of_memory, FinetuneConfig, Path(__file__)), CONFIG, directory)


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x"}
SRUN = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
ONE_TASK = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
BATCH_SHELL = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
OURS = {"MESHBOOK_WORKER": "1", "MESHBOOK_RUN_DIR": "/run"}


@pytest.mark.parametrize(
    ("environ", "role"),
    [
        pytest.param({}, Role.launcher, id="login node"),
        pytest.param({"SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"}, Role.launcher, id="salloc shell"),
        pytest.param(BATCH_SHELL, Role.launcher, id="sbatch batch shell"),
        pytest.param({**SRUN, **ONE_TASK, "SLURM_STEP_ID": "1"}, Role.launcher, id="srun -n1, srun --pty bash"),
        pytest.param(SRUN, Role.attached, id="srun -n4"),
        pytest.param({**SRUN, "SLURM_PROCID": "0"}, Role.attached, id="srun -n4, rank 0"),
        pytest.param({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"}, Role.attached, id="step size from SLURM_NTASKS"),
        pytest.param({"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, Role.attached, id="task other than 0"),
        pytest.param(TORCHRUN, Role.attached, id="torchrun"),
        pytest.param({**SRUN, **TORCHRUN}, Role.attached, id="srun torchrun"),
        pytest.param({"RANK": "0", "WORLD_SIZE": "1"}, Role.attached, id="torchrun with one rank"),
        pytest.param({**TORCHRUN, **OURS}, Role.worker, id="our worker"),
        pytest.param({**SRUN, **TORCHRUN, **OURS}, Role.worker, id="our worker within srun"),
        pytest.param({**SRUN, **OURS}, Role.worker, id="our srun"),
        pytest.param({**SRUN, **OURS, **ONE_TASK, "SLURM_NTASKS": "1"}, Role.worker, id="our srun with one task"),
        pytest.param({**OURS, **BATCH_SHELL, "SLURM_JOB_ID": "7"}, Role.launcher, id="our batch shell"),
        pytest.param(OURS, Role.launcher, id="our variables without a rank"),
        pytest.param({"RANK": "0"}, Role.launcher, id="stale RANK alone"),
        pytest.param({"RANK": "", "WORLD_SIZE": ""}, Role.launcher, id="set but empty"),
        pytest.param({"LOCAL_RANK": "0", "MASTER_ADDR": "a"}, Role.launcher, id="stale LOCAL_RANK and MASTER_ADDR"),
        pytest.param({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "x"}, Role.launcher, id="invalid task count"),
    ],
)
def test_role_is_detected_from_the_environment(environ: dict[str, str], role: Role) -> None:
    assert detect_role(environ) is role


def test_torchrun_rank_takes_precedence_over_the_slurm_rank() -> None:
    assert rank_and_size(TORCHRUN) == (1, 2)
    assert rank_and_size(SRUN) == (3, 4)
    assert rank_and_size({**SRUN, **TORCHRUN}) == (1, 2)
    assert rank_and_size({"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}) == (3, 4)
    assert rank_and_size({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}) == (0, 1)


def test_rank_that_is_not_an_integer_is_rejected() -> None:
    with pytest.raises(ConfigError, match="RANK='one': must be a whole number"):
        rank_and_size({"RANK": "one", "WORLD_SIZE": "2"})
    with pytest.raises(ConfigError, match="SLURM_NTASKS='': must be a whole number"):
        rank_and_size({"SLURM_PROCID": "0"})


@pytest.mark.parametrize("text", ["\u00b2", "\u0663", "1_0", " 1", "9" * 5000, "-1"])
def test_text_that_is_no_count_is_rejected_or_ignored(text: str) -> None:
    """`str.isdigit` accepts the first, which `int` does not; `int` accepts the next three."""
    assert detect_role({"SLURM_PROCID": text, "SLURM_NTASKS": text}) == Role.launcher
    assert detect_role({**SRUN, "SLURM_STEP_NUM_TASKS": text}) == Role.launcher
    assert current_rank({"SLURM_PROCID": text}) == 0
    assert current_job({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": text}).restart == 0
    with pytest.raises(ConfigError, match="^SLURM_PROCID=.*must be a whole number"):
        rank_and_size({**SRUN, "SLURM_PROCID": text})


def test_without_ranks_removes_every_rank_variable() -> None:
    kept = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0", "SLURM_JOB_ID": "7", "NCCL_DEBUG": "INFO", "RANKING": "1"}
    others = {"MASTER_PORT": "1", "GROUP_RANK": "0", "OMPI_COMM_WORLD_RANK": "0"}
    assert without_ranks({**kept, **TORCHRUN, **SRUN, **OURS, **others}) == kept


def test_only_rank_zero_gets_the_store_socket() -> None:
    common = {"world_size": 2, "port": 5, "run_dir": Path("/run"), "attempt": 3}
    zero = LocalRank(0, store_fd=7, **common).variables()
    one = LocalRank(1, store_fd=None, **common).variables()
    assert zero == {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "5", "MESHBOOK_RUN_DIR": "/run", "MESHBOOK_ATTEMPT": "3", "MESHBOOK_STORE_FD": "7",
    }  # fmt: skip
    assert "MESHBOOK_STORE_FD" not in one
    assert detect_role({**zero, "MESHBOOK_WORKER": "1"}) is Role.worker
