"""The training recipes are identical except where their tasks differ."""

from __future__ import annotations

from difflib import ndiff
from pathlib import Path

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def test_pretrain_and_finetune_differ_only_in_the_listed_lines() -> None:
    """A fix in one recipe must also be made in the other."""
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
