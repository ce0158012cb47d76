"""The recipes that train are one text, but for what their jobs differ in."""

from __future__ import annotations

from difflib import ndiff
from pathlib import Path

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def test_pretraining_differs_from_fine_tuning_where_the_job_does() -> None:
    """What is put right in one is put right in the other."""
    texts = [(RECIPES / name).read_text() for name in ("finetune.py", "pretrain.py")]
    finetune, pretrain = (text[text.index("from __future__") :].splitlines() for text in texts)
    changes = [line for line in ndiff(finetune, pretrain) if line[0] in "+-"]
    assert sorted(line[0] + line[2:].strip().partition("  # ")[0] for line in changes) == sorted(
        [
            "-from components.config.schema import FinetuneConfig",
            "+from components.config.schema import PretrainConfig",
            '-@recipe("finetune")',
            "-def main(cfg: FinetuneConfig) -> None:",
            '+@recipe("pretrain")',
            "+def main(cfg: PretrainConfig) -> None:",
            "+tokenizer.chat_template = None",
        ]
    )
