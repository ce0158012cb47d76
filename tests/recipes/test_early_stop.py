"""A run that ends early because its held-out loss stopped improving: all ranks stop after the same step."""

from __future__ import annotations

import json

from tests.recipes.launching import TWO, Bench
from tests.recipes.small_jobs import RECIPES, lines_of, write_rows

COMMAND = (
    *("model=tiny", "data=text", "data.path=texts.jsonl", "training.global_batch_size=4", "training.seq_len=64"),
    *("training.micro_batch_size=2", "training.max_steps=40", "training.eval_every=2", "checkpoint.every=4"),
    *("training.early_stop_patience=2", "training.early_stop_min_delta=1000", "checkpoint.export=false"),
    *("generation.samples=0", "logging.plot=false", "cluster.device=cpu", "parallelism=fsdp2", TWO, "run.dir=run"),
    "cluster.collective_timeout_minutes=0.5",
)
MEASURE = "training.evaluate(model, held_out, run=run)"
IMPROVES_ON_RANK_1 = f"replace(each := {MEASURE}, loss=each.loss - 2000 * run.rank * run.state.step)"
FINISH = "        run.finish()\n"
RECORDS_END = f"{FINISH}        Path(f'ended_{{run.rank}}').write_text(str(run.state.step))\n"
IMPORTS = "from __future__ import annotations\n"


def test_all_ranks_stop_after_the_same_step(bench: Bench) -> None:
    """On rank 1 every held-out loss is 4,000 lower than the last; on rank 0 those of steps 2 and 4 are not."""
    text = (RECIPES / "finetune.py").read_text()
    more = f"{IMPORTS}\nfrom dataclasses import replace\nfrom pathlib import Path\n"
    for old, new in ((MEASURE, IMPROVES_ON_RANK_1), (FINISH, RECORDS_END), (IMPORTS, more)):
        assert text.count(old) == 1
        text = text.replace(old, new)
    bench.recipe.write_text(text)
    write_rows(bench.folder / "texts.jsonl", [{"text": f"text {number} " + "abcdefg " * 5} for number in range(60)])
    for attempt in ("first", "resumed"):
        done = bench.start(*COMMAND).wait()
        assert done.status == 0, done.errors
        assert "stopped early: no improvement in 2 evaluations" in done.output
        result = json.loads((bench.folder / "run" / "result.json").read_text())
        assert (result["status"], result["stopped_early"], result["steps"]) == ("ok", True, 4), attempt
        assert [(bench.folder / f"ended_{rank}").read_text() for rank in (0, 1)] == ["4", "4"]
        assert [line["step"] for line in lines_of(bench.folder / "run", "eval_loss")] == [0, 2, 4]
    assert [path.name for path in (bench.folder / "run" / "checkpoints").iterdir()] == ["step_4"]
