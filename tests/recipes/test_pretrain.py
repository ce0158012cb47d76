"""recipes/pretrain.py on two processes against a single-process PyTorch loop with the same text and weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from components.data.packing import SampleOrder
from scripts.export import main as export
from scripts.tokenize_corpus import main as tokenize
from tests.recipes.test_finetune import curve, result, run

STEPS, WARMUP, BATCH, SEQ, LR, DECAY, SEED = 12, 4, 8, 64, 3e-3, 0.1, 5
END = 257  # <|im_end|>, after the 256 bytes and the beginning-of-text token
LLAMA = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "tie_word_embeddings": True, "vocab_size": 260}  # fmt: skip
"""The config of model=tiny."""


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Train a random transformers model on a text; return the folder of both and of the run, and the run's output."""
    folder = tmp_path_factory.mktemp("pretrain")
    lines = [
        f"{number} times {other} is {number * other}, as anyone knows.\n" for number in range(9) for other in range(40)
    ]
    (folder / "text.txt").write_text("".join(lines))
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **LLAMA)).save_pretrained(folder / "model")
    output = train(folder, "run", "data=text", f"data.path={folder}/text.txt", f"training.seq_len={SEQ}")
    return folder, output


def train(folder: Path, name: str, *data: str) -> str:
    """Run the recipe on two processes in the run directory `name`, and return its output."""
    return run(
        "pretrain.py",
        *("parallelism=fsdp2", "cluster=local_2proc", "cluster.device=cpu", f"run.dir={folder}/{name}"),
        *("model=tiny", f"model.path={folder}/model", "model.init=pretrained", "model.config={}"),
        *("training.log_every=1", f"training.max_steps={STEPS}", f"training.global_batch_size={BATCH}"),
        *("training.micro_batch_size=2", "training.eval_every=0", "checkpoint.export=true"),
        *(f"optimizer.lr={LR}", f"optimizer.warmup_steps={WARMUP}", f"optimizer.weight_decay={DECAY}"),
        *(f"run.seed={SEED}", "data.pack=false", *data),
        cwd=folder,
    )


def test_curve_matches_a_plain_loop(pretrained: tuple[Path, str]) -> None:
    folder, _ = pretrained
    train, held_out = documents(folder / "text.txt")
    order = SampleOrder(len(train), SEED).indices(0, STEPS * BATCH)
    losses, norms, evaluations = plain_loop(folder / "model", [train[index] for index in order], held_out)
    assert curve(folder / "run") == pytest.approx(losses, rel=1e-5)
    assert curve(folder / "run", "grad_norm") == pytest.approx(norms, rel=1e-5)
    assert curve(folder / "run", "eval_loss") == pytest.approx(evaluations, rel=1e-5)
    assert evaluations[1] < evaluations[0] - 1


def test_token_stores_of_the_text_have_the_same_curve(pretrained: tuple[Path, str]) -> None:
    """A row of a store is SEQ - 1 tokens and the token after them: the SEQ tokens of a sample of the text."""
    folder, _ = pretrained
    cut = cut_of(text := (folder / "text.txt").read_text())
    for name, part in (("train", text[:cut]), ("held_out", text[cut:])):
        (folder / f"{name}.txt").write_text(part)
        assert tokenize([f"{folder}/{name}.txt", "--tokenizer", "bytes", "--out", f"{folder}/{name}"]) == 0
    stores = (f"data.path={folder}/train", f"data.eval_path={folder}/held_out")
    train(folder, "of_tokens", "data=tokens", *stores, "data.block_rows=1", f"training.seq_len={SEQ - 1}")
    for key in ("loss", "grad_norm", "eval_loss"):
        assert curve(folder / "of_tokens", key) == pytest.approx(curve(folder / "run", key), rel=1e-6)


def test_export_is_a_text_model_with_the_logged_eval_loss(pretrained: tuple[Path, str]) -> None:
    folder, output = pretrained
    assert "prompt: 8 times 2" in output  # the first line of the held-out split
    tokenizer = AutoTokenizer.from_pretrained(folder / "run" / "export")
    assert tokenizer.chat_template is None
    model = AutoModelForCausalLM.from_pretrained(folder / "run" / "export").eval()
    assert mean_loss(model, documents(folder / "text.txt")[1]) == pytest.approx(
        result(folder / "run")["eval_loss"], rel=1e-5
    )


def test_evaluation_and_export_of_the_run_have_no_chat_template(pretrained: tuple[Path, str]) -> None:
    """The byte tokenizer has one; with it, prompts of the evaluation would be chats."""
    folder, _ = pretrained
    output = run(
        *(
            "evaluate.py",
            f"run={folder}/run",
            "parallelism=single",
            "cluster.device=cpu",
            f"run.dir={folder}/evaluated",
        ),
        *("generation.samples=1", "generation.max_new_tokens=1"),
        cwd=folder,
    )
    assert "prompt: 8 times 2" in output
    assert result(folder / "evaluated")["eval_loss"] == pytest.approx(result(folder / "run")["eval_loss"], rel=1e-5)
    assert export([str(folder / "run"), "--out", str(folder / "exported")]) == 0
    assert AutoTokenizer.from_pretrained(folder / "exported").chat_template is None


def cut_of(text: str) -> int:
    """Return the index of the first held-out character."""
    return text.index("\n", round(len(text) * 0.95)) + 1


def documents(file: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Return the train and held-out samples as the documentation of `data=text` defines them."""
    text = file.read_text()
    cut = cut_of(text)
    splits = []
    for split_text in (text[:cut], text[cut:]):
        ids = [*split_text.encode(), END]
        splits.append([ids[first : first + SEQ] for first in range(0, len(ids) - 1, SEQ - 1)])
    return splits[0], splits[1]


def cosine_rate(step: int) -> float:
    progress = (step - WARMUP + 1) / (STEPS - WARMUP)
    cosine = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))
    return LR * ((step + 1) / WARMUP if step < WARMUP else cosine)


def plain_loop(
    start: Path, train: list[list[int]], held_out: list[list[int]], rate: Callable[[int], float] = cosine_rate
) -> tuple[list[float], list[float], list[float]]:
    """Return the losses and gradient norms of all steps, and the held-out losses before and after training.

    Args:
        train: The rows of all steps, in order.
        rate: Learning rate of a step.
    """
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    losses, norms, evaluations = [], [], [mean_loss(model, held_out)]
    for step in range(STEPS):
        rows = train[step * BATCH : (step + 1) * BATCH]
        loss = sum(token_losses(model, row) for row in rows) / sum(len(row) - 1 for row in rows)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, [*evaluations, mean_loss(model, held_out)]


def token_losses(model: torch.nn.Module, row: list[int]) -> torch.Tensor:
    ids = torch.tensor(row)[None]  # (1, seq)
    return F.cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="sum")


@torch.no_grad()
def mean_loss(model: torch.nn.Module, rows: list[list[int]]) -> float:
    return sum(token_losses(model, row).item() for row in rows) / sum(len(row) - 1 for row in rows)
