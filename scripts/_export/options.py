"""Options of the folder that a script exports to, and what the script prints."""

from __future__ import annotations

import os
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path

from components.protocol.errors import EXIT_INTERRUPTED, EXIT_INVALID, ConfigError
from components.protocol.failures import print_problems
from components.terminal import print_text

DTYPES = ("bfloat16", "float16", "float32", "float64")
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def add_output_options(parser: ArgumentParser, default_folder: str, default_dtype: str) -> None:
    """Add --out, --shard-size, --dtype and --trust-remote-code.

    Args:
        default_folder, default_dtype: Descriptions of the defaults, for --help.
    """
    parser.add_argument("--out", help=f"new folder, or a URL such as s3://BUCKET/NAME (default: {default_folder})")
    parser.add_argument("--shard-size", default="4GB", help="maximum size of a weight file (default: 4GB)")
    parser.add_argument("--dtype", help=f"dtype to write: {', '.join(DTYPES)} (default: {default_dtype})")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code from the model's repository")


def check_output_options(options: Namespace) -> None:
    """Validate --dtype and --shard-size, and set `options.shard_bytes`. Raises ConfigError."""
    if options.dtype not in (None, *DTYPES):
        raise ConfigError(f"--dtype {options.dtype}: must be one of {', '.join(DTYPES)}")
    size = re.fullmatch(r"(\d+)\s*([a-z]*)", options.shard_size.strip(), re.IGNORECASE)
    if size is None or size[2].upper() not in UNITS or int(size[1]) == 0:
        raise ConfigError(f"--shard-size {options.shard_size}: must be a size such as 500MB, 4GB or 2GiB")
    options.shard_bytes = int(size[1]) * UNITS[size[2].upper()]


def new_folder(folder: Path) -> Path:
    """Return the absolute path of the output folder. Raises ConfigError if it exists and is not empty."""
    folder = folder.expanduser().resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--out {folder}: exists and is not an empty folder; choose another one, or remove it")
    return folder


def run_export(export: Callable[[], Path], then: Callable[[Path], None] = lambda folder: None) -> int:
    """Call `export`, print its folder and size, call `then` with the folder, and return the exit status.

    Config errors of both are printed.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        folder = export()
        files = sorted(folder.glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files)
        print_text(f"exported {folder}: {size:,} bytes in {len(files)} weight file{'s' if len(files) > 1 else ''}")
        then(folder)
    except ConfigError as error:
        print_problems(error.problems)
        return EXIT_INVALID
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0
