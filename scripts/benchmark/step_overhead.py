"""Overhead of a training step over a bare PyTorch loop on the same model, for Meshbook and the Hugging Face Trainer.

python scripts/benchmark/step_overhead.py                       # hidden 256, 128 tokens per row; and the tiny model
python scripts/benchmark/step_overhead.py --rounds 9 --steps 20 --out outputs/benchmark

One process, one thread, float32, the same weights, batches, clipping, AdamW kernel and learning rate. In every round
each arm (loop) runs `--steps` steps; the overhead is the median over the rounds of the ratio of processor times, which
are reliable on a machine that other processes use too. Meshbook's arm does everything that the loop of
recipes/finetune.py does per step: it takes a batch, sets the learning rate, steps, and reads loss, norm and requests.
An arm is void if its losses differ from the bare loop's by more than 1e-5 (relative) in the first 50 steps. Later,
rounding has grown too much for a comparison.

A second table compares the processor time of the training thread to get a batch when it assembles the batch in place,
and when another thread assembles it one step ahead (training.ReadAhead).
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from components import data, distributed, models, training
from components.config.schema import ParallelismConfig, Strategy
from components.config.schema.optimizer import AdamWConfig, OptimizerConfig, Schedule
from components.terminal import HelpText, fit
from scripts.benchmark.compare_report import FLOAT32_BOUND, GATED_STEPS, gated_difference

LR, VOCABULARY = 1e-3, 2048
OPTIMIZER = AdamWConfig(lr=LR, weight_decay=0.0, schedule=Schedule.constant)
SHAPES = {"hidden 256, 128 tokens per row": (256, 4, 4, 128), "tiny: hidden 64, 64 tokens per row": (64, 2, 4, 64)}
"""Name -> hidden size, layers, rows per step, tokens per row."""
BATCHES = {**SHAPES, "tiny: hidden 64, 8 x 512 tokens": (64, 2, 8, 512)}
"""The same for the table of batches."""

Run = Callable[[range], tuple[float, list[float]]]
"""Function that does the optimizer steps with the given numbers, and returns their processor seconds and losses."""


@dataclass
class Arm:
    """A training loop with its measurements."""

    run: Run
    seconds: list[float] = field(default_factory=list)
    """Processor seconds per step, in each round."""
    losses: list[float] = field(default_factory=list)
    """Losses of all steps."""

    def turn(self, steps: int) -> None:
        """Continue training for some steps."""
        seconds, losses = self.run(range(len(self.losses), len(self.losses) + steps))
        self.seconds.append(seconds / steps)
        self.losses += losses


def main() -> None:
    """Print a table, and write it to --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpText)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=None, help="folder for step_overhead.md")
    options = parser.parse_args()
    if options.rounds < 1 or (options.rounds + 1) * options.steps < GATED_STEPS:
        parser.error(
            f"--rounds and --steps: (rounds + 1) * steps must be at least {GATED_STEPS}, the number of compared steps"
        )
    torch.set_num_threads(1)
    distributed.start_process_group("cpu")
    lines = [
        "| model | loop | processor ms per step | overhead over bare loop | worst loss difference in 50 steps |",
        "|---|---|---|---|---|",
    ]
    for name, (hidden, layers, rows, tokens) in SHAPES.items():
        arms = measure(arms_of(hidden, layers, rows, tokens), options.rounds, options.steps)
        lines += [row(name, label, arm, arms["bare PyTorch"]) for label, arm in arms.items()]
    lines += [
        "",
        "| model | ms of the training thread per batch: in place | one step ahead | ratio | whole step, ratio |",
        "|---|---|---|---|---|",
        *(batch_row(name, *shape, options.rounds, options.steps) for name, shape in BATCHES.items()),
    ]
    print(fit("\n".join(lines)))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "step_overhead.md").write_text("\n".join(lines) + "\n")


def measure(arms: dict[str, Arm], rounds: int, steps: int) -> dict[str, Arm]:
    """Run all rounds, interleaving the arms; the first round is warm-up and not measured."""
    for _ in range(rounds + 1):
        for arm in arms.values():
            arm.turn(steps)
    for arm in arms.values():
        del arm.seconds[0]
    return arms


def row(model: str, label: str, arm: Arm, bare: Arm) -> str:
    """Return a line of the table."""
    ratio = statistics.median(mine / theirs for mine, theirs in zip(arm.seconds, bare.seconds, strict=True))
    difference = gated_difference(arm.losses, bare.losses)
    overhead = f"{ratio - 1:+.1%}" if difference <= FLOAT32_BOUND else "void: losses differ"
    return f"| {model} | {label} | {1e3 * statistics.median(arm.seconds):.2f} | {overhead} | {difference:.1e} |"


def batch_row(model: str, hidden: int, layers: int, rows: int, tokens: int, rounds: int, steps: int) -> str:
    """Return a line of the table of batches; both arms run in every round."""
    start, batches = start_of(hidden, layers, rows, tokens)
    spent: list[list[float]] = [[], []]
    arms = [Arm(ours(copy.deepcopy(start), batches, ahead=ahead, spent=spent[ahead])) for ahead in (False, True)]
    measure(dict(zip(("in place", "ahead"), arms, strict=True)), rounds, steps)
    if arms[0].losses != arms[1].losses:
        return f"| {model} | void: losses differ | | | |"
    in_place, ahead = (1e3 * statistics.median(each) for each in spent)
    processor = statistics.median(b / a for a, b in zip(arms[0].seconds, arms[1].seconds, strict=True))
    return f"| {model} | {in_place:.3f} | {ahead:.3f} | {ahead / in_place:.2f} | {processor:.2f} |"


