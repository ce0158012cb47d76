"""recipes/grpo.py end to end, in real processes: one curve on every mesh, also after kills; answers are stored and
replayed; rewards that fail; a reward and a loss of the user's own.

The task is `digits`: the reward is the share of digits among the eight bytes of an answer. A tiny model learns it in 20
steps. Unless a test says otherwise everything is in float64, where equal seeds give equal answers on every mesh.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import pytest

from components.data.packing import SampleOrder
from components.training.answers import Answers
from components.training.objectives.policy import OLD, REFERENCE_TOKENS
from tests.recipes.launching import RECIPES, Bench, Done, until
from tests.recipes.small_jobs import write_rows
from tests.suites import TORTURE, in_torture

PROMPTS, GROUP = 24, 8
DIGITS = (
    *("cluster.device=cpu", "data.path=problems.jsonl", "reward.functions=[mine.py:digits]"),
    *(f"rollouts.group={GROUP}", "rollouts.max_new_tokens=8", "training.global_batch_size=64"),
    *("training.micro_batch_size=16", "training.seq_len=32", "optimizer.lr=1e-2", "training.eval_every=0"),
    *("data.eval_fraction=0.1", "checkpoint.export=false", "logging.examples=0", "generation.samples=0"),
    "logging.plot=false",
)
FLOAT64 = ("model.dtype=float64", "model.compute_dtype=float64")
MESHES = {
    "single": ("parallelism=single",),
    "fsdp2": ("parallelism=fsdp2", "cluster=local_2proc"),
    "tp2": ("parallelism=tp2", "cluster=local_2proc"),
    "cp2": ("parallelism=fsdp2_cp2", "parallelism.dp_shard=1", "cluster=local_2proc"),
    "ddp": ("parallelism=ddp", "cluster=local_2proc"),
    "hsdp": ("parallelism=hsdp", "cluster=local_4proc"),
    "fsdp2_tp2_sp": ("parallelism=fsdp2_tp2_sp", "cluster=local_4proc"),
}
REWARDS = """
import os, time

def digits(answers):
    return [sum(each.isdigit() for each in text) / 8 for text in answers]

def raises_for_some(answers, token_ids):
    if len(answers) > 1 or sum(token_ids[0]) % 5 == 0:
        raise RuntimeError("no reward today")
    return digits(answers)

def hangs_for_some(answers, token_ids):
    if any(sum(ids) % 16 == 0 for ids in token_ids):
        time.sleep(1000)
    return digits(answers)

def nan_for_some(answers, token_ids):
    return [float("nan") if sum(ids) % 5 == 0 else each for each, ids in zip(digits(answers), token_ids)]

def counted(answers, **columns):
    with open("calls", "a") as file:
        file.write("x" * len(answers))
    return digits(answers)

def always_fails(answers):
    raise RuntimeError("broken")

def never(answers):
    return [None] * len(answers)

def short(answers):
    return [1.0]
