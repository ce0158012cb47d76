"""Show the answers that a run of recipes/grpo.py was trained on, with their rewards.

python scripts/rollouts.py outputs/grpo/RUN                          # the last batch: best and worst of each prompt
python scripts/rollouts.py outputs/grpo/RUN --step 12 --prompts 3    # the batch of step 12, three of its prompts
python scripts/rollouts.py outputs/grpo/RUN --step 12 --all          # every answer to each prompt
python scripts/rollouts.py outputs/grpo/RUN --step 12 --json         # one JSON object per answer, of the whole batch

Prompts are sorted by how much the rewards of their answers differ. Exit status 2 for an invalid command line, or a run
without answers.
"""

from __future__ import annotations

import json
import math
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from components import models
from components.config.compose.frozen import read_frozen
from components.config.schema import GrpoConfig
from components.config.schema.rollouts import RewardFunctionsConfig
from components.presentation import PlainConsole, new_table, number_text
from components.protocol.errors import EXIT_INTERRUPTED, EXIT_INVALID, ConfigError
from components.protocol.failures import print_problems
from components.protocol.run_files import CONFIG, ROLLOUTS
from components.terminal import HelpText, exit_with, print_text
from components.training.answers import Answers

_WIDTH = 200
"""Columns of a table that is not printed on a terminal."""


def main(arguments: list[str]) -> int:
    """Print a table of answers, or JSON; return the exit status."""
    parser = ArgumentParser(description=__doc__, formatter_class=HelpText)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run directory of recipes/grpo.py")
    parser.add_argument("--step", type=int, metavar="N", help="optimizer step that trained on them; default: the last")
    parser.add_argument("--prompts", type=int, metavar="N", default=5, help="most prompts to show (default: 5)")
    parser.add_argument("--all", action="store_true", help="all answers to each prompt, not the best and the worst")
    parser.add_argument("--json", action="store_true", help="one JSON object per line for each answer of the batch")
    options = parser.parse_args(arguments)
    try:
        cfg = read_frozen(options.run_dir / CONFIG, GrpoConfig)
        answers, step = _batch(options.run_dir, options.step, cfg.rollouts.updates)
        rows = _rows(answers, models.load_tokenizer(cfg.model), cfg.reward)
    except ConfigError as error:
        print_problems(error.problems)
        return EXIT_INVALID
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    if options.json:
        for row in rows:
            # In ASCII, and without DEL: control characters that `print_text` escapes would be no JSON.
            print_text(json.dumps(row).replace("\x7f", "\\u007f"))
        return 0
    _print(rows, answers.group, options.prompts, every=options.all)
    print_text(f"{len(rows)} answers to {len(answers.prompts)} prompts, first trained on in step {step}")
    return 0


def _batch(run_dir: Path, step: int | None, updates: int) -> tuple[Answers, int]:
    """Return the answers that a step trained on, and the first of the `updates` steps that did.

    Raises ConfigError if there are none.
    """
    files = {int(file.stem): file for file in (run_dir / ROLLOUTS).glob("*.safetensors") if file.stem.isdecimal()}
    first = max((number for number in files if step is None or step - updates < number <= step), default=None)
    if first is None:
        last = max(files, default=0) + updates - 1
        found = f"it has those of steps {min(files)} to {last}" if files else "it has none"
        raise ConfigError(f"{run_dir}: has no answers{'' if step is None else f' of step {step}'}; {found}")
    try:
        return Answers.read(files[first])[0], first
    except (OSError, ValueError, LookupError) as error:
        raise ConfigError(f"{files[first]}: cannot be read ({error})") from error


def _rows(answers: Answers, tokenizer: Any, cfg: RewardFunctionsConfig) -> list[dict[str, Any]]:
    """Return the values of each answer by name. A reward of None: the answer has none."""
    rows, names, scores = [], [*cfg.functions, "overlong"], answers.scores(cfg.weights).tolist()
    for place, tokens in enumerate(answers.tokens):
        number = place // answers.group
        of_functions = dict(zip(names, map(_known, answers.rewards[:, place].tolist()), strict=False))
        rows.append({
            "prompt_number": answers.samples[number],
            "prompt": tokenizer.decode(answers.prompts[number], skip_special_tokens=True),
            "answer": tokenizer.decode(tokens, skip_special_tokens=True),
            "reward": _known(scores[place]),
            "rewards": of_functions,
            "tokens": len(tokens),
            "ended": answers.ended[place],
        })  # fmt: skip
    return rows


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _print(rows: list[dict[str, Any]], group: int, prompts: int, *, every: bool) -> None:
    """Print a table of the prompts whose answers differ most in their rewards."""
    scores = [-math.inf if row["reward"] is None else row["reward"] for row in rows]
    groups = [range(start, start + group) for start in range(0, len(rows), group)]

    def spread(places: range) -> float:
        known = [scores[place] for place in places if scores[place] > -math.inf]
        return max(known) - min(known) if known else -1.0

    table = new_table(("prompt", "reward", "tokens", "answer"), (0, 3), wrap=True)
    for places in sorted(groups, key=spread, reverse=True)[:prompts]:
        order = sorted(places, key=lambda place: -scores[place])  # without a reward last
        for number, place in enumerate(order if every else [order[0], order[-1]]):
            row = rows[place]
            cut = "" if row["ended"] else " (cut)"
            reward = "none" if row["reward"] is None else number_text(row["reward"], ".4g")
            texts = (row["prompt"] if number == 0 else "", reward, f"{row['tokens']}{cut}")
            table.add_row(*texts, row["answer"])
    PlainConsole(highlight=False, width=None if sys.stdout.isatty() else _WIDTH).print(table)


if __name__ == "__main__":
    exit_with(main)
