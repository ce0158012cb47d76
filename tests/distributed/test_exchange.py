"""Text from rank 0 before any process group exists, and the store of the user's own torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from components.distributed.process.process_group import (
    exchange_text_from_rank_zero,
    start_process_group,
)
from tests.distributed.contrast import srun
from tests.harness import run_ranks, start_ranks


def test_text_of_rank_zero_reaches_all_ranks_before_any_process_group() -> None:
    """Under the user's own torchrun or srun; start-up works afterwards, even if rank 0 exits at once."""

    def check(rank: int) -> tuple[str, str, float]:
        texts = [exchange_text_from_rank_zero(text if rank == 0 else None) for text in ("run:\n  seed: 1\n", "")]
        start_process_group()
        value = torch.ones(1)
        dist.all_reduce(value)
        return texts[0], texts[1], value.item()

    for env in (None, srun):
        assert run_ranks(2, check, init=False, env=env) == [("run:\n  seed: 1\n", "", 2.0)] * 2

    def leave(rank: int) -> str:
        text = exchange_text_from_rank_zero("" if rank == 0 else None)
        if rank == 0:
            os._exit(0)  # exits at once: the other ranks must still receive the text
        return text

    ended, *others = start_ranks(3, leave, init=False)
    assert ended.exit_code == 0
    assert [outcome.result for outcome in others] == ["", ""], "\n".join(map(str, others))


def test_start_up_under_torchrun_uses_the_agent_store(tmp_path: Path) -> None:
    """TORCHELASTIC_USE_AGENT_STORE works before and after start-up, and the ranks exit without errors."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import sys, torch, torch.distributed as dist\n"
        "from components.distributed.process.process_group import exchange_text_from_rank_zero, start_process_group\n"
        "from components.distributed.utils import FirstRankPerNode, get_num_nodes\n"
        "torch.set_num_threads(1)\n"
        "import os; rank = int(os.environ['RANK'])\n"
        "text = exchange_text_from_rank_zero('hello' if rank == 0 else None)\n"
        "info = start_process_group('cpu')\n"
        "value = torch.ones(1); dist.all_reduce(value)\n"
        "with FirstRankPerNode() as first: pass\n"
        f"open(f'{tmp_path}/{{rank}}', 'w').write(f'{{text}} {{value.item()}} {{first}} {{get_num_nodes()}}')\n"
    )
    repository = Path(__file__).parents[2]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
    ]
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment, check=False, cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "0").read_text() == "hello 2.0 True 1"
    assert (tmp_path / "1").read_text() == "hello 2.0 False 1"
