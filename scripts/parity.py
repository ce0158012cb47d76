"""One loss curve on every mesh, shown on your own model and data: each mesh against one process in plain PyTorch.

python scripts/parity.py                                             # the default job on every mesh of 4 processes
python scripts/parity.py model=tiny data=jsonl data.path=mine.jsonl --processes 2
python scripts/parity.py --meshes fsdp2,fsdp2_tp2,pp2_dp_shard2      # options of conf/parallelism, names of the table
python scripts/parity.py --meshes fsdp2_tp2 --recompute all          # with every policy of activation checkpointing
python scripts/parity.py model=tiny --dtype float64 --steps 3 --out outputs/parity/mine

Takes what recipes/finetune.py takes, and trains --steps optimizer steps without dropout. Ends with status 0 where every
mesh agrees, 1 where one does not, and 2 where nothing could be started.
"""

from __future__ import annotations

import sys
import time
from os import environ
from pathlib import Path

from components.config.errors import ConfigError
from components.config.micro_batches import fit_micro_batches
from components.config.schema.checks import raise_all
from components.config.schema.cluster import Device
from components.launch.machine import device_problems, visible_gpus
from components.protocol.exit_codes import EXIT_INVALID
from components.protocol.failures import print_problems
from scripts._parity.options import compose, plan, read_options


def main() -> int:
    """Compose, plan, compare, report; config errors are reported before torch is imported."""
    try:
        options, overrides = read_options(sys.argv[1:], __doc__)
        gpus = visible_gpus(environ)
        cfg = compose(overrides)
        if cfg is None:
            return 0
        on_gpus = gpus > 0 and cfg.cluster.device != Device.cpu
        options.processes = options.processes or (gpus if on_gpus else 4)
        raise_all(device_problems(cfg, options.processes, gpus))
        plans = plan(options, overrides, cfg)
        cfg = fit_micro_batches(cfg, 1)  # for the reference
    except ConfigError as error:
        print_problems(error.problems)
        return EXIT_INVALID
    out = options.out or Path("outputs/parity") / time.strftime("%Y%m%d-%H%M%S")
    out.mkdir(parents=True, exist_ok=True)
    from components import parity
    from scripts._parity.report import Report

    comparison = parity.Comparison(cfg, options.processes, options.steps, options.dtype, not options.no_gradients, out)
    report = Report(comparison, " ".join(overrides))
    try:
        for row in parity.compare(comparison, plans, report.log):
            report.add(row)
    except ConfigError as error:  # found only once the model or the data was loaded
        print_problems(error.problems)
        return EXIT_INVALID
    status = report.finish()
    return EXIT_INVALID if options.meshes != "all" and report.refused else status


if __name__ == "__main__":
    sys.exit(main())
