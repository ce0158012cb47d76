"""Export a checkpoint, written on any mesh, to a folder that transformers can load.

python scripts/export.py outputs/finetune/RUN                                  # the newest checkpoint of the run
python scripts/export.py outputs/finetune/RUN/checkpoints/step_200 --out mine  # this checkpoint, to the folder mine
python scripts/export.py outputs/finetune/RUN --dtype bfloat16 --shard-size 2GB
python scripts/export.py outputs/finetune/RUN --adapter                        # only the LoRA adapters, in PEFT format

Runs in one process without a GPU. The checkpoint is verified first. The weights are then copied block by block, so that
the model need not fit into memory, and LoRA adapters are merged into the base weights from model.path. The folder
appears once it is complete. Exit status 0, or 2 for an invalid command line or a damaged checkpoint.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from components.config.compose.frozen import read_section
from components.config.errors import ConfigError
from components.config.schema import ModelConfig, PeftConfig, RunConfig
from components.config.schema.model import Attention, Float8
from components.config.schema.parallelism import describe_processes
from components.config.schema.peft import PeftExport
from components.protocol.exit_codes import EXIT_INTERRUPTED, EXIT_INVALID
from components.protocol.failures import print_problems
from components.terminal import print_text

DTYPES = ("bfloat16", "float16", "float32", "float64")
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def read_options(arguments: list[str]) -> Namespace:
    """Parse the options, and validate those that do not depend on the checkpoint. Raises ConfigError."""
    parser = ArgumentParser(
        prog="scripts/export.py", description=__doc__, allow_abbrev=False, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, metavar="CHECKPOINT_OR_RUN_DIR")
    parser.add_argument("--out", type=Path, help="new folder (default: RUN_DIR/export-step_N)")
    parser.add_argument("--adapter", action="store_true", help="write only the adapters, for PeftModel.from_pretrained")
    parser.add_argument("--shard-size", default="4GB", help="maximum size of a weight file (default: 4GB)")
    parser.add_argument("--dtype", help=f"dtype to write: {', '.join(DTYPES)} (default: as stored)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code from the model's repository")
    options = parser.parse_args(arguments)
    if options.dtype not in (None, *DTYPES):
        raise ConfigError(f"--dtype {options.dtype}: must be one of {', '.join(DTYPES)}")
    size = re.fullmatch(r"(\d+)\s*([a-z]*)", options.shard_size.strip(), re.IGNORECASE)
    if size is None or size[2].upper() not in UNITS or int(size[1]) == 0:
        raise ConfigError(f"--shard-size {options.shard_size}: must be a size such as 500MB, 4GB or 2GiB")
    options.shard_bytes = int(size[1]) * UNITS[size[2].upper()]
    return options


def export(options: Namespace) -> Path:
    """Export the checkpoint and return the new folder. Raises ConfigError."""
    import torch

    from components import models, observability
    from components.checkpoint import StoredWeights, choose_checkpoint
    from components.models.weights.names import saved_tensors

    checkpoint = choose_checkpoint(options.source.expanduser().resolve())
    run_dir = checkpoint.parent.parent
    folder = _new_folder(options.out or run_dir / f"{'adapter' if options.adapter else 'export'}-{checkpoint.name}")
    cfg = _config_of(run_dir, options)
    stored = StoredWeights(checkpoint)
    tokenizer = models.load_tokenizer(cfg.model)
    model = models.build_on_meta(cfg.model, len(tokenizer))
    models.add_adapters(model, dataclasses.replace(cfg.peft, export=PeftExport.both), exports=options.adapter)
    expected = saved_tensors(model)
    stored.check({name: each for name, each in expected.items() if each.requires_grad or not cfg.peft.adapts})
    state = {"step": stored.manifest.step, **stored.extra.get("state", {})}
    axes = dict(stored.manifest.mesh)
    world = axes.pop("world", 1)
    mesh = " x ".join(f"{axis}={size}" for axis, size in axes.items())
    mesh = f"{mesh} on {describe_processes(world)}" if mesh else describe_processes(world)
    card = observability.render_model_card(run_dir, state, mesh)
    try:
        if options.adapter:
            adapters = _adapters(model, stored)
            config = models.adapter_config(model, adapters, cfg.model, cfg.peft)
            models.write_adapter(tokenizer, folder, adapters, config, card)
            return folder
        return models.export_stored(
            model,
            tokenizer,
            folder,
            _merged(model, cfg, stored) if cfg.peft.adapts else stored.read,
            dtype=getattr(torch, options.dtype) if options.dtype else None,
            shard_bytes=options.shard_bytes,
            card=card,
        )
    except OSError as error:
        raise ConfigError(f"--out {folder}: the export could not be written: {error}") from error
    except NotImplementedError as error:
        raise ConfigError(f"{checkpoint}: {error}") from error


def _new_folder(folder: Path) -> Path:
    """Return the absolute path of the output folder. Raises ConfigError if it exists and is not empty."""
    folder = folder.expanduser().resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--out {folder}: exists and is not an empty folder; choose another one, or remove it")
    return folder


@dataclasses.dataclass(slots=True)
class _RunConfig:
    """The sections of a training run that an export needs, whatever its recipe."""

    run: RunConfig
    model: ModelConfig
    peft: PeftConfig


def _config_of(run_dir: Path, options: Namespace) -> _RunConfig:
    """Read the frozen config of the run and validate the options against it. Raises ConfigError."""
    file = run_dir / "config.yaml"
    cfg = _RunConfig(
        run=read_section(file, "run", RunConfig),
        model=read_section(file, "model", ModelConfig),
        peft=read_section(file, "peft", PeftConfig),
    )
    if cfg.model.trust_remote_code and not options.trust_remote_code:
        raise ConfigError(
            f"{run_dir}: the model {cfg.model.path} runs Python code from its repository; read that code, then add "
            "--trust-remote-code"
        )
    if options.adapter and not cfg.peft.adapts:
        raise ConfigError(f"--adapter: {run_dir} trained all parameters (peft.method=none); leave --adapter out")
    # The export runs no forward, so the run's attention and float8 kernels need not be installed.
    cfg.model = dataclasses.replace(cfg.model, attention=Attention.eager, float8=Float8.none, float8_emulate=False)
    return cfg


def _adapters(model: Any, stored: Any) -> dict[str, Any]:
    """Read the adapters of a checkpoint as full tensors, by parameter name."""
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    return {name: stored.read(name, tuple(slice(0, size) for size in each.shape)) for name, each in trained.items()}


def _merged(model: Any, cfg: _RunConfig, stored: Any) -> Callable[..., Any]:
    """Return a function that reads a block of the weights with the adapters merged. Raises ConfigError."""
    from components import models

    base = models.weight_reader(model, cfg.model, cfg.run.seed)
    stored.check_base_weights({name: each for name, each in model.named_parameters() if not each.requires_grad}, base)
    merge = models.Merge(model)
    for name, adapter in _adapters(model, stored).items():
        merge.take(name, adapter)
    return lambda name, index: merge.reader(name, partial(base, name))(index)


def main(arguments: list[str]) -> int:
    """Export the checkpoint, and print the folder and its size; return the exit status."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        folder = export(read_options(arguments))
    except ConfigError as error:
        print_problems(error.problems)
        return EXIT_INVALID
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    files = sorted(folder.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    print_text(f"exported {folder}: {size:,} bytes in {len(files)} weight file{'s' if len(files) > 1 else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
