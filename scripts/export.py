"""A checkpoint of any mesh as a folder that transformers loads.

python scripts/export.py outputs/finetune/RUN                                  # its newest checkpoint
python scripts/export.py outputs/finetune/RUN/checkpoints/step_200 --out mine  # that one, into the folder mine
python scripts/export.py outputs/finetune/RUN --dtype bfloat16 --shard-size 2GB
python scripts/export.py outputs/finetune/RUN --adapter                        # LoRA alone, in PEFT's own format

One process, no GPU. Every bit of the checkpoint is verified first; then the weights go from file to file block by
block, so that the model is never in memory; adapters are merged into the weights of model.path on the way. The folder
appears once it is complete. Ends with status 0, or 2 for a mistake or a checkpoint that is damaged.
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

from components.config.compose.frozen import read_frozen
from components.config.errors import ConfigError
from components.config.schema import FinetuneConfig
from components.config.schema.model import Attention, Float8
from components.config.schema.parallelism import describe_processes
from components.config.schema.peft import PeftExport
from components.protocol.exit_codes import EXIT_INTERRUPTED, EXIT_INVALID
from components.protocol.failures import tell_problems
from components.terminal import print_text

DTYPES = ("bfloat16", "float16", "float32", "float64")
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def read_options(arguments: list[str]) -> Namespace:
    """Return the options, checked as far as they can be without looking at the checkpoint. Raises ConfigError."""
    parser = ArgumentParser(
        prog="scripts/export.py", description=__doc__, allow_abbrev=False, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, metavar="CHECKPOINT_OR_RUN_DIR")
    parser.add_argument("--out", type=Path, help="new folder (default: RUN_DIR/export-step_N)")
    parser.add_argument(
        "--adapter", action="store_true", help="write the adapters alone, for PeftModel.from_pretrained"
    )
    parser.add_argument("--shard-size", default="4GB", help="largest weight file, such as 500MB (default: 4GB)")
    parser.add_argument("--dtype", help=f"type to write: {', '.join(DTYPES)} (default: as stored)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code that comes with the model")
    options = parser.parse_args(arguments)
    if options.dtype not in (None, *DTYPES):
        raise ConfigError(f"--dtype {options.dtype}: must be one of {', '.join(DTYPES)}")
    size = re.fullmatch(r"(\d+)\s*([a-z]*)", options.shard_size.strip(), re.IGNORECASE)
    if size is None or size[2].upper() not in UNITS or int(size[1]) == 0:
        raise ConfigError(f"--shard-size {options.shard_size}: must be a size such as 500MB, 4GB or 2GiB")
    options.shard_bytes = int(size[1]) * UNITS[size[2].upper()]
    return options


def export(options: Namespace) -> Path:
    """Write the folder and return it. Raises ConfigError."""
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
    held = saved_tensors(model)
    stored.check({name: each for name, each in held.items() if each.requires_grad or not cfg.peft.adapts})
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
    """Return where to write. Raises ConfigError where something is there already."""
    folder = folder.expanduser().resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--out {folder}: exists and is not an empty folder; choose another one, or remove it")
    return folder


def _config_of(run_dir: Path, options: Namespace) -> FinetuneConfig:
    """Return the config of the run. Raises ConfigError."""
    cfg = read_frozen(run_dir / "config.yaml", FinetuneConfig)
    if cfg.model.trust_remote_code and not options.trust_remote_code:
        raise ConfigError(
            f"{run_dir}: its model runs code of its own ({cfg.model.path}); read that code, then add "
            "--trust-remote-code"
        )
    if options.adapter and not cfg.peft.adapts:
        raise ConfigError(f"--adapter: {run_dir} trained every parameter (peft.method=none); leave --adapter out")
    # Nothing is computed here, so that no kernel of the run's has to be installed.
    cfg.model = dataclasses.replace(cfg.model, attention=Attention.eager, float8=Float8.none, float8_emulate=False)
    return cfg


def _adapters(model: Any, stored: Any) -> dict[str, Any]:
    """Return the adapters of a checkpoint, whole."""
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    return {name: stored.read(name, tuple(slice(0, size) for size in each.shape)) for name, each in trained.items()}


def _merged(model: Any, cfg: FinetuneConfig, stored: Any) -> Callable[..., Any]:
    """Return what reads a block of the run's model with the adapters merged into it. Raises ConfigError."""
    from components import models

    base = models.weight_reader(model, cfg.model, cfg.run.seed)
    stored.check_base_weights({name: each for name, each in model.named_parameters() if not each.requires_grad}, base)
    merge = models.Merge(model)
    for name, whole in _adapters(model, stored).items():
        merge.take(name, whole)
    return lambda name, index: merge.reader(name, partial(base, name))(index)


def main(arguments: list[str]) -> int:
    """Export; return the exit status."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        folder = export(read_options(arguments))
    except ConfigError as error:
        tell_problems(error.problems)
        return EXIT_INVALID
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    files = sorted(folder.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    print_text(f"exported {folder}: {size:,} bytes in {len(files)} weight file{'s' if len(files) > 1 else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
