"""run.deterministic in a real run of two ranks: set on each rank, and errors that name the key."""

from __future__ import annotations

import json

from tests.recipes.launching import TWO, Bench
from tests.recipes.test_run import SHORT, STEP, change_recipe

RECORD = """            import json, os, pathlib, torch
            rank, names = os.environ["RANK"], ("CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_DETERMINISTIC")
            flags = [torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory]
            flags += [torch.backends.cudnn.deterministic, *(os.environ[name] for name in names)]
            pathlib.Path(__file__).with_name(f"flags_{rank}").write_text(json.dumps(flags))
"""
OPERATOR = "            if step.number == 2:\n                torch.ones(2).put_(torch.tensor([0]), torch.ones(1))\n"


def test_ranks_are_deterministic_and_an_operator_that_is_not_ends_the_run(bench: Bench) -> None:
    change_recipe(bench, STEP, RECORD + STEP + OPERATOR)
    done = bench.start(*SHORT, TWO, "parallelism=fsdp2", "training.eval_every=0", "run.deterministic=true").wait()
    assert done.status == 1
    assert [json.loads(each) for each in bench.notes("flags")] == [[True, False, True, ":4096:8", "1"]] * 2
    assert "deterministic torch selects deterministic kernels" in " ".join(done.output.split())
    assert "run.deterministic=true: put_ has no deterministic kernel; set run.deterministic=false" in done.errors
