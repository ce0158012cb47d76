"""Five research changes to a copied recipe, each of at most ten lines that use public names only."""

from __future__ import annotations

import pytest

from tests.recipes.launching import Bench
from tests.suites import TORTURE, select

SHORT = (
    *("training.max_steps=2", "training.global_batch_size=4", "training.micro_batch_size=2", "training.seq_len=64"),
    *("data.max_samples=32", "data.max_eval_samples=2", "generation.samples=0", "cluster.device=cpu"),
    *("checkpoint.export=false", "logging.plot=false", "run.dir=mine", "cluster=local_2proc"),
)
OPTIMIZER = "        optimizer = training.build_optimizer(model, cfg.optimizer)\n"
OBJECTIVE = "        objective = training.NextToken(cfg.objective)\n"
STEP = "            step.done("
CHANGES = {
    "objective": (
        OBJECTIVE,
        """
        from components.config.schema import NextTokenConfig
        objective = training.NextToken(NextTokenConfig(label_smoothing=0.1, z_loss=1e-4))
""",
    ),
    "frozen embeddings": (OPTIMIZER, f"        model.module.get_input_embeddings().requires_grad_(False)\n{OPTIMIZER}"),
    "metric": (
        STEP,
        f"            run.log(step, tokens_here=sum(batch.target_count for batch in step.batches))\n{STEP}",
    ),
    "sgd": (
        OPTIMIZER,
        """
        import torch
        optimizer = torch.optim.SGD(model.module.parameters(), lr=cfg.optimizer.lr, momentum=0.9)
""",
    ),
    "two optimizers": (
        OPTIMIZER,
        """
        import torch
        matrices = [p for p in model.module.parameters() if p.dim() >= 2]
        others = [p for p in model.module.parameters() if p.dim() < 2]
        optimizer = {
            "matrices": torch.optim.AdamW(matrices, lr=cfg.optimizer.lr),
            "others": torch.optim.SGD(others, lr=cfg.optimizer.lr),
        }
""",
    ),
}
"""Name -> (lines of the recipe, the lines instead)."""


@pytest.mark.parametrize("change", select(CHANGES, [*CHANGES][-2:], TORTURE))
def test_changed_recipe_trains_saves_and_resumes(change: str, bench: Bench) -> None:
    assert len(CHANGES[change][1].strip().splitlines()) <= 10
    bench.copy("finetune.py", CHANGES[change])
    mesh = "parallelism=pp2_1f1b" if change == "frozen embeddings" else "parallelism=fsdp2"
    bench.complete(*SHORT, mesh)
    bench.complete(*SHORT, mesh, "training.max_steps=3")
    steps = bench.lines(key="loss")
    assert [row["step"] for row in steps] == [1, 2, 3]
    if change == "metric":
        assert all(row["tokens_here"] > 0 for row in steps)