"""


@pytest.fixture
def grpo(bench: Bench) -> Bench:
    """A folder with a copy of the recipe, prompts and reward functions."""
    bench.copy("grpo.py")
    write_rows(bench.folder / "problems.jsonl", [{"prompt": f"{number}:"} for number in range(PROMPTS)])
    (bench.folder / "mine.py").write_text(REWARDS)
    return bench


def stored(grpo: Bench, run: str) -> dict[int, Answers]:
    """Return the stored answers of a run by the step that first trained on them."""
    files = sorted((grpo.folder / run / "rollouts").glob("*.safetensors"))
    return {int(file.stem): Answers.read(file)[0] for file in files}


def assert_same_answers(grpo: Bench, run: str, reference: str) -> None:
    own, expected = stored(grpo, run), stored(grpo, reference)
    assert own.keys() == expected.keys()
    for step, answers in own.items():
        assert answers.samples == expected[step].samples, step
        assert answers.tokens == expected[step].tokens, step
        assert answers.rewards.tolist() == expected[step].rewards.tolist(), step


def rewards(grpo: Bench, run: str) -> list[float]:
    return [line["reward"] for line in grpo.lines(run, "reward")]


def killed_after(grpo: Bench, arguments: Sequence[str], run: str, step: int, delay: float = 0.0) -> None:
    """Start a run and kill all of its processes some time after it has logged a step."""
    started = grpo.start(*arguments, f"run.dir={run}")
    metrics = grpo.folder / run / "metrics.jsonl"
    until(
        lambda: (metrics.exists() and metrics.read_text().count('"loss"') >= step) or started.process.poll() is not None
    )
    time.sleep(delay)
    for process in grpo.processes():
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            continue
    started.wait()
    grpo.assert_no_process_left()


def test_reward_rises_and_is_reported(grpo: Bench) -> None:
    """In float32, as users run it; with held-out rewards, the best checkpoint, a plot and a model card."""
    done = grpo.complete(
        *DIGITS, "run.dir=mine", "training.max_steps=20", "training.eval_every=10", "checkpoint.every=10",
        "checkpoint.keep=1", "checkpoint.keep_best=true", "checkpoint.export=true", "logging.plot=true",
        "generation.samples=1", "objective=dapo",
    )  # fmt: skip
    curve = rewards(grpo, "mine")
    assert len(curve) == 20
    assert curve[-1] > 0.8 > 10 * curve[0]
    held_out = [line["eval_reward"] for line in grpo.lines("mine", "eval_reward")]
    assert len(held_out) == 3
    assert held_out[-1] > 0.8
    assert "8 prompts x 8 answers of up to 8 tokens, on policy" in done.output
    assert "best of 8 answers, reward" in done.output
    assert f"reward {curve[0]:.3f} to {curve[-1]:.3f}" in done.output
    assert (grpo.folder / "mine" / "reward.png").stat().st_size > 10_000
    assert "held-out reward" in (grpo.folder / "mine" / "export" / "README.md").read_text()
    assert {"entropy", "reward_std", "zero_groups", "answer_tokens", "cut", "rollout_seconds"} <= grpo.lines("mine")[
        -2
    ].keys() | grpo.lines("mine", "reward")[-1].keys()
    shown = subprocess.run(
        [sys.executable, RECIPES.parent / "scripts" / "rollouts.py", "mine", "--step", "20", "--json"],
        cwd=grpo.folder, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    rows = [json.loads(line) for line in shown]
    assert sum(row["rewards"]["mine.py:digits"] for row in rows) / 64 == pytest.approx(curve[-1])
    assert len(rows) == 64
    assert all((file.stat().st_mode & 0o077) == 0 for file in (grpo.folder / "mine" / "rollouts").iterdir())


@pytest.mark.timeout(900)
def test_answers_are_equal_on_every_mesh(grpo: Bench) -> None:
    steps = "training.max_steps=20" if TORTURE else "training.max_steps=10"
    meshes = MESHES if TORTURE else {name: MESHES[name] for name in ("single", "fsdp2", "tp2")}
    for name, mesh in meshes.items():
        grpo.complete(*DIGITS, *FLOAT64, *mesh, steps, f"run.dir={name}")
        assert_same_answers(grpo, name, "single")
        own, expected = (grpo.lines(run, "loss")[-1]["grad_norm"] for run in (name, "single"))
        assert own == pytest.approx(expected, rel=1e-6)  # AdamW amplifies the rounding of small gradients
    assert rewards(grpo, "single")[-1] > 4 * rewards(grpo, "single")[0]


def test_comparison_sees_another_seed(grpo: Bench) -> None:
    for seed in (0, 1):
        grpo.complete(*DIGITS, *FLOAT64, "training.max_steps=2", f"run.dir=seed{seed}", f"run.seed={seed}")
    with pytest.raises(AssertionError):
        assert_same_answers(grpo, "seed1", "seed0")


SHARED = ("rollouts.batches=2", "rollouts.passes=2", "objective.beta=0.05", "training.max_steps=10")
SAVES = ("checkpoint.every=1", "checkpoint.keep=2")


@pytest.mark.timeout(900)
def test_killed_run_resumes_on_another_mesh_amid_shared_answers(grpo: Bench) -> None:
    """Steps 5 to 8 train on the answers that were sampled before step 5, with their old log-probabilities."""
    grpo.complete(*DIGITS, *FLOAT64, *SHARED, *MESHES["single"], "run.dir=whole")
    killed_after(grpo, (*DIGITS, *FLOAT64, *SHARED, *SAVES, *MESHES["single"]), "mine", 6)
    done = grpo.complete(*DIGITS, *FLOAT64, *SHARED, *SAVES, *MESHES["fsdp2"], "run.dir=mine")
    assert "resumed from" in done.output
    assert_same_answers(grpo, "mine", "whole")
    for own, expected in zip(grpo.lines("mine", "loss"), grpo.lines("whole", "loss"), strict=True):
        assert own["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-9)
        assert own["kl"] == pytest.approx(expected["kl"], rel=1e-9, abs=1e-15)
    for answers in stored(grpo, "whole").values():
        assert set(answers.log_probs) == {OLD, REFERENCE_TOKENS}


def test_lost_answers_of_a_begun_batch_are_an_error(grpo: Bench) -> None:
    arguments = (*DIGITS, *SHARED, *SAVES, "run.dir=mine")
    grpo.copy(
        "grpo.py",
        (
            "                run.save(step)\n",
            "                run.save(step)\n                if step.number == 6:\n"
            "                    raise SystemExit(9)\n",
        ),
    )
    assert grpo.run(*arguments).status == 9
    grpo.copy("grpo.py")
    file = grpo.folder / "mine" / "rollouts" / "000005.safetensors"
    content = file.read_bytes()
    for damaged, why in ((None, "missing"), (content[:-9] + b"x" * 9, "damaged")):
        file.unlink() if damaged is None else file.write_bytes(damaged)
        done = grpo.run(*arguments)
        assert done.status == 2
        assert f"000005.safetensors: {why}" in done.output + done.errors
        assert "resume from a checkpoint of step 4" in done.output + done.errors
        file.write_bytes(content)
    done = grpo.run(*arguments, "reward.weights=[2]")
    assert done.status == 2
    assert "000005.safetensors: sampled with another reward.weights; step 7 trains" in done.output + done.errors
    # What may be changed after too many failures, or too few spreads.
    grpo.complete(*arguments, "reward.timeout_seconds=30", "reward.max_failures=0.5", "rollouts.max_draws=4")
    other = (*DIGITS, *SHARED, "run.dir=other", f"run.resume={grpo.folder}/mine/checkpoints/step_10")
    assert "rollouts" in {each.name for each in (grpo.folder / "mine").iterdir()}
    grpo.complete(*other, "training.max_steps=11")


def test_another_directory_continues_a_begun_batch(grpo: Bench) -> None:
    arguments = (*DIGITS, *FLOAT64, *SHARED)
    grpo.complete(*arguments, "run.dir=whole")
    grpo.complete(*arguments, *SAVES, "checkpoint.keep=20", "run.dir=first")
    grpo.complete(*arguments, "run.dir=second", f"run.resume={grpo.folder}/first/checkpoints/step_6")
    expected = stored(grpo, "whole")
    for step, answers in stored(grpo, "second").items():
        assert answers.tokens == expected[step].tokens
    assert grpo.lines("second", "loss")[-1]["loss"] == pytest.approx(grpo.lines("whole", "loss")[-1]["loss"], rel=1e-9)


@pytest.mark.timeout(900)
def test_replay_trains_on_the_answers_of_another_run(grpo: Bench) -> None:
    """On a pipeline, which samples nothing, in packed rows; rewards are not computed again for training."""
    functions = "reward.functions=[mine.py:counted]"
    grpo.complete(*DIGITS, *FLOAT64, *SHARED, functions, "run.dir=sampled")
    calls = (grpo.folder / "calls").stat().st_size
    held_out = 2 * (PROMPTS // 10)
    assert calls == 3 * 2 * 64 + held_out
    pipeline = ("parallelism=pp2_1f1b", "cluster=local_2proc", "training.micro_batch_size=4", "data.pack=true")
    grpo.complete(*DIGITS, *FLOAT64, *SHARED, functions, *pipeline, "rollouts.replay=sampled", "run.dir=replayed")
    assert (grpo.folder / "calls").stat().st_size == calls + held_out
    assert_same_answers(grpo, "replayed", "sampled")
    for own, expected in zip(grpo.lines("replayed", "loss"), grpo.lines("sampled", "loss"), strict=True):
        rounding = 1e-12 if own["step"] < 3 else 1e-6  # AdamW amplifies that of small gradients
        assert own["loss"] == pytest.approx(expected["loss"], abs=rounding)
        assert own["grad_norm"] == pytest.approx(expected["grad_norm"], rel=10 * rounding)
    for other, problem in (
        (["reward.functions=[mine.py:digits]"], "reward.functions=['mine.py:digits']: the answers of rollouts.replay="),
        ([functions, "rollouts.overlong=penalty", "rollouts.overlong_margin=2"], "rollouts.overlong_margin=2: the ans"),
    ):
        done = grpo.run(*DIGITS, *SHARED, *other, "rollouts.replay=sampled", "run.dir=other_rewards")
        assert done.status == 2
        assert problem in done.errors
    problems = [{"prompt": f"{number}?"} for number in range(PROMPTS)]
    write_rows(grpo.folder / "problems.jsonl", problems)
    done = grpo.run(*DIGITS, *SHARED, functions, "rollouts.replay=sampled", "run.dir=other_data")
    assert done.status == 2
    assert "rollouts.replay=sampled: its prompts differ" in done.output + done.errors


def test_zero_variance_groups_are_left_out_with_an_exact_cursor(grpo: Bench) -> None:
    """The used prompts are a prefix of the stream without those of equal rewards, on every mesh and after a resume."""
    arguments = (
        *(*DIGITS, *FLOAT64, "rollouts.filter=zero_variance", "rollouts.max_draws=3", "training.max_steps=8"),
        *("rollouts.group=4", "training.global_batch_size=24", "training.micro_batch_size=4"),
    )
    grpo.complete(*arguments, *MESHES["single"], "run.dir=whole")
    killed_after(grpo, (*arguments, *SAVES, *MESHES["single"]), "mine", 3)
    grpo.complete(*arguments, *SAVES, *MESHES["fsdp2"], "run.dir=mine")
    assert_same_answers(grpo, "mine", "whole")
    order, drawn, used = SampleOrder(PROMPTS - PROMPTS // 10, 0), 0, stored(grpo, "whole")
    lines = grpo.lines("whole", "reward")
    for step, answers in used.items():
        end = int(lines[step - 1]["prompts_drawn"])
        assert 6 <= end - drawn <= 18
        has_spread = [len(set(group.tolist())) > 1 for group in answers.rewards[0].reshape(-1, 4)]
        assert all(drawn <= number < end for number in answers.samples)
        assert answers.samples == sorted(set(answers.samples))
        if end - drawn < 18:
            assert all(has_spread)
        drawn = end
    assert any(int(line["prompts_drawn"]) > 6 * line["step"] for line in lines)
    assert order.size == PROMPTS - PROMPTS // 10


FAILURES = {
    "raises_for_some": (1.0, "RuntimeError: no reward today"),
    "hangs_for_some": (1.0, "took longer than 2 s"),
    "nan_for_some": (0.0, ""),
}


@pytest.mark.parametrize("name", FAILURES)
def test_answers_without_a_reward_are_left_out(grpo: Bench, name: str) -> None:
    allowed, text = FAILURES[name]
    settings = (f"reward.functions=[mine.py:{name}]", f"reward.max_failures={allowed}", "reward.timeout_seconds=2")
    small = ("rollouts.group=4", "training.global_batch_size=16", "training.micro_batch_size=8", "training.max_steps=2")
    done = grpo.complete(*DIGITS, *settings, *small, *MESHES["fsdp2"], "run.dir=mine", "data.max_eval_samples=1")
    assert text in done.output
    assert ("have no reward. The first failure" in done.output) == bool(text)
    lines = grpo.lines("mine", "reward")
    for step, answers in stored(grpo, "mine").items():
        modulus = 16 if name == "hangs_for_some" else 5
        unknown = [sum(tokens) % modulus == 0 for tokens in answers.tokens]
        assert [reward != reward for reward in answers.rewards[0]] == unknown
        assert lines[step - 1]["unrewarded"] == pytest.approx(sum(unknown) / len(unknown))
        assert lines[step - 1]["grad_norm"] < float("inf")
    assert any(line["unrewarded"] > 0 for line in lines)


@pytest.mark.parametrize(
    ("function", "status", "problem"),
    [
        ("always_fails", 1, "reward.max_failures=0.01: 2 of 2 "),
        ("short", 2, "returned 1 values for "),
        ("never", 1, "reward.functions=['mine.py:never']: none of 64 answers has a reward"),
    ],
)
def test_broken_reward_ends_the_run_on_all_ranks(grpo: Bench, function: str, status: int, problem: str) -> None:
    done = grpo.run(*DIGITS, *MESHES["fsdp2"], f"reward.functions=[mine.py:{function}]", "run.dir=mine")
    assert done.status == status
    assert problem in done.output + done.errors
    grpo.assert_no_process_left()


def test_table_of_answers_has_the_weighted_reward(grpo: Bench) -> None:
    functions = ("reward.functions=[mine.py:digits,length]", "reward.weights=[1,-2]", "rollouts.passes=2")
    penalty = ("rollouts.overlong=penalty", "rollouts.overlong_margin=4")
    grpo.complete(*DIGITS, *functions, *penalty, "training.max_steps=2", "run.dir=mine")
    show = [sys.executable, RECIPES.parent / "scripts" / "rollouts.py", "mine"]

    def shown(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*show, *options], check=False, cwd=grpo.folder, capture_output=True, text=True)

    rows = [json.loads(line) for line in shown("--step", "2", "--json").stdout.splitlines()]
    for row in rows:
        digits, length = row["rewards"]["mine.py:digits"], row["rewards"]["length"]
        assert row["rewards"]["overlong"] == -max(row["tokens"] - 4, 0) / 4
        assert row["reward"] == pytest.approx(digits - 2 * length + row["rewards"]["overlong"])
    assert sum(row["reward"] for row in rows) / len(rows) == pytest.approx(rewards(grpo, "mine")[0])
    late = shown("--step", "3")
    assert (late.returncode, late.stdout) == (2, "")
    assert "mine: has no answers of step 3; it has those of steps 1 to 2" in late.stderr


def test_stop_while_sampling_loses_nothing(grpo: Bench) -> None:
    """SIGTERM while answers are sampled: the step is sampled again after a resume, and its answers are the same."""
    arguments = (*DIGITS, *FLOAT64, "training.max_steps=6", *MESHES["fsdp2"])
    grpo.complete(*arguments, "run.dir=whole")
    started = grpo.start(*arguments, "run.dir=mine", "checkpoint.every=2")
    metrics = grpo.folder / "mine" / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.read_text().count('"loss"') >= 3)
    started.signal(signal.SIGTERM)
    done = started.wait()
    assert done.status == 0
    grpo.complete(*arguments, "run.dir=mine")
    assert_same_answers(grpo, "mine", "whole")


OWN_LOSS = (
    "        seq_len = cfg.training.seq_len\n",
    "        policy.token_loss = MyLoss(cfg.objective, cfg.rollouts)\n        seq_len = cfg.training.seq_len\n",
)
OWN_CLASS = (
    '@recipe("grpo")\n',
    "class MyLoss(training.PolicyLoss):\n"
    "    def losses(self, log_probs, values):\n"
    "        return -log_probs * values['advantage'] * values['weight']\n\n\n"
    '@recipe("grpo")\n',
)


def test_own_loss_in_a_copied_recipe(grpo: Bench) -> None:
    """Four lines; on policy, the loss of REINFORCE has the gradient of GRPO."""
    grpo.complete(*DIGITS, *FLOAT64, "training.max_steps=3", "run.dir=ours")
    grpo.copy("grpo.py", OWN_LOSS, OWN_CLASS)
    grpo.complete(*DIGITS, *FLOAT64, "training.max_steps=3", "run.dir=own")
    assert_same_answers(grpo, "own", "ours")
    for own, expected in zip(grpo.lines("own", "loss"), grpo.lines("ours", "loss"), strict=True):
        assert own["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-12)
        assert own["loss"] != pytest.approx(expected["loss"], abs=1e-6)


def test_adapters_and_a_frozen_copy_are_the_same_reference(grpo: Bench) -> None:
    """The divergence from the reference begins at 0 and grows, with adapters off, and with a second copy."""
    common = (*DIGITS, *FLOAT64, "objective.beta=0.1", "training.max_steps=4")
    for name, peft in (("adapters", "peft=lora"), ("copy", "peft=none")):
        grpo.complete(*common, peft, *MESHES["fsdp2"], f"run.dir={name}")
        divergences = [line["kl"] for line in grpo.lines(name, "kl")]
        assert divergences[0] == pytest.approx(0, abs=1e-15)
        assert divergences == sorted(divergences)
        assert divergences[-1] > 1e-5


def test_adapter_goes_from_fine_tuning_to_rewards_alike_on_every_mesh(grpo: Bench) -> None:
    """The first answers are those of the fine-tuned model, and the exported adapter is continued once more."""
    write_rows(grpo.folder / "texts.jsonl", [{"text": f"{number}: " + "12345678 " * 3} for number in range(40)])
    adapted = (*FLOAT64, "peft=lora", "peft.rank=4", "peft.modules_to_save=[embed_tokens,lm_head]")
    texts = ("data=text", "data.path=texts.jsonl", "training.seq_len=32", "training.max_steps=20", "cluster.device=cpu")
    tuning = (*texts, *adapted, *MESHES["single"], "optimizer.lr=3e-2", "generation.samples=0")
    grpo.copy("finetune.py")
    grpo.complete(*tuning, "run.dir=tuned", "training.eval_every=0", "checkpoint.export=true")
    grpo.copy("grpo.py")
    rewarded = (*DIGITS, *adapted, "training.max_steps=3", "checkpoint.export=true")
    grpo.complete(*rewarded, *MESHES["single"], "run.dir=new")
    grpo.complete(*rewarded, *MESHES["single"], "run.dir=single", "peft.path=tuned")
    grpo.complete(*rewarded, *MESHES["tp2"], "run.dir=tp2", "peft.path=tuned/adapter")
    assert_same_answers(grpo, "tp2", "single")
    assert rewards(grpo, "single")[0] > rewards(grpo, "new")[0] + 0.2  # the adapter writes digits
    done = grpo.complete(*rewarded, *MESHES["fsdp2"], "run.dir=more", "peft.path=tp2", "training.max_steps=1")
    assert "adapter from tp2, trained over these base weights" in " ".join(done.output.split())
    refused = grpo.run(*rewarded, *MESHES["single"], "run.dir=no", "peft.path=tuned", "objective.beta=0.1")
    assert refused.status == 2
    assert "objective.beta=0.1: its reference, the model without adapters, is not the one" in refused.errors


@in_torture
@pytest.mark.timeout(7200)
def test_run_survives_kills_at_random_moments_on_changing_meshes(grpo: Bench) -> None:
    """50 kills; each resume is on another mesh, and the answers are those of an uninterrupted run."""
    steps, draw, kills = 40, random.Random(0), 0
    arguments = (*DIGITS, *FLOAT64, f"training.max_steps={steps}", "rollouts.batches=2")
    grpo.complete(*arguments, *MESHES["single"], "run.dir=whole")
    wanted, round_ = int(os.environ.get("MESHBOOK_KILLS", "50")), 0
    names = [name for name in MESHES if "4proc" not in MESHES[name][-1]]
    while kills < wanted:
        run, begun = f"killed{round_}", 0
        while begun < steps - 2 and kills < wanted:
            mesh = MESHES[draw.choice(names)]
            began = begun
            killed_after(grpo, (*arguments, *SAVES, *mesh), run, begun + 1, draw.random() * 1.5)
            kills += 1
            logged = (grpo.folder / run / "metrics.jsonl").read_text().count('"loss"')
            assert logged > began - 2, f"kill {kills}: {began} steps, then {logged}"
            begun = logged
        done: Done = grpo.complete(*arguments, *SAVES, *MESHES[draw.choice(names)], f"run.dir={run}")
        assert done.status == 0
        assert_same_answers(grpo, run, "whole")
        round_ += 1
