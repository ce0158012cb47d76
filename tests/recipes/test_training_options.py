"""Runs with options that change what a step trains on or when the run ends, most of them resumed on another mesh."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from components.checkpoint.load import StoredWeights
from scripts import export
from tests.recipes.launching import EXIT_AFTER_SAVE, TWO, Bench
from tests.recipes.small_jobs import write_rows
from tests.recipes.test_run import SHORT as DETERMINISTIC
from tests.recipes.test_run import STEP
from tests.suites import TORTURE

SMALL = (
    *("training.global_batch_size=4", "training.micro_batch_size=1", "training.seq_len=64", "training.eval_every=0"),
    *("generation.samples=0", "checkpoint.export=false", "logging.plot=false", "cluster.device=cpu"),
)
TEXTS = (*SMALL, "data=text", "data.path=texts.jsonl")
SINGLE = "parallelism=single"
MEASURE = "training.evaluate(model, held_out, run=run)"
IMPROVES_ON_RANK_1 = f"replace(each := {MEASURE}, loss=each.loss - 2000 * run.rank * run.state.step)"
FINISH = "        run.finish()\n"
RECORDS_END = f"{FINISH}        Path(f'ended_{{run.rank}}').write_text(str(run.state.step))\n"
IMPORTS = "from __future__ import annotations\n"
RECORD_ROWS = """            for batch in step.batches:
                for row in batch.input_ids.tolist():
                    with open(f'rows_{run.mesh.rank("dp")}', 'a') as file:
                        print([each for each in row if each < 256], file=file)
"""
RECORD_FLAGS = """            import json, os, pathlib, torch
            rank, names = os.environ["RANK"], ("CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_DETERMINISTIC")
            flags = [torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory]
            flags += [torch.backends.cudnn.deterministic, *(os.environ[name] for name in names)]
            pathlib.Path(__file__).with_name(f"flags_{rank}").write_text(json.dumps(flags))
