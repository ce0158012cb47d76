"""Steps with non-finite gradients are skipped and counted, and too many in a row end the run.

The recipe is a copy of recipes/finetune.py with a forward hook: in the steps that a file lists, the last layer of one
rank returns NaN in one of two micro-batches.
"""

from __future__ import annotations

import json
import math
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.recipes.launching import TWO, Bench, Done
from tests.suites import TORTURE

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "finetune.py"
OPTIMIZER = "        optimizer = training.build_optimizer("
PLANTED = """
        from pathlib import Path

        forwards = []

        def poison(layer: object, inputs: object, output: object) -> object:
            if not model.module.training or not torch.is_grad_enabled():  # an evaluation or a kernel check
                return output
            done = run.state.step
            forwards.append(done)
            steps = json.loads((Path(__file__).parent / "poison").read_text())
            struck = done + 1 in steps and forwards.count(done) == 2
            return output * float("nan") if struck and run.rank == 1 else output

        import json
        import torch
        list(models.decoder_layers(model.module))[-1].register_forward_hook(poison)

"""
SHORT = (
    *("training.max_steps=12", "training.global_batch_size=8", "training.micro_batch_size=2", "training.seq_len=128"),
    *("data.max_samples=64", "data.max_eval_samples=4", "generation.samples=0", "cluster.device=cpu"),
    *("checkpoint.every=1", "checkpoint.keep=20", "checkpoint.export=false", "logging.plot=false"),
    *("training.eval_every=0", "training.stop_after_skipped=3", "training.seq_len=128", "run.dir=mine"),
)


def start(bench: Bench, mesh: str, *poisoned: int) -> Done:
    """Run a recipe whose forward returns NaN in these steps."""
    text = RECIPE.read_text()
    assert text.count(OPTIMIZER) == 1
    bench.recipe.write_text(text.replace(OPTIMIZER, PLANTED + OPTIMIZER))
    (bench.folder / "poison").write_text(json.dumps(poisoned))
    done = bench.start(f"parallelism={mesh}", TWO, *SHORT).wait()
    bench.assert_no_process_left()
    return done


def tensors(bench: Bench, step: int) -> dict[str, str]:
    """Return hashes of all weights, optimizer moments and step counters in a checkpoint of both ranks."""
    found = {}
    for file in sorted((bench.folder / "mine" / "checkpoints" / f"step_{step}").glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (it has keys, but is no mapping)
                found[f"{file.name} {name}"] = sha256(opened.get_tensor(name).numpy().tobytes()).hexdigest()
    assert found
    return found


def saved_state(bench: Bench, step: int) -> dict[str, Any]:
    return json.loads((bench.folder / "mine" / "checkpoints" / f"step_{step}" / "state.json").read_text())["extra"][
        "state"
    ]


def grad_norms(bench: Bench) -> dict[int, float]:
    lines = [json.loads(line) for line in (bench.folder / "mine" / "metrics.jsonl").read_text().splitlines()]
    return {
        line["step"]: float(line.get("nonfinite", line).get("grad_norm", line["grad_norm"]))
        for line in lines
        if "grad_norm" in line
    }


def assert_same_failure(bench: Bench, done: Done) -> tuple[str, str]:
    """Check that both ranks of a run failed with the same error, and return its type and message."""
    assert done.status == 1, done.errors
    result = json.loads((bench.folder / "mine" / "result.json").read_text())
    assert result["status"] == "failed"
    logs = bench.folder / "mine" / "logs" / "latest"
    first, second = (json.loads((logs / f"rank_{rank}.error.json").read_text()) for rank in (0, 1))
    assert (first["type"], first["message"]) == (second["type"], second["message"])
    assert first["message"] in done.errors
    assert first["message"] in result["error"]
    return first["type"], first["message"]


@pytest.mark.parametrize("mesh", ["fsdp2", *(["ddp", "pp2_1f1b"] if TORTURE else [])])
def test_non_finite_steps_are_skipped_and_too_many_in_a_row_end_the_run(mesh: str, bench: Bench) -> None:
    """A single one is skipped; of those from step 5 on the third ends the run on all ranks and is not saved."""
    kind, message = assert_same_failure(bench, start(bench, mesh, 3, *range(5, 13)))
    assert kind == "NonFiniteGradients"
    assert "the gradients of 3 steps in a row, up to step 7," in message
    assert "the weights are still those of step 4" in message
    assert "training.stop_after_skipped=3" in message
    saved = sorted(int(path.name.removeprefix("step_")) for path in (bench.folder / "mine" / "checkpoints").iterdir())
    assert saved == [1, 2, 3, 4, 5, 6]
    assert tensors(bench, 3) == tensors(bench, 2)
    assert tensors(bench, 4) != tensors(bench, 3)
    assert tensors(bench, 6) == tensors(bench, 5) == tensors(bench, 4)
    assert (saved_state(bench, 4)["skipped"], saved_state(bench, 4)["skipped_in_a_row"]) == (1, 0)
    assert (saved_state(bench, 6)["skipped"], saved_state(bench, 6)["skipped_in_a_row"]) == (3, 2)
    norms = grad_norms(bench)
    assert {step for step, norm in norms.items() if not math.isfinite(norm)} == {3, 5, 6, 7}
    if mesh != "fsdp2":
        return

    # The count is restored from the checkpoint: when the command is run again, the next skipped step is the third.
    kind, message = assert_same_failure(bench, start(bench, mesh, *range(5, 13)))
    assert "3 steps in a row, up to step 7," in message

    # Without NaN the run resumes and completes.
    done = start(bench, mesh)
    assert done.status == 0, done.errors
    result = json.loads((bench.folder / "mine" / "result.json").read_text())
    assert (result["status"], result["steps"], result["skipped_steps"]) == ("ok", 12, 3)
    assert saved_state(bench, 12)["skipped_in_a_row"] == 0
    assert tensors(bench, 7) != tensors(bench, 6)
