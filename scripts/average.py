"""Merge the weights of checkpoints, exports and adapters of one architecture, and export the result for transformers.

python scripts/average.py outputs/finetune/RUN                          # all checkpoints that the run keeps
python scripts/average.py outputs/finetune/RUN --steps 100 200          # these two
python scripts/average.py outputs/finetune/RUN --weights 1 2 3          # one weight for each checkpoint, oldest first
python scripts/average.py outputs/finetune/A outputs/finetune/B --out mine           # the checkpoints of both runs
python scripts/average.py A/checkpoints/step_40 B/checkpoints/step_60 C/export --out mine
python scripts/average.py A/adapter B/adapter --method task-arithmetic --weights 0.7 0.5 --out mine
python scripts/average.py A B --method ties --base Qwen/Qwen3-0.6B --density 0.2 --out mine

average is the weighted mean. The other methods merge what training changed, W - B, with the weights B of the base
model: task-arithmetic adds the weighted changes to B (Ilharco et al. 2023); ties first keeps the share --density of the
largest changes of each tensor, and then averages those of the sign of their sum, each with its weight (Yadav et al.
2023).

Raise checkpoint.keep for a run whose checkpoints you want to average. Runs in one process without a GPU. Checkpoints
are verified first, and LoRA adapters are merged into the base weights before. Weights are read block by block, summed
in float64 and cast at the end, so that no model need fit into memory. Config, tokenizer and what training leaves as it
is (encoders, mtp.*) are those of the first source. Exit status 0, or 2 for an invalid command line, a damaged
checkpoint or models that differ.
"""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from components.protocol.errors import ConfigError
from components.protocol.run_files import CHECKPOINTS
from components.terminal import HelpText, exit_with
from scripts._export.object_output import output_folder, removed_on, upload_output
from scripts._export.options import add_output_options, check_output_options, run_export
from scripts._export.sources import Changes, find_sources, open_base, open_sources, read_average

METHODS = ("average", "task-arithmetic", "ties")
"""Values of --method."""


def read_options(arguments: list[str]) -> Namespace:
    """Parse the options, and validate those that do not depend on the checkpoints. Raises ConfigError."""
    parser = ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=HelpText)
    parser.add_argument("sources", type=Path, nargs="+", metavar="RUN_DIR_CHECKPOINT_EXPORT_OR_ADAPTER")
    parser.add_argument("--steps", type=int, nargs="+", default=[], help="steps of the checkpoints of each run")
    parser.add_argument("--weights", type=float, nargs="+", help="a weight for each source (default: all equal)")
    parser.add_argument("--method", choices=METHODS, default="average", help="how to merge (default: average)")
    parser.add_argument("--base", help="base model (a folder, .gguf file or hub name; default: that of the adapters)")
    parser.add_argument(
        "--density", type=float, help="for ties: share of the changes to keep, in (0, 1] (default: 0.2)"
    )
    add_output_options(parser, "RUN_DIR/average-step_A-step_B; needed for several runs", "that of the first")
    options = parser.parse_args(arguments)
    check_output_options(options)
    if options.density is not None and (options.method != "ties" or not 0 < options.density <= 1):
        raise ConfigError(f"--density {options.density:g}: must be in (0, 1], and only --method ties has it")
    if options.base is not None and options.method == "average":
        raise ConfigError(f"--base {options.base}: --method average needs none; leave it out, or choose another method")
    return options


def average(options: Namespace) -> Path:
    """Export the average and return the new folder. Raises ConfigError."""
    paths = find_sources(options.sources, options.steps)
    is_mean = options.method == "average"
    weights = _weights(options.weights, paths, is_mean=is_mean)
    default = paths[0].parent if options.out else _default_folder(paths)
    folder = output_folder(options.out, default, paths[0].parent.parent)

    import torch

    from components import models

    sources = open_sources(paths, trust_remote_code=options.trust_remote_code)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    read = partial(read_average, sources, weights)
    if not is_mean:
        base = open_base(options.base, sources, trust_remote_code=options.trust_remote_code)
        density = (options.density or 0.2) if options.method == "ties" else None
        read = Changes(base, sources, weights, density).read

    with removed_on(BaseException, folder, options.out):
        try:
            return models.export_stored(
                sources[0].model,
                sources[0].tokenizer,
                folder,
                read,
                dtype=dtype,
                shard_bytes=options.shard_bytes,
                card=_card(paths, weights, options),
            )
        except OSError as error:
            raise ConfigError(f"--out {folder}: the average could not be written: {error}") from error
        except NotImplementedError as error:
            raise ConfigError(f"{paths[0]}: {error}") from error


def _weights(weights: Sequence[float] | None, paths: Sequence[Path], *, is_mean: bool) -> list[float]:
    """Return the given weights, or equal ones; those of a mean are divided by their sum. Raises ConfigError."""
    if weights is None:
        return [1 / len(paths) if is_mean else 1.0] * len(paths)
    if len(weights) != len(paths):
        found = ", ".join(f"{path.parent.parent.name}/{path.name}" for path in paths)
        raise ConfigError(f"--weights: {len(weights)} given for {len(paths)} checkpoints; give one each, for {found}")
    if invalid := [weight for weight in weights if not (math.isfinite(weight) and weight > 0)]:
        raise ConfigError(f"--weights {invalid[0]:g}: each weight must be a finite number above 0")
    return [weight / math.fsum(weights) for weight in weights] if is_mean else list(weights)


def _default_folder(paths: Sequence[Path]) -> Path:
    """Return the folder in the run directory of all checkpoints. Raises ConfigError if there is more than one run."""
    parents = {path.parent for path in paths}
    if len(parents) > 1 or paths[0].parent.name != CHECKPOINTS:
        raise ConfigError("--out: needed, because the weights are not those of one run; give a new folder")
    return paths[0].parent.parent / f"average-{paths[0].name}-{paths[-1].name}"


def _card(paths: Sequence[Path], weights: Sequence[float], options: Namespace) -> str:
    """Return the section of the model card that lists the merged weights, in Markdown."""
    title, share = "## Averaged weights", "share"
    if options.method != "average":
        title, share = f"## Merged weights\n\nMerged by {options.method}.", "weight"
    rows = []
    for path, weight in zip(paths, weights, strict=True):
        source = path.parent.parent if path.parent.name == CHECKPOINTS else path.parent
        rows.append(f"| {source.name}/{path.name} | {weight:.6g} |")
    return "\n".join([title, "", f"| weights | {share} |", "|---|---|", *rows])


def main(arguments: list[str]) -> int:
    """Export the average, and print the folder and its size; return the exit status."""
    out: str | None = None

    def check_and_average() -> Path:
        nonlocal out
        options = read_options(arguments)
        out = options.out
        return average(options)

    return run_export(check_and_average, lambda folder: upload_output(folder, out))


if __name__ == "__main__":
    exit_with(main)