def arms_of(hidden: int, layers: int, rows: int, tokens: int) -> dict[str, Arm]:
    """Return the arms of one shape, starting from the same weights and batches."""
    model, batches = start_of(hidden, layers, rows, tokens)
    loops = {"bare PyTorch": bare, "Meshbook": ours}
    if importlib.util.find_spec("accelerate") is None:
        print("Hugging Face Trainer: not measured, the package accelerate is not installed")
    else:
        loops["Hugging Face Trainer"] = trainer
    return {label: Arm(loop(copy.deepcopy(model), batches)) for label, loop in loops.items()}


def start_of(hidden: int, layers: int, rows: int, tokens: int) -> tuple[Any, data.TrainBatches]:
    """Return a model with random weights and the batches of one shape."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    model = AutoModelForCausalLM.from_config(config)
    models.use_causal_sdpa(model)
    samples = [torch.randint(VOCABULARY, (tokens,)).tolist() for _ in range(64 * rows)]
    plan = data.BatchPlan(global_batch_size=rows, micro_batch_size=rows)
    batches = data.TrainBatches([data.Example(ids, ids) for ids in samples], plan, seed=0)
    return model, batches


def bare(model: torch.nn.Module, batches: data.TrainBatches) -> Run:
    """Return the minimal equivalent loop: batches are prepared beforehand, and losses are read once, at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def run(steps: range) -> tuple[float, list[float]]:
        losses, prepared = [], [batches.at(step)[0] for step in steps]
        began = time.process_time()
        for batch in prepared:
            logits = model(input_ids=batch.input_ids).logits
            loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return time.process_time() - began, torch.stack(losses).tolist()

    return run


def ours(
    model: Any,
    batches: data.TrainBatches,
    config: OptimizerConfig = OPTIMIZER,
    *,
    ahead: bool = True,
    spent: list[float] | None = None,
) -> Run:
    """Return the loop of recipes/finetune.py in one process.

    Args:
        ahead: Whether a thread assembles the batches one step ahead, as in a run.
        spent: Receives the processor seconds that this thread spent to get each batch.
    """
    batches = copy.copy(batches)  # with a cursor of its own
    parallelism = ParallelismConfig(strategy=Strategy.single, dp_shard=1)
    mesh = distributed.build_mesh(parallelism, "cpu")
    layout = distributed.parallelize(model, mesh, parallelism, torch.float32)
    replica = distributed.wrap_replicas(model, mesh, parallelism, layout)
    optimizer = training.build_optimizer(model, config)
    settings = training.StepSettings(device=torch.device("cpu"), max_grad_norm=1.0, mesh=mesh)

    def run(steps: range) -> tuple[float, list[float]]:
        reader, arrived = training.StepReader(lag=1), []
        began = time.process_time()
        with training.ReadAhead(batches, len(steps), settings.device) if ahead else nullcontext(batches) as upcoming:
            for step in steps:
                started = time.perf_counter()
                training.set_learning_rate(optimizer, config, step, 10**9)
                before = time.thread_time()
                batch = next(upcoming)
                if spent is not None:
                    spent.append(time.thread_time() - before)
                numbers = training.train_step(training.Prepared(model, settings, replica), batch, optimizer)
                arrived += reader.push(step, numbers, started)
        arrived += reader.flush()
        return time.process_time() - began, [metrics.loss for metrics in arrived]

    return run


def trainer(model: Any, batches: data.TrainBatches) -> Run:
    """Return a loop by transformers.Trainer, without evaluation, logs and saves.

    Each round creates a new Trainer; only its steps are timed.
    """
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments, logging

    logging.set_verbosity_error()

    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    folder = tempfile.mkdtemp(prefix="step_overhead-")

    class Clock(TrainerCallback):
        times: list[float]

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.times.append(time.process_time())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.times.append(time.process_time())

    class RecordingTrainer(Trainer):  # type: ignore[misc]
        losses: list[torch.Tensor]

        def compute_loss(self, *arguments: Any, **options: Any) -> Any:
            loss = super().compute_loss(*arguments, **options)
            self.losses.append(loss.detach())
            return loss

        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    def run(steps: range) -> tuple[float, list[float]]:
        rows = [batches.at(step)[0] for step in steps]
        samples = [
            {"input_ids": ids, "labels": F.pad(targets[:-1], (1, 0), value=-100)}  # the Trainer shifts them back
            for row in rows
            for ids, targets in zip(row.input_ids, row.targets, strict=True)
        ]
        arguments = TrainingArguments(
            folder,
            max_steps=len(steps),
            per_device_train_batch_size=rows[0].shape[0],
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
            save_strategy="no",
        )
        constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        clock, recording = (
            Clock(),
            RecordingTrainer(model, arguments, train_dataset=samples, optimizers=(optimizer, constant)),
        )
        clock.times, recording.losses = [], []
        recording.add_callback(clock)
        recording.remove_callback(PrinterCallback)
        recording.train()
        return clock.times[-1] - clock.times[0], torch.stack(recording.losses).tolist()

    return run


if __name__ == "__main__":
    main()
