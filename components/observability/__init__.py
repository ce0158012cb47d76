"""Console output, metrics and reports of a run.

reporter.py  one line per log step, the progress bar, metrics.jsonl
trackers.py  wandb, TensorBoard, MLflow and trackio; their failures never stop a run
result.py    the start banner; result.json, the summary at the end, peak memory, work lost by restarts, loss.png or
             reward.png, the model card
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from components import package

if TYPE_CHECKING:
    from components.observability.reporter import Reporter
    from components.observability.result import (
        BannerFacts,
        Result,
        peak_memory_bytes,
        peak_reserved_bytes,
        print_banner,
        render_model_card,
    )
else:
    __getattr__, __dir__ = package.lazy_names(__name__)
