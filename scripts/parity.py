"""Compare training on every mesh with one process in plain PyTorch, for any model and data: losses, norms, gradients.

python scripts/parity.py                                             # the default config on every mesh of 4 processes
python scripts/parity.py model=tiny data=jsonl data.path=mine.jsonl --processes 2
python scripts/parity.py --meshes fsdp2,fsdp2_tp2,pp2_dp_shard2      # options of conf/parallelism or names in the table
python scripts/parity.py --meshes fsdp2_tp2 --recompute all          # with every policy of activation checkpointing
python scripts/parity.py model=tiny --dtype float64 --steps 3 --out outputs/parity/mine

Takes the options of recipes/finetune.py, and trains --steps optimizer steps without dropout. Exit status 0: all meshes
agree; 1: at least one differs; 2: invalid options, or a named mesh cannot run.
"""

from __future__ import annotations

import time
from os import environ
from pathlib import Path

from components.config.mesh_rules import fit_micro_batches
from components.config.schema.cluster import Device
from components.launch.machine import device_problems, visible_gpus
from components.protocol.errors import EXIT_INVALID, ConfigError, raise_all
from components.protocol.failures import print_problems
from components.terminal import exit_with
from scripts._parity.options import compose, plan, read_options


def main(arguments: list[str]) -> int:
    """Compose the config, compare the meshes and write the report. Config errors come before torch is imported."""
    try:
        options, overrides = read_options(arguments, __doc__)
        gpus = visible_gpus(environ)
        cfg = compose(overrides)
        if cfg is None:
            return 0
        on_gpus = gpus > 0 and cfg.cluster.device != Device.cpu
        options.processes = options.processes or (gpus if on_gpus else 4)
        raise_all(device_problems(cfg, options.processes, gpus))
        plans = plan(options, overrides, cfg)
        cfg = fit_micro_batches(cfg, 1)  # the reference runs in one process
    except ConfigError as error:
        print_problems(error.problems)
        return EXIT_INVALID
    out = options.out or Path("outputs/parity") / time.strftime("%Y%m%d-%H%M%S")
    out.mkdir(parents=True, exist_ok=True)
    from components.planning import parity
    from scripts._parity.report import Report

    comparison = parity.Comparison(cfg, options.processes, options.steps, options.dtype, not options.no_gradients, out)
    report = Report(comparison, " ".join(overrides))
    try:
        for row in parity.compare(comparison, plans, report.log):
            report.add(row)
    except ConfigError as error:  # some can be detected only after loading the model or the data
        print_problems(error.problems)
        return EXIT_INVALID
    status = report.finish()
    return EXIT_INVALID if options.meshes != "all" and report.rejected else status


if __name__ == "__main__":
    exit_with(main)
