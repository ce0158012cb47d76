"""Score the answers of preference data with an exported reward model, and print how often the chosen answer wins.

python scripts/score.py outputs/classify/RUN/export pairs.jsonl                # rewards to outputs/score
python scripts/score.py EXPORT pairs.jsonl --out rewards.jsonl --batch-size 16 --device cuda
python scripts/score.py EXPORT pairs.jsonl --chosen-column better --rejected-column worse

Each line of the output has the row number and the rewards of the chosen and the rejected answer; lines are written as
soon as they are computed. A reward is that of the last token of the chat template's text, as in training and in
transformers; an answer longer than --seq-len is cut. Pairs whose answers then have the same tokens do not count for the
accuracy. Runs AutoModelForSequenceClassification in one process. Exit status 0, or 2 for an invalid command line or
file.
"""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from components.config.schema.data import BadRows, PreferencesDataConfig
from components.protocol.errors import EXIT_INTERRUPTED, EXIT_INVALID, ConfigError
from components.protocol.failures import print_problems
from components.protocol.run_files import open_new
from components.protocol.safe_parsing import load_json
from components.terminal import HelpText, exit_with, print_text

if TYPE_CHECKING:
    import torch

    from components.data.sources.rows import BadRowReport, Conversation


def read_options(arguments: list[str]) -> Namespace:
    """Parse the options, and validate those that do not need torch. Raises ConfigError."""
    parser = ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=HelpText)
    parser.add_argument("model", type=Path, metavar="EXPORT", help="folder with a reward model")
    parser.add_argument("data", type=Path, metavar="FILE", help="rows of prompt, chosen, rejected")
    parser.add_argument("--out", type=Path, help="file with a line per row (default: outputs/score/FILE.rewards.jsonl)")
    parser.add_argument("--prompt-column", help="as data.prompt_column")
    parser.add_argument("--chosen-column", help="as data.chosen_column")
    parser.add_argument("--rejected-column", help="as data.rejected_column")
    parser.add_argument("--batch-size", type=int, default=8, help="pairs per forward (default: 8)")
    parser.add_argument("--seq-len", type=int, default=2048, help="most tokens of an answer with its prompt")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda or cuda:N")
    options = parser.parse_args(arguments)
    problems = [
        f"--{name.replace('_', '-')} {value}: must be at least 1"
        for name, value in (("batch_size", options.batch_size), ("seq_len", options.seq_len))
        if value < 1
    ]
    problems += _model_problems(options.model)
    if not options.data.is_file():
        problems.append(f"{options.data}: no such file")
    if options.out is None:  # not beside the data
        options.out = Path("outputs", "score", options.data.with_suffix(".rewards.jsonl").name)
        options.out.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(options.out):
        problems.append(f"--out {options.out}: exists; choose another file, or remove it")
    elif not options.out.parent.is_dir():
        problems.append(f"--out {options.out}: no folder {options.out.parent}; create it, or choose another file")
    if problems:
        raise ConfigError(problems)
    return options


def _model_problems(folder: Path) -> list[str]:
    try:
        config = load_json(folder / "config.json")
        architectures, labels = config.get("architectures") or [""], config.get("id2label") or {}
    except (OSError, ValueError, AttributeError) as error:
        return [f"{folder}: its config.json cannot be read ({error}); name a folder that recipes/classify.py exported"]
    if not str(architectures[0]).endswith("ForSequenceClassification") or len(labels) != 1:
        return [
            f"{folder}: is a {architectures[0]} with {len(labels)} labels, not a reward model; name the export of a "
            "run with objective=reward"
        ]
    return []


