"""Role of a process, detected from the variables that torchrun, srun, sbatch and salloc set."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.protocol.errors import ConfigError
from components.protocol.processes import (
    LocalRank,
    Role,
    current_job,
    current_rank,
    detect_role,
    rank_and_size,
    without_ranks,
)

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
