"""Packed rows for tests, and their reference in plain PyTorch, where each document is forwarded separately."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from components import data, training
from components.batch import Batch
from components.data.dataset import Dataset, Facts
from components.planning.parity import FLOOR
from components.planning.parity_reference import _at_least_float32, _norm_of, _whole_precision, balance_loss
from tests.distributed.parity import MODELS as DENSE
from tests.distributed.parity import MOE_MODELS, SMALL, relative

SEQ_LEN, ROWS = 48, 4
MODELS: dict[str, dict[str, Any]] = {
    "mistral": {**SMALL, "model_type": "mistral", "sliding_window": 5, "num_hidden_layers": 4},
    "gemma3_text": {**SMALL, "model_type": "gemma3_text", "head_dim": 8, "sliding_window": 5,
                    "layer_types": ["sliding_attention", "full_attention"]},
    "mixtral": {**MOE_MODELS["mixtral"], "sliding_window": 7},
    "gpt2": DENSE["gpt2"],
    "deepseek_v3": {**SMALL, "model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": None,
                    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
                    "first_k_dense_replace": 2},
    "gpt_oss": {**SMALL, "model_type": "gpt_oss", "head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2,
                "intermediate_size": 32, "sliding_window": 5},
    "gemma2": {**SMALL, "model_type": "gemma2", "head_dim": 12, "sliding_window": 5, "attn_logit_softcapping": 2.0},
}  # fmt: skip
"""Sliding windows are shorter than documents. GPT-2 has learned position embeddings: rotary ones are relative and would
not depend on where a document begins. DeepSeek-V3 has narrower values than keys, and here no experts."""


class NoPadding:
    """The only attribute of a tokenizer that a dataset reads."""

    pad_token_id = None


Step = tuple[float, dict[str, torch.Tensor]]
"""Loss and gradients."""


def unpacked(count: int = 24, seed: int = 0, shorter: tuple[int, ...] = ()) -> Dataset:
    """Samples of 3 to 30 tokens with different numbers of targets, the first ones of `shorter` tokens."""
    generator = torch.Generator().manual_seed(seed)
    examples = []
    for index in range(count):
        length = int(torch.randint(3, 31, (), generator=generator))
        length = shorter[index] if index < len(shorter) else length
        tokens = torch.randint(3, 97, (length,), generator=generator)
        labels = tokens.clone()
        labels[: int(torch.randint(0, max(length - 1, 1), (), generator=generator))] = -100
        examples.append(data.Example(tokens.tolist(), labels.tolist()))
    return Dataset(examples, NoPadding(), facts=Facts("here"), seq_len=SEQ_LEN)  # type: ignore[arg-type]


def packed(count: int = 24, seed: int = 0, shorter: tuple[int, ...] = ()) -> data.PackedDataset:
    """The samples of `unpacked`, packed into rows of SEQ_LEN."""
    return data.PackedDataset(unpacked(count, seed, shorter), SEQ_LEN)


def batches_of(
    rows: data.PackedDataset, rank: int = 0, size: int = 1, micro: int = 1, **values: Any
) -> data.TrainBatches:
    """`values`: further fields of the plan."""
    plan = data.BatchPlan(global_batch_size=ROWS, micro_batch_size=micro, dp_rank=rank, dp_size=size, **values)
    return data.TrainBatches(rows, plan, seed=5, fingerprint=rows.fingerprint)


def documents(rows: data.PackedDataset, step: int = 0) -> list[data.Example]:
    """Return the samples in the rows of a step."""
    return [each for index in batches_of(rows).global_batch(step) for each in rows[index].examples]


def reference(plain: torch.nn.Module, samples: list[data.Example], router_aux: float = 0.0) -> Step:
    """Loss per target token and gradients, with each sample forwarded separately."""
    model: Any = copy.deepcopy(plain).train()
    total, count = torch.zeros((), dtype=torch.float64), 0
    router_arguments = {"output_router_logits": True} if router_aux else {}
    for tokens, labels in samples:
        with _whole_precision(model):
            output = model(input_ids=torch.tensor([tokens]), use_cache=False, **router_arguments)
        logits, targets = _at_least_float32(output.logits[0, :-1]), torch.tensor(labels[1:])
        loss = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        if router_arguments:
            loss = loss + router_aux * (targets != -100).sum() * balance_loss(
                output.router_logits, model.config.num_experts_per_tok
            )
        total, count = total + loss, count + int((targets != -100).sum())
    (total / count).backward()
    return (total / count).item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


class Catcher(torch.optim.SGD):
    """Optimizer that stores the full gradients and does not change the weights."""

    def step(self, closure: Any = None) -> None:
        self.caught = {
            parameter: (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()
            for parameter in self.param_groups[0]["params"]
            if (grad := parameter.grad) is not None
        }


def one_step(model: Any, called: Any, batches: list[Batch], settings: training.StepSettings) -> Step:
    """Return the loss of train_step and the full gradients passed to the optimizer, of this rank's parameters."""
    named = dict(model.named_parameters())
    catcher = Catcher(named.values(), lr=0.0)
    loss = training.train_step(training.Prepared(model, settings, called), batches, catcher)["loss"].item()
    return loss, {name: catcher.caught[p] for name, p in named.items() if p in catcher.caught}


def differences(expected: Step, got: Step, rtol: float = 1e-10) -> list[str]:
    error = abs(got[0] / expected[0] - 1)
    problems = [] if error < rtol else [f"loss {got[0]!r}, not {expected[0]!r}"]
    dtype = next(iter(expected[1].values())).dtype
    floor = FLOOR[dtype] * float(_norm_of(expected[1].values()))
    for name, gradient in got[1].items():
        error = relative(gradient, expected[1][name], floor)
        if not error < rtol:
            problems.append(f"gradient of {name} is off by {error:.1e}")
    return problems