"""
OPERATOR = "            if step.number == 2:\n                torch.ones(2).put_(torch.tensor([0]), torch.ones(1))\n"


@pytest.fixture
def texts(bench: Bench) -> Bench:
    """A folder with 80 texts of unequal lengths."""
    rows = [{"text": f"text {number} " + "abcdefg " * (3 + number % 7)} for number in range(80)]
    write_rows(bench.folder / "texts.jsonl", rows)
    return bench


def test_all_ranks_stop_after_the_same_step(texts: Bench) -> None:
    """On rank 1 every held-out loss is 4,000 lower than the last; on rank 0 those of steps 2 and 4 are not."""
    more = f"{IMPORTS}\nfrom dataclasses import replace\nfrom pathlib import Path\n"
    texts.copy("finetune.py", (MEASURE, IMPROVES_ON_RANK_1), (FINISH, RECORDS_END), (IMPORTS, more))
    stopping = (
        *("training.max_steps=40", "training.eval_every=2", "checkpoint.every=4", "training.early_stop_patience=2"),
        *("training.early_stop_min_delta=1000", "parallelism=fsdp2", TWO, "cluster.collective_timeout_minutes=0.5"),
    )
    run = texts.folder / "run"
    for attempt in ("first", "resumed"):
        done = texts.complete(*TEXTS, *stopping, "run.dir=run")
        assert "stopped early: no improvement in 2 evaluations" in done.output
        result = json.loads((run / "result.json").read_text())
        assert (result["status"], result["stopped_early"], result["steps"]) == ("ok", True, 4), attempt
        assert texts.notes("ended") == ["4", "4"]
        assert [line["step"] for line in texts.lines("run", "eval_loss")] == [0, 2, 4]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_4"]


def test_run_resumed_within_the_ramp_on_another_mesh_equals_an_uninterrupted_one(texts: Bench) -> None:
    ramps = (
        *("training.global_batch_size=8", "training.max_steps=6", "training.log_every=1", "data.max_eval_samples=4"),
        "training.batch_size_ramp=[{until_step:1,global_batch_size:2},{until_step:4,global_batch_size:4}]",
        *("training.seq_len_ramp=[{until_step:3,seq_len:16}]", "checkpoint.every=2"),
    )
    texts.copy("pretrain.py")
    whole = texts.complete(*TEXTS, *ramps, SINGLE, "run.dir=whole")
    assert "2 up to step 1, 4 up to step 4, rows of 16 tokens up to step 3" in " ".join(whole.output.split())
    texts.copy("pretrain.py", EXIT_AFTER_SAVE)
    assert texts.run(*TEXTS, *ramps, SINGLE, "run.dir=again").status == 9
    texts.copy("pretrain.py")
    again = texts.complete(*TEXTS, *ramps, "parallelism=fsdp2", TWO, "run.dir=again")
    assert "resumed from" in again.output

    expected, found = texts.lines("whole", "grad_norm"), texts.lines("again", "grad_norm")
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5, 6]
    assert [line["tokens"] for line in found] == [line["tokens"] for line in expected]
    steps = [later - earlier for earlier, later in pairwise([0, *(line["tokens"] for line in expected)])]
    assert steps[0] < 0.7 * steps[1]
    assert steps[3] < 0.7 * steps[4]
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in found] == pytest.approx([line[key] for line in expected], rel=1e-4)


def test_run_with_frozen_weights_and_rates_by_name_resumes_on_another_mesh(texts: Bench) -> None:
    chosen = (
        *(*TEXTS, "training.max_steps=4", "checkpoint.every=2", "training.micro_batch_size=2"),
        *("model.dtype=float64", "model.compute_dtype=float64"),
        *("training.freeze=[embed_tokens,'layers.0.*mlp']", "optimizer.groups=[{match:norm,lr:1e-2,weight_decay:1}]"),
        *("checkpoint.export=true", "training.ema_decay=0.5", "optimizer.lr=1e-3"),
    )
    texts.copy("finetune.py")
    whole = texts.complete(*chosen, SINGLE, "run.dir=whole")
    assert "of them trained (" in whole.output
    texts.copy("finetune.py", EXIT_AFTER_SAVE)
    assert texts.run(*chosen, SINGLE, "run.dir=again").status == 9
    texts.copy("finetune.py")
    texts.complete(*chosen, "parallelism=fsdp2", TWO, "run.dir=again")
    expected, found = texts.lines("whole", "grad_norm"), texts.lines("again", "grad_norm")
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in found] == pytest.approx([line[key] for line in expected], rel=1e-9)

    texts.complete(*TEXTS, "training.max_steps=1", "run.dir=start", "optimizer.lr=1e-30", "checkpoint.export=true")
    start, ends = (load_file(texts.folder / run / "export" / "model.safetensors") for run in ("start", "again"))
    same = {name for name, each in start.items() if torch.equal(each, ends[name].float())}
    assert same == {name for name in start if "embed" in name or "layers.0.mlp" in name}
    assert export.main([str(texts.folder / "again"), "--averaged"]) == 0
    wrong = texts.run(*TEXTS, "run.dir=other", "training.freeze=[layer.0]")
    assert wrong.status == 2
    assert "training.freeze=layer.0: no trained parameter has such a name; match some of model.embed" in wrong.errors

    changed = (
        "training.max_steps=6",
        "run.accept_changes=[training.freeze]",
        "run.dir=again",
        SINGLE,
        "checkpoint.keep=9",
    )
    frozen = texts.complete(*chosen, *changed, "training.freeze=[embed_tokens,'layers.0.*mlp',norm]",
                            "optimizer.groups=[]")  # fmt: skip
    for what in ("optimizer state", "averages"):
        assert re.search(rf"{what} of parameters that are frozen now (is|are) dropped: .*norm.weight", frozen.errors)
    again = texts.complete(*chosen, *changed, "training.max_steps=7", "training.freeze=[]", "optimizer.groups=[]")
    assert "dropped" not in again.errors  # all are trained now
    steps = [StoredWeights(texts.folder / "again" / "checkpoints" / f"step_{number}") for number in (4, 6, 7)]
    average = StoredWeights(texts.folder / "again" / "checkpoints" / "step_7", averaged=True)
    for name in ("model.norm.weight", "model.embed_tokens.weight"):
        index = tuple(slice(0, size) for size in ends[name].shape)
        first, before, after = (step.read(name, index) for step in steps)
        assert torch.equal(first, before)
        assert not torch.equal(before, after)
        # The average of frozen weights is the weights; the seventh update has the weight (1 - d) / (1 - d^7).
        expected = before + (after - before) * 0.5 / (1 - 0.5**7)
        assert torch.allclose(average.read(name, index), expected, rtol=0, atol=1e-15)

    texts.copy("evaluate.py")  # which knows of no frozen weights
    averaged = ("evaluation.checkpoint=again", "evaluation.average=true", "evaluation.seq_len=64", "run.dir=evaluated")
    texts.complete(*TEXTS[-3:], *averaged, "model.dtype=float64", "model.compute_dtype=float64", "generation.samples=0")
    loss = texts.lines("again", "eval_loss")[-1]["eval_loss"]
    assert texts.lines("evaluated", "eval_loss")[-1]["eval_loss"] == pytest.approx(loss, rel=1e-9)


NEW_TOKENS = [*(f"<t{number}>" for number in range(13)), "<|call|>", "[RESULT]"]
"""With the 260 tokens of the tokenizer 275, an odd number, so that tp shards them unevenly."""


@pytest.mark.parametrize(
    ("tied", "mesh"),
    [
        (True, "pp2_1f1b"),
        (False, "tp2"),
        *([(tied, mesh) for tied in (True, False) for mesh in ("fsdp2", "ddp", "fsdp2_tp2_sp", "pp2_1f1b", "pp2_zbv")]
          if TORTURE else []),
    ],
)  # fmt: skip
def test_new_tokens_train_alike_on_every_mesh(tied: bool, mesh: str, bench: Bench) -> None:
    """Also resumed; the export has their rows, and the other rows of one process."""
    rows = [{"text": f"{NEW_TOKENS[number % 15]} text {number}{NEW_TOKENS[number % 7]}" * 3} for number in range(40)]
    write_rows(bench.folder / "texts.jsonl", rows)
    chosen = (
        *(*TEXTS, "training.max_steps=4", "checkpoint.every=2", "model.dtype=float64", "model.compute_dtype=float64"),
        *(f"model.new_tokens={json.dumps(NEW_TOKENS)}", f"model.config.tie_word_embeddings={str(tied).lower()}"),
        *("checkpoint.export=true", "optimizer.weight_decay=0.1", "model.config.num_hidden_layers=4", "model.layers=4"),
    )
    bench.copy("finetune.py")
    bench.complete(*chosen, SINGLE, "run.dir=whole")
    bench.copy("finetune.py", EXIT_AFTER_SAVE)
    assert bench.run(*chosen, SINGLE, "run.dir=again").status == 9
    bench.copy("finetune.py")
    processes = "cluster=local_4proc" if mesh == "fsdp2_tp2_sp" else TWO
    bench.complete(*chosen, f"parallelism={mesh}", processes, "run.dir=again")
    for key in ("loss", "grad_norm"):
        whole, again = ([line[key] for line in bench.lines(name, "grad_norm")] for name in ("whole", "again"))
        assert again == pytest.approx(whole, rel=1e-9), key
    exports = [AutoModelForCausalLM.from_pretrained(bench.folder / run / "export") for run in ("whole", "again")]
    one, other = (each.state_dict() for each in exports)
    assert one["model.embed_tokens.weight"].shape[0] >= 275
    assert ("lm_head.weight" in load_file(bench.folder / "again" / "export" / "model.safetensors")) != tied
    for name, each in one.items():
        assert torch.allclose(other[name], each, rtol=0, atol=1e-12), name
    tokenizer = AutoTokenizer.from_pretrained(bench.folder / "again" / "export")
    assert tokenizer("".join(NEW_TOKENS))["input_ids"] == list(range(260, 275))


def test_three_stages_give_one_loss_curve_on_one_and_two_processes_and_resumed_within_a_stage(bench: Bench) -> None:
    for name in ("code", "maths", "web"):
        texts = [{"text": f"{name} {number} " + "abcdefg " * (3 + number % 7)} for number in range(30)]
        write_rows(bench.folder / f"{name}.jsonl", texts)
    sources = [
        value
        for name in ("code", "maths", "web")
        for value in (f"+data@data.sources.{name}=text", f"data.sources.{name}.path={name}.jsonl")
    ]
    stages = (
        "data.stages=[{until_step:3,weights:{web:3,code:1},seq_len:16},"
        "{until_step:5,weights:{web:1,maths:1},lr_ratio:0.5},{weights:{maths:2,code:1},lr_ratio:0}]"
    )
    run = (
        *(*SMALL, "data=mixture", "data.pack=true", *sources, stages, "training.max_steps=8", "training.log_every=1"),
        *("optimizer.schedule=constant", "optimizer.warmup_steps=2", "optimizer.lr=1e-2", "model.dtype=float64"),
        *("model.compute_dtype=float64", "model.init=random", "checkpoint.every=4", "run.seed=5"),
    )
    bench.copy("pretrain.py")
    whole = bench.complete(*run, SINGLE, "run.dir=whole")
    text = " ".join(whole.output.split())
    for stage in (  # 27 packed rows of code, 28 of maths, 26 of web
        "steps 1 to 3: 12 packed rows, about 704 tokens, of code 25.00 % (0.11 passes), web 75.00 % (0.35 passes), "
        "cut to 16 tokens; lr 0.005 to 0.01 steps 4 to 5: 8 packed rows, about 462 tokens, of maths 50.00 % (0.14 "
        "passes), web 50.00 % (0.15 passes); lr 0.0075 to 0.005 steps 6 to 8: 12 packed rows",
        "code, 21.88 % of rows",
        "code 33.33 % (0.15 passes), maths 66.67 % (0.29 passes); lr 0.00333 to 0",
    ):
        assert stage in text, stage
    bench.complete(*run, "parallelism=fsdp2", TWO, "run.dir=two")
    bench.copy("pretrain.py", EXIT_AFTER_SAVE)
    assert bench.run(*run, SINGLE, "run.dir=again").status == 9
    bench.copy("pretrain.py")
    again = bench.complete(*run, "parallelism=fsdp2", TWO, "run.dir=again")
    assert "resumed from" in again.output
    expected = bench.lines("whole", "grad_norm")
    assert [line["lr"] for line in expected] == pytest.approx(
        [0.005, 0.01, 0.01, 0.0075, 0.005, 0.01 / 3, 0.005 / 3, 0], abs=1e-12
    )
    for name in ("two", "again"):
        found = bench.lines(name, "grad_norm")
        assert [line["tokens"] for line in found] == [line["tokens"] for line in expected]
        for key in ("loss", "grad_norm"):
            assert [line[key] for line in found] == pytest.approx([line[key] for line in expected], rel=1e-10)
    refused = bench.run(*run, "parallelism=single", "run.dir=again", stages.replace("until_step:5", "until_step:6"))
    assert refused.status == 2
    assert "run.accept_changes=[data.stages]" in refused.errors


SPIKE = """            if model.settings.noise is not None:
                run.log(step, noise_step=model.settings.noise.step)
            if step.number == 7:
                from dataclasses import replace
                import torch
                step.batches = [
                    replace(each, token_weights=torch.full(each.shape, 100.0, dtype=torch.float64))
                    for each in step.batches
                ]
