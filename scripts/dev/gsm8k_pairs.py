"""Preference pairs from GSM8K: worked answers that stop before the last result, with the right and a wrong result.

python scripts/dev/gsm8k_pairs.py gsm8k/train.jsonl pairs.jsonl      # all problems with whole-number results
python scripts/dev/gsm8k_pairs.py gsm8k/train.jsonl pairs.jsonl --pairs 600 --max-length 400
python recipes/dpo.py data.path=pairs.jsonl peft=lora

Both answers of a pair are the problem's own reasoning up to the last equals sign, then "#### RESULT". The rejected one
has the result of another problem with as many digits: results are permuted among the problems, so each occurs as often
in rejected answers as in chosen ones, and the numbers alone do not tell them apart. A model has to compute the last
equation.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from pathlib import Path

from components.terminal import HelpText

CALCULATION = re.compile(r"<<[^>]*>>")
"""GSM8K's calculator annotations, such as <<48/2=24>>."""


def make_pairs(rows: list[dict[str, str]], seed: int, max_length: int | None = None) -> list[dict[str, str]]:
    """Return pairs (prompt, chosen, rejected) of the rows (question, answer) that end in an equation.

    Args:
        seed: Order of the problems, and permutation of the results.
        max_length: Maximum number of characters of a question and its reasoning together; None: no limit.
    """
    problems = [(row["question"], *_split(row["answer"])) for row in rows]
    problems = [
        (question, steps, result)
        for question, steps, result in problems
        if steps and result.isdecimal() and (max_length is None or len(question) + len(steps) <= max_length)
    ]
    rng = random.Random(seed)
    rng.shuffle(problems)
    others: dict[int, list[str]] = {}  # results by their number of digits
    for _, _, result in problems:
        others.setdefault(len(result), []).append(result)
    for results in others.values():
        rng.shuffle(results)
    pairs = []
    for question, steps, result in problems:
        other = others[len(result)].pop()
        if other != result:
            pairs.append(
                {"prompt": question, "chosen": f"{steps}\n#### {result}", "rejected": f"{steps}\n#### {other}"}
            )
    return pairs


def _split(answer: str) -> tuple[str, str]:
    """Return the reasoning up to the last line's last equals sign, and the result; "" for reasoning without one."""
    reasoning, _, result = answer.rpartition("####")
    *steps, last = CALCULATION.sub("", reasoning).strip().splitlines() or [""]
    equation, equals, _ = last.rpartition("=")
    return "\n".join([*steps, equation.rstrip()]) if equals else "", result.strip().replace(",", "")


def main(arguments: list[str]) -> int:
    """Write the pairs as JSON lines; exit 2 if the input is not GSM8K."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpText)
    parser.add_argument("source", type=Path, help="GSM8K as JSON lines with the keys question and answer")
    parser.add_argument("target", type=Path, help="file to write")
    parser.add_argument("--pairs", type=int, help="number of pairs; default: all")
    parser.add_argument(
        "--max-length", type=int, help="maximum number of characters of question and reasoning together"
    )
    parser.add_argument("--seed", type=int, default=0, help="order of the problems and permutation of the results")
    args = parser.parse_args(arguments)
    try:
        rows = [json.loads(line) for line in args.source.read_text().splitlines() if line.strip()]
        pairs = make_pairs(rows, args.seed, args.max_length)[: args.pairs]
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"{args.source}: not JSON lines with the keys question and answer ({error!r})", file=sys.stderr)
        return 2
    if not pairs:
        print(f"{args.source}: no problem ends in an equation with a whole number as result", file=sys.stderr)
        return 2
    args.target.write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    print(f"{len(pairs):,} pairs in {args.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
