"""Reference training in plain transformers, peft and PyTorch: one process, float64, one sample at a time, no padding.

The results of the recipes are compared with it, so it imports nothing of the project.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.fuzz.cases import BETAS, EPS, LEARNING_RATE, WEIGHT_DECAY, Case, Row


@dataclass
class Curve:
    """Loss curve and final weights of a training run."""

    losses: list[float] = field(default_factory=list)
    """Per step: token cross-entropy plus the router loss."""
    norms: list[float] = field(default_factory=list)
    """Per step: L2 norm of all gradients before clipping."""
    eval_losses: list[float] = field(default_factory=list)
    """Held-out loss before the first and after the last step."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameters after the last step, with merged adapters."""


def write_model(case: Case, folder: Path) -> None:
    """Save a random model, and a word-level tokenizer in its subfolder `tokenizer`.

    The tokenizer needs a separate folder because next to a config.json transformers would use the family's class.
    """
    torch.manual_seed(11)
    values = dict(case.config)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.double().save_pretrained(folder)
    vocab = {"<pad>": 0, "</s>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, case.config["vocab_size"])}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder / "tokenizer")


def load(case: Case, folder: Path) -> Any:
    """Load a model folder in float64, with float64 computation wherever transformers offers it."""
    attention = "eager" if "model.attention=eager" in case.common else "sdpa"
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation=attention)
    if "num_experts_per_tok" in case.config:
        model.set_experts_implementation("eager")
    return model


def train(case: Case, model: Any) -> Curve:
    """Train `model` in place on all rows at each step, and return its curve."""
    curve = Curve()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    matrices = {n: p for n, p in trained.items() if p.dim() >= 2 and "norm" not in n and not n.endswith("bias")}
    groups = [
        {"params": [*matrices.values()], "weight_decay": WEIGHT_DECAY},
        {"params": [p for n, p in trained.items() if n not in matrices], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPS, foreach=False)
    samples = _samples(case.train, case.seq_len)
    count = sum(targets for _, _, targets in samples)
    curve.eval_losses.append(_held_out_loss(case, model))
    selected = _record_selected_experts(model) if case.router_aux else []
    model.train()
    for _ in range(case.total_steps):
        optimizer.zero_grad()
        total = 0.0
        for ids, labels, targets in samples:
            selected.clear()
            output = model(input_ids=ids[None], use_cache=False, **_router_arguments(case))
            loss = _cross_entropy_sum(output.logits, labels)
            if case.router_aux:
                loss = loss + case.router_aux * targets * _balance_loss(output.router_logits, selected)
            (loss / count).backward()
            total += loss.item()
        norm = torch.sqrt(sum(p.grad.square().sum() for p in trained.values() if p.grad is not None))  # type: ignore[arg-type]
        curve.losses.append(total / count)
        curve.norms.append(norm.item())
        if case.max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(trained.values(), case.max_grad_norm, norm)
        optimizer.step()
    curve.eval_losses.append(_held_out_loss(case, model))
    merged = model.merge_and_unload() if case.adapters else model
    curve.weights = {name: tensor.detach() for name, tensor in merged.state_dict().items()}
    return curve


def _samples(rows: Iterable[Row], seq_len: int) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """Return token ids (seq,), labels (seq,) and the number of targets of each row that has a target."""
    samples = []
    for row in rows:
        ids, labels = row.sample(seq_len)
        targets = sum(label != -100 for label in labels[1:])
        if targets:
            samples.append((torch.tensor(ids), torch.tensor(labels), targets))
    return samples


def _cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum the cross-entropy over targets; logits (1, seq, vocabulary), labels (seq,)."""
    return F.cross_entropy(logits[0, :-1].double(), labels[1:], ignore_index=-100, reduction="sum")


@torch.no_grad()
def _held_out_loss(case: Case, model: Any) -> float:
    model.eval()
    samples = _samples(case.held_out, case.seq_len)
    sums = [
        _cross_entropy_sum(model(input_ids=ids[None], use_cache=False).logits, labels) for ids, labels, _ in samples
    ]
    return float(sum(sums)) / sum(targets for _, _, targets in samples)


def _router_arguments(case: Case) -> dict[str, bool]:
    return {"output_router_logits": True} if case.router_aux else {}


def _record_selected_experts(model: Any) -> list[torch.Tensor]:
    """Return a list to which each router appends the experts selected for its tokens, (tokens, top_k), in each forward.

    Not every family selects the most probable experts: DeepSeek V3 first selects groups of experts.
    """
    selected: list[torch.Tensor] = []
    for module in model.modules():
        if type(module).__name__.lower().endswith("router"):
            module.register_forward_hook(lambda _, args, outputs: selected.append(outputs[2]))
    return selected


def _balance_loss(router_logits: Iterable[torch.Tensor], selected: Iterable[torch.Tensor]) -> torch.Tensor:
    """Mean over layers of num_experts * sum over experts of (fraction of its tokens) * (mean probability)."""
    losses = []
    for logits, experts in zip(router_logits, selected, strict=True):  # (tokens, experts), (tokens, top_k)
        probabilities = logits.double().softmax(dim=-1)
        choices = F.one_hot(experts, logits.shape[-1]).sum(dim=1).double()
        losses.append(logits.shape[-1] * (choices.mean(dim=0) * probabilities.mean(dim=0)).sum())
    return torch.stack(losses).mean()
