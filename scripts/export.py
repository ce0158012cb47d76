"""Export a checkpoint, written on any mesh, to a folder that transformers can load.

python scripts/export.py outputs/finetune/RUN                                  # the newest checkpoint of the run
python scripts/export.py outputs/finetune/RUN/checkpoints/step_200 --out mine  # this checkpoint, to the folder mine
python scripts/export.py outputs/finetune/RUN --dtype bfloat16 --shard-size 2GB
python scripts/export.py outputs/finetune/RUN --adapter                        # only the LoRA adapters, in PEFT format
python scripts/export.py outputs/finetune/RUN --averaged                       # the average of training.ema_decay
python scripts/export.py outputs/finetune/RUN --push me/my-model               # also upload it to the Hugging Face hub
python scripts/export.py outputs/finetune/RUN --out s3://bucket/my-model       # to an object store: s3, gs, az or hf

Runs in one process without a GPU. The checkpoint is verified first. The weights are then copied block by block, so that
the model need not fit into memory, and LoRA adapters are merged into the base weights from model.path. The folder
appears once it is complete. Exit status 0, or 2 for an invalid command line, a damaged checkpoint or a failed upload.

--push uploads the complete folder to the Hugging Face hub with the token of `hf auth login` or HF_TOKEN, which is
checked before the export. A new repository is private unless --public is given.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from components.config.schema.parallelism import describe_processes
from components.protocol.errors import ConfigError
from components.terminal import HelpText, exit_with, print_text
from scripts._export.checkpoints import OpenCheckpoint, RunSections, read_run
from scripts._export.hub import HubTarget, find_target, upload
from scripts._export.object_output import output_folder, removed_on, upload_output
from scripts._export.options import add_output_options, check_output_options, run_export


def read_options(arguments: list[str]) -> Namespace:
    """Parse the options, and validate those that do not depend on the checkpoint. Raises ConfigError."""
    parser = ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=HelpText)
    parser.add_argument("source", type=Path, metavar="CHECKPOINT_OR_RUN_DIR")
    parser.add_argument("--adapter", action="store_true", help="write only the adapters, for PeftModel.from_pretrained")
    parser.add_argument("--averaged", action="store_true", help="export the moving average that the checkpoint holds")
    parser.add_argument("--push", metavar="NAME", help="upload the folder to this model repository of the hub")
    parser.add_argument("--public", action="store_true", help="--push to a public repository (default: private)")
    add_output_options(parser, "RUN_DIR/export-step_N", "as stored")
    options = parser.parse_args(arguments)
    check_output_options(options)
    if options.adapter and (options.dtype is not None or options.shard_size != parser.get_default("shard_size")):
        raise ConfigError("--adapter: writes one file in the stored dtype; leave out --dtype and --shard-size")
    if options.public and options.push is None:
        raise ConfigError("--public: only affects an upload; add --push NAME, or leave out --public")
    return options


def export(options: Namespace) -> Path:
    """Export the checkpoint and return the new folder. Raises ConfigError."""
    import torch

    from components import models, observability
    from components.checkpoint import choose_checkpoint

    checkpoint = choose_checkpoint(options.source.expanduser().resolve())
    run_dir = checkpoint.parent.parent
    kind = f"{'adapter' if options.adapter else 'export'}{'-averaged' if options.averaged else ''}"
    folder = output_folder(options.out, run_dir / f"{kind}-{checkpoint.name}", run_dir)
    cfg = _config_of(run_dir, options)
    source = OpenCheckpoint(checkpoint, cfg, averaged=options.averaged, exports_adapter=options.adapter)
    stored, model, tokenizer = source.stored, source.model, source.tokenizer
    state = {"step": stored.manifest.step, "dtype": stored.extra.get("dtype"), **stored.extra.get("state", {})}
    axes = dict(stored.manifest.mesh)
    world = axes.pop("world", 1)
    mesh = " x ".join(f"{axis}={size}" for axis, size in axes.items())
    mesh = f"{mesh} on {describe_processes(world)}" if mesh else describe_processes(world)
    card = observability.render_model_card(run_dir, state, mesh, averaged=options.averaged)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    with removed_on(BaseException, folder, options.out):
        try:
            if options.adapter:
                adapters = source.adapters()
                described = models.with_decoding(card, model)
                base_weights = f"{source.cfg.model.stored_dtype()} {stored.base_fingerprint}"
                models.write_adapter(model, tokenizer, folder, adapters, cfg.peft, described, base_weights)
                return folder
            return models.export_stored(
                model,
                tokenizer,
                folder,
                source.reader(),
                dtype=dtype,
                shard_bytes=options.shard_bytes,
                card=card,
            )
        except OSError as error:
            raise ConfigError(f"--out {folder}: the export could not be written: {error}") from error
        except NotImplementedError as error:
            raise ConfigError(f"{checkpoint}: {error}") from error


def _config_of(run_dir: Path, options: Namespace) -> RunSections:
    """Read the frozen config of the run and validate the options against it. Raises ConfigError."""
    cfg = read_run(run_dir, trust_remote_code=options.trust_remote_code)
    if options.adapter and not cfg.peft.adapts:
        raise ConfigError(f"--adapter: {run_dir} trained all parameters (peft.method=none); leave --adapter out")
    return cfg


def main(arguments: list[str]) -> int:
    """Export the checkpoint, print the folder and its size, and upload it if asked to; return the exit status."""
    target: HubTarget | None = None
    out: str | None = None

    def check_and_export() -> Path:
        nonlocal target, out
        options = read_options(arguments)
        out = options.out
        if options.push is not None:
            target = find_target(options.push, is_public=options.public)
        return export(options)

    def upload_if_asked(folder: Path) -> None:
        if target is not None:
            with removed_on(KeyboardInterrupt, folder, out):
                print_text(f"uploaded {upload(folder, target)}")
        upload_output(folder, out)

    return run_export(check_and_export, upload_if_asked)


if __name__ == "__main__":
    exit_with(main)