def score(options: Namespace) -> Counter[str]:
    """Write the rewards, and return the number of pairs, of those that are equal, and of those that are won.

    Raises ConfigError for a row that is no pair, or a device that does not exist.
    """
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging

    from components.data.sources.rows import BadRowReport

    try:
        torch.zeros(1, device=options.device)
    except (RuntimeError, AssertionError) as error:  # torch's CPU build raises AssertionError for cuda
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"--device {options.device}: cannot be used: {reason}; set --device cpu") from error
    logging.disable_progress_bar()  # of the weights, a second
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    try:
        model: Any = AutoModelForSequenceClassification.from_pretrained(options.model).to(options.device).eval()
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{options.model}: cannot be loaded on {options.device}: {error}") from error
    cfg = PreferencesDataConfig(
        path=str(options.data),
        prompt_column=options.prompt_column,
        chosen_column=options.chosen_column,
        rejected_column=options.rejected_column,
        bad_rows=BadRows.drop,  # reported below
    )
    bad = BadRowReport()
    try:
        output = open_new(options.out)
    except OSError as error:
        raise ConfigError(f"--out {options.out}: cannot be created: {error.strerror}; choose another file") from error
    with output:
        try:
            unscored = BadRowReport()
            answers = zip(*_answers(cfg, bad), strict=True)
            counts = _write_rewards(model, tokenizer, answers, options, unscored, output)
            bad.add(unscored.problems, unscored.count)
            if bad.count:
                count = "1 row is no pair" if bad.count == 1 else f"{bad.count:,} rows are no pairs"
                raise ConfigError(f"{options.data}: {count}; correct or remove such rows:{bad}")
        except ConfigError:
            options.out.unlink(missing_ok=True)  # incomplete; the corrected command would be rejected for it
            raise
    return counts


def _write_rewards(
    model: Any,
    tokenizer: Any,
    answers: Iterator[tuple[Conversation, ...]],
    options: Namespace,
    bad: BadRowReport,
    output: IO[bytes],
) -> Counter[str]:
    """Write a line per pair, and return the counts of `score`. After a bad row, only further ones are looked for."""
    import torch

    from components.data.examples import REJECTED
    from components.data.sources.rows import BadRowReport
    from components.data.sources.text import encode_scored

    counts: Counter[str] = Counter()
    with torch.inference_mode():
        while batch := list(islice(answers, options.batch_size)):
            of_batch = BadRowReport()
            encoded = encode_scored(tokenizer, [answer for pair in batch for answer in pair], bad=of_batch)
            pairs = list(zip(encoded[0::2], encoded[1::2], strict=True))
            bad.add(of_batch.problems, sum(any(answer is REJECTED for answer in pair) for pair in pairs))
            if bad.count:
                continue
            samples = [each.input_ids[:-1][: options.seq_len] for each in encoded]  # without the padding token
            rewards = _rewards(model, tokenizer.pad_token_id, samples, options.device).view(-1, 2)
            for (chosen, rejected), first, second in zip(rewards.tolist(), samples[0::2], samples[1::2], strict=True):
                line = {"row": counts["pairs"], "chosen": chosen, "rejected": rejected}
                output.write(f"{json.dumps(line)}\n".encode())
                counts.update(pairs=1, equal=first == second, won=first != second and chosen > rejected)
            output.flush()
    return counts


def _answers(cfg: PreferencesDataConfig, bad: BadRowReport) -> list[Iterator[Conversation]]:
    """Return the conversations with the chosen answers and those with the rejected ones; report bad rows in `bad`."""
    from components.data.sources.columns import answer_configs, each_answer
    from components.data.sources.rows import BadRowReport, train_location
    from components.data.sources.split import columns_at, rows_of

    location = train_location(cfg)
    return [
        each_answer(answers, rows_of(answers, location), report)
        for answers, report in zip(
            answer_configs(cfg, columns_at(cfg, location), location.path), (bad, BadRowReport()), strict=True
        )
    ]


def _rewards(model: Any, pad: int, samples: Sequence[list[int]], device: str) -> torch.Tensor:
    """Return the rewards of tokenized conversations, (rows,) float32 on the CPU."""
    import torch

    length = max(map(len, samples))
    ids = torch.full((len(samples), length), pad)  # (rows, seq)
    mask = torch.zeros_like(ids)
    for row, sample in enumerate(samples):
        ids[row, : len(sample)], mask[row, : len(sample)] = torch.tensor(sample), 1
    logits = model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
    return logits[:, 0].float().cpu()


def main(arguments: list[str]) -> int:
    """Score the file and print the accuracy; return the exit status."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        options = read_options(arguments)
        counts = score(options)
    except ConfigError as error:
        print_problems(error.problems)
        return EXIT_INVALID
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    equal = f" without {counts['equal']:,} of equal answers" if counts["equal"] else ""
    accuracy = counts["won"] / max(counts["pairs"] - counts["equal"], 1)
    print_text(f"{options.out}: {counts['pairs']:,} pairs, accuracy {accuracy:.2%}{equal}")
    return 0


if __name__ == "__main__":
    exit_with(main)
