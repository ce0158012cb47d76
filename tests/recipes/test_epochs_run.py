"""A run of training.epochs=2, stopped and resumed on another mesh: every row is used exactly twice."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from tests.recipes.launching import TWO, Bench

RECIPE = (Path(__file__).resolve().parents[2] / "recipes" / "finetune.py").read_text()
LOOP = "        for step in run.steps():"
ROWS = 10
COMMAND = (
    *("model=tiny", "data=jsonl", "data.path=train.jsonl", "data.eval_path=eval.jsonl", "training.epochs=2"),
    *("training.global_batch_size=4", "training.micro_batch_size=1", "training.seq_len=64", "training.eval_every=0"),
    "training.batch_size_ramp=[{until_step:2,global_batch_size:2}]",  # 2 x 2 rows, then 4 x 4: 6 steps
    *("generation.samples=0", "checkpoint.every=3", "checkpoint.export=false", "logging.plot=false"),
    *("run.dir=run", "cluster.device=cpu", "optimizer.warmup_steps=0"),
)


def recording(exits: bool) -> str:
    """Return the recipe, which appends the rows of each step to a file, and is killed after the save if `exits`."""
    lines = [
        "            for batch in step.batches:",
        "                for row in batch.input_ids.tolist():",
        "                    with open(f'rows_{run.mesh.rank(\"dp\")}', 'a') as file:",
        "                        print([each for each in row if each < 256], file=file)",
    ]
    head, loop, tail = RECIPE.partition(LOOP)
    line, _, rest = tail.partition("\n")
    text = "\n".join([head + loop + line, *lines, rest])
    save = "                run.save(step)\n"
    return text.replace(save, f"{save}                raise SystemExit(9)\n") if exits else text


def test_every_row_is_used_twice_also_by_a_resumed_run(bench: Bench) -> None:
    for name, count in (("train", ROWS), ("eval", 2)):
        rows = [{"prompt": f"{name} {number}?", "response": "x" * (1 + number)} for number in range(count)]
        (bench.folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    bench.recipe.write_text(recording(exits=True))
    first = bench.start(*COMMAND, "parallelism=single").wait()
    assert first.status == 9, first.errors
    assert "epochs=2: 6 steps" in " ".join(first.output.split())
    bench.recipe.write_text(recording(exits=False))
    again = bench.start(*COMMAND, "parallelism=fsdp2", TWO).wait()
    assert again.status == 0, again.errors
    assert "epochs=2: 6 steps" in " ".join(again.output.split())
    lines = [json.loads(line) for line in (bench.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "grad_norm" in line] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["step"] == 6
    used = Counter(row for rank in (0, 1) for row in (bench.folder / f"rows_{rank}").read_text().splitlines())
    assert set(used.values()) == {2}
    assert len(used) == ROWS