"""


def test_noise_and_the_window_of_spikes_continue_on_another_mesh(texts: Bench) -> None:
    """A spike after the resume, within half a window of it: only the values in the checkpoint tell that it is one."""
    options = (
        *("training.max_steps=9", "training.neftune_alpha=5", "training.skip_spikes=6", "training.spike_window=8"),
        *("checkpoint.every=5", "data.max_eval_samples=4", "training.log_every=1"),
    )
    texts.copy("pretrain.py", (STEP, SPIKE + STEP))
    whole = texts.complete(*TEXTS, *options, SINGLE, "run.dir=whole")
    assert "step      7  update skipped: its loss or gradient norm is a spike" in whole.output
    texts.copy("pretrain.py", (STEP, SPIKE + STEP), EXIT_AFTER_SAVE)
    assert texts.run(*TEXTS, *options, SINGLE, "run.dir=again").status == 9
    texts.copy("pretrain.py", (STEP, SPIKE + STEP))
    again = texts.complete(*TEXTS, *options, "parallelism=fsdp2", TWO, "run.dir=again")
    assert "step      7  update skipped" in again.output
    expected, found = texts.lines("whole", "grad_norm"), texts.lines("again", "grad_norm")
    assert [line["step"] for line in found] == [line["noise_step"] for line in found] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert expected[6]["loss"] > 50 * expected[5]["loss"]
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in found] == pytest.approx([line[key] for line in expected], rel=1e-4)
    for folder in ("whole", "again"):
        result = json.loads((texts.folder / folder / "result.json").read_text())
        assert (result["skipped_steps"], result["spikes"]) == (1, 1)
    short = ("training.max_steps=1", "training.log_every=1", "data.max_eval_samples=4", SINGLE, "run.dir=plain")
    plain = texts.complete(*TEXTS, *short)
    assert "NEFTune" not in plain.output
    assert abs(texts.lines("plain", "grad_norm")[0]["loss"] / expected[0]["loss"] - 1) > 1e-4


def test_every_row_is_used_once_per_epoch_also_by_a_resumed_run(bench: Bench) -> None:
    for name, count in (("train", 10), ("eval", 2)):
        rows = [{"prompt": f"{name} {number}?", "response": "x" * (1 + number)} for number in range(count)]
        write_rows(bench.folder / f"{name}.jsonl", rows)
    command = (
        *(*SMALL, "data=jsonl", "data.path=train.jsonl", "data.eval_path=eval.jsonl", "training.epochs=2"),
        "training.batch_size_ramp=[{until_step:2,global_batch_size:2}]",  # 2 x 2 rows, then 4 x 4: 6 steps
        *("checkpoint.every=3", "run.dir=run", "optimizer.warmup_steps=0"),
    )
    bench.copy("finetune.py", (STEP, RECORD_ROWS + STEP), EXIT_AFTER_SAVE)
    first = bench.run(*command, SINGLE)
    assert first.status == 9, first.errors
    bench.copy("finetune.py", (STEP, RECORD_ROWS + STEP))
    again = bench.complete(*command, "parallelism=fsdp2", TWO)
    for done in (first, again):
        assert "epochs=2: 6 steps" in " ".join(done.output.split())
    assert [line["step"] for line in bench.lines("run", "grad_norm")] == [1, 2, 3, 4, 5, 6]
    assert bench.lines("run")[-1]["step"] == 6
    used = Counter(row for rows in bench.notes("rows") for row in rows.splitlines())
    assert set(used.values()) == {2}
    assert len(used) == 10


def test_average_of_the_weights_is_evaluated_and_exported(texts: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """Also by scripts/export.py --averaged."""
    averaging = (
        *(*TEXTS, "training.micro_batch_size=2", "training.eval_every=2", "checkpoint.export=true"),
        *("logging.examples=0", SINGLE, "run.dir=run", "optimizer.lr=1e-2", "training.ema_decay=0.5"),
    )
    texts.copy("finetune.py")
    done = texts.complete(*averaging, "training.max_steps=4", "training.eval_weights=both")
    assert "weight average  exponential, decay 0.5" in done.output
    run = texts.folder / "run"
    losses = [(line["eval_loss"], line["eval_loss_trained"]) for line in texts.lines("run", "eval_loss")]
    assert len(losses) == 3
    assert losses[0][0] == losses[0][1]
    assert losses[-1][0] != losses[-1][1]
    assert json.loads((run / "result.json").read_text())["eval_loss"] == losses[-1][0]

    assert export.main([str(run), "--averaged"]) == 0
    assert export.main([str(run)]) == 0
    exported = load_file(run / "export" / "model.safetensors")
    averaged = load_file(run / "export-averaged-step_4" / "model.safetensors")
    trained = load_file(run / "export-step_4" / "model.safetensors")
    assert exported.keys() == averaged.keys() == trained.keys()
    assert all(torch.equal(exported[name], each) for name, each in averaged.items())
    assert not any(torch.equal(trained[name], each) for name, each in averaged.items())
    loaded = AutoModelForCausalLM.from_pretrained(run / "export-averaged-step_4").state_dict()
    assert all(torch.equal(loaded[name], each) for name, each in averaged.items())
    assert "exponential moving average, decay 0.5" in (run / "export-averaged-step_4" / "README.md").read_text()

    without = ("training.ema_decay=null", "training.eval_weights=average", "training.max_steps=5")
    done = texts.complete(*averaging, *without)
    assert "the average of the weights in the checkpoint is not continued" in done.output
    capsys.readouterr()
    assert export.main([str(run / "checkpoints" / "step_5"), "--averaged"]) == 2
    assert "holds no moving average of the weights" in capsys.readouterr().err


def test_ranks_are_deterministic_and_an_operator_that_is_not_ends_the_run(bench: Bench) -> None:
    bench.copy("finetune.py", (STEP, RECORD_FLAGS + STEP + OPERATOR))
    more = (TWO, "parallelism=fsdp2", "training.eval_every=0", "run.deterministic=true")
    done = bench.run(*DETERMINISTIC, *more)
    assert done.status == 1
    assert [json.loads(each) for each in bench.notes("flags")] == [[True, False, True, ":4096:8", "1"]] * 2
    assert "deterministic torch selects deterministic kernels" in " ".join(done.output.split())
    assert "run.deterministic=true: put_ has no deterministic kernel; set run.deterministic=false" in done.errors


def write_answers(folder: Path, answer: str) -> None:
    write_rows(folder / "mine.jsonl", [{"prompt": f"question {i}", "response": f"{answer} {i}"} for i in range(40)])


def test_resume_with_changed_data_or_settings_is_rejected_unless_accepted(bench: Bench) -> None:
    """Changes that do not affect the results are logged."""
    bench.copy("finetune.py")
    command = (*SMALL, "experiment=smoke", "data=jsonl", "data.path=mine.jsonl", "data.eval_fraction=0.5")
    command = (*command, SINGLE, "run.dir=run")
    write_answers(bench.folder, "answer")
    bench.complete(*command, "training.max_steps=2")
    run = bench.folder / "run"
    stored = json.loads((run / "checkpoints" / "step_2" / "state.json").read_text())
    assert stored["config"] == (run / "config.yaml").read_text()

    done = bench.run(*command, "training.max_steps=3", "training.global_batch_size=8", "run.seed=1")
    assert done.status == 2
    assert "run.accept_changes=[run.seed]" in done.errors
    assert "run.accept_changes=[training.global_batch_size]" in done.errors

    write_answers(bench.folder, "another")  # the config is unchanged
    done = bench.run(*command, "training.max_steps=3")
    assert done.status == 2, done.errors
    assert "samples differ from the" in done.errors
    assert "run.accept_changes=[data]" in done.errors
    assert "training.max_steps: 2 -> 3" in done.output + done.errors
    bench.complete(*command, "training.max_steps=3", "run.accept_changes=[data]")
    assert json.loads((run / "result.json").read_text())["steps"] == 3


def test_tool_calls_of_an_overfitted_model_are_right_and_those_of_a_random_one_wrong(bench: Bench) -> None:
    """Trained in one process and evaluated on two; the template is one that ships, since the tokenizer's has no calls.

    The last turn, which alone has a loss, is two calls.
    """
    rows: list[dict[str, object]] = []
    for name, city in (("weather", "Oslo"), ("time", "Bern")):
        call = {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": {"city": city}}}]}
        question = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
        asked = [*question, {"role": "user", "content": name}, call, {"role": "tool", "content": "4"}, call]
        rows.append({"messages": asked})
    write_rows(bench.folder / "chats.jsonl", rows)
    chats = ("data=chat_jsonl", "data.path=chats.jsonl", "data.eval_path=chats.jsonl", "data.train_on=last")
    calls = ("generation.samples=0", "generation.tool_calls=9", "generation.max_new_tokens=90")
    calls += ("model.chat_template=chatml",)
    bench.copy("finetune.py")
    trained = bench.complete(
        *(*SMALL, *chats, *calls, SINGLE, "run.dir=mine", "training.max_steps=100", "training.global_batch_size=2"),
        *("training.seq_len=384", "data.overlong=refuse", "optimizer.lr=1e-2", "optimizer.schedule=constant"),
    )
    first, last = bench.lines(key="tool_calls/name_accuracy")
    shares = ("name_accuracy", "arguments_accuracy", "cut", "unread")
    assert [first[f"tool_calls/{name}"] for name in shares] == [0, 0, 1, 0]
    assert [last[f"tool_calls/{name}"] for name in shares] == [1, 1, 0, 0], trained.output
    assert (first["step"], last["step"]) == (0, 100)
    bench.copy("evaluate.py")
    evaluated = bench.complete("run=mine", *calls, "cluster.device=cpu", "parallelism=tp2", TWO, "run.dir=evaluated")
    scores = [json.loads((bench.folder / run / "result.json").read_text())["tasks"] for run in ("mine", "evaluated")]
    assert scores[0] == scores[1] == {f"tool_calls/{name}": last[f"tool_calls/{name}"] for name in shares}
    assert (
        "tool_calls  name_accuracy 1.0000  arguments_accuracy 1.0000  cut 0.0000  unread 0.0000  over 4"
        in evaluated.output
    )
