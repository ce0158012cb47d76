"""The loss under tp with a vocabulary that tp does not divide, compared with plain transformers in one process.

float64: the loss and the gradient of every parameter within 1e-10, relative. The reference forwards each document alone
and applies the head to a few tokens at a time. The full matrix uses the default chunk size and needs
`MESHBOOK_ALL_PARITY=1`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from components import data, distributed, models, training
from components.config.schema import FinetuneConfig, ModelConfig, ParallelismConfig
from components.config.schema.data import DocsDataConfig
from components.config.schema.model import LossMethod
from components.config.schema.training import TrainingConfig
from components.data.dataset import Dataset, Facts
from components.training.objectives import chunked_loss
from tests.distributed.packed import NoPadding, Step, differences, one_step
from tests.distributed.parity import build
from tests.harness import run_ranks
from tests.suites import PARITY, in_parity

CPU = torch.device("cpu")
HEAD_TOKENS = 512
"""Number of tokens to which the reference applies the head at a time."""


@dataclass(frozen=True)
class Case:
    """A vocabulary size and one micro-batch of full rows."""

    vocabulary: int
    rows: int
    seq: int
    packed: bool = False
    tied: bool = False
    loss: LossMethod = LossMethod.auto

    @property
    def documents(self) -> list[data.Example]:
        """Documents that fill the rows exactly: one per row, or several of unequal lengths if packed."""
        generator = torch.Generator().manual_seed(self.rows * self.seq)
        found = []
        for _ in range(self.rows):
            remaining = self.seq
            while remaining:
                length = (
                    min(remaining, int(torch.randint(3, 300, (), generator=generator))) if self.packed else remaining
                )
                length = remaining if remaining - length < 3 else length
                tokens = torch.randint(3, self.vocabulary, (length,), generator=generator)
                labels = tokens.clone()
                labels[: int(torch.randint(1, length, (), generator=generator))] = -100
                found.append(data.Example(tokens.tolist(), labels.tolist()))
                remaining -= length
        return found


SHAPES = [(1, 127), (1, 1000), (1, 2047), (2, 1024), (4, 1024), (8, 1024)]
"""(Rows, tokens per row): 127 to 8,192 tokens. With a vocabulary of 32,769 and 2,048 tokens, the default chunks of two
ranks would differ by one token."""
DEFAULT_CHUNK = 2**25
"""Logits per chunk on a CPU; the default loss is chunked if a rank has more logits than this."""
SMALL = [
    Case(97, 1, 127, loss=LossMethod.chunked),
    Case(97, 2, 64, packed=True, loss=LossMethod.chunked),
    Case(97, 1, 130, tied=True, loss=LossMethod.chunked),
    Case(98, 1, 129, loss=LossMethod.chunked),
]
SMALL_CHUNK = 384
"""Logits per chunk for SMALL: 49, 48, 33, 31, 25 and 22 vocabulary rows give 7, 8, 11, 12, 15 and 17 tokens."""


def model_of(case: Case) -> Any:
    values = {
        "model_type": "llama", "vocab_size": case.vocabulary, "hidden_size": 24, "intermediate_size": 24,
        "num_hidden_layers": 1, "num_attention_heads": 12, "num_key_value_heads": 12, "use_cache": False,
        "max_position_embeddings": 2048, "tie_word_embeddings": case.tied, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return build("llama", torch.float64, values)


def reference(model: Any, documents: list[data.Example]) -> Step:
    """Return the loss per target and the gradients in plain PyTorch, with each document forwarded alone."""
    count = sum(label != -100 for _, labels in documents for label in labels[1:])
    total = 0.0
    for tokens, labels in documents:
        hidden = model.model(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state[0, :-1]
        leaf, targets = hidden.detach().requires_grad_(), torch.tensor(labels[1:])
        target_positions = (targets != -100).nonzero()[:, 0]
        for chosen in target_positions.split(HEAD_TOKENS):
            logits = F.linear(leaf[chosen], model.lm_head.weight)
            loss = F.cross_entropy(logits, targets[chosen], reduction="sum") / count
            loss.backward()
            total += loss.item()
        hidden.backward(leaf.grad)
    return total, {name: each.grad for name, each in model.named_parameters()}


def batch_of(case: Case) -> dict[str, torch.Tensor]:
    documents = case.documents
    samples: Any = Dataset(documents, NoPadding(), facts=Facts("here"), seq_len=case.seq)  # type: ignore[arg-type]
    rows = data.PackedDataset(samples, case.seq) if case.packed else samples
    plan = data.BatchPlan(global_batch_size=len(rows), micro_batch_size=len(rows))
    return data.TrainBatches(rows, plan, seed=0, fingerprint="").at(0)[0]


def on_mesh(case: Case, plain: Any, tp: int) -> tuple[Step, bool]:
    """Return the loss and full gradients of this rank, and whether the loss was computed in chunks."""
    parallelism = ParallelismConfig(strategy="fsdp2", dp_shard=1, tp=tp)  # type: ignore[arg-type]
    cfg = FinetuneConfig(
        model=ModelConfig(path="made here", loss=case.loss),
        data=DocsDataConfig(),
        training=TrainingConfig(micro_batch_size=case.rows, seq_len=case.seq),
        parallelism=parallelism,
    )
    mesh = distributed.build_mesh(parallelism, "cpu")
    model = copy.deepcopy(plain).train()
    models.use_causal_sdpa(model)
    layout = distributed.parallelize(model, mesh, parallelism, torch.float64)
    loss = training.attach_loss_head(model, cfg.model, cfg.training, cfg.parallelism, mesh, layout.stages, CPU)
    called = distributed.wrap_replicas(model, mesh, parallelism, layout)
    settings = training.StepSettings(CPU, max_grad_norm=0.0, mesh=mesh, loss_head=loss)
    return one_step(model, called, [batch_of(case)], settings), loss.takes_targets


def check(cases: list[Case], tp: int, chunk: int | None = None) -> list[str]:
    """Return a line for every difference, and for every case with an unexpected choice of chunked or full loss."""
    built = {case: model_of(case) for case in cases}
    expected = {case: reference(copy.deepcopy(model), case.documents) for case, model in built.items()}
    return compare(built, expected, tp, chunk)


def compare(built: dict[Case, Any], expected: dict[Case, Step], tp: int, chunk: int | None = None) -> list[str]:
    """Compare one step of each case on `tp` ranks with the reference; `chunk`: logits per chunk (None: default)."""

    def on_rank(rank: int) -> list[str]:
        if chunk is not None:
            chunked_loss.CHUNK_LOGITS = {"cpu": chunk, "cuda": chunk}  # in this forked process
        problems = []
        for case, model in built.items():
            step, in_chunks = on_mesh(case, model, tp)
            problems += [f"tp={tp} rank {rank} {case}: {line}" for line in differences(expected[case], step)]
            if set(step[1]) != set(expected[case][1]):
                problems.append(f"tp={tp} rank {rank} {case}: gradients of {sorted(step[1])} only")
            exceeds_chunk = case.rows * case.seq > DEFAULT_CHUNK // case.vocabulary  # of all logits, also under tp
            if in_chunks != (case.loss == LossMethod.chunked or exceeds_chunk):
                problems.append(f"tp={tp} rank {rank} {case}: computed in chunks: {in_chunks}")
        return problems

    return [line for lines in run_ranks(tp, on_rank, timeout=1800 if PARITY else 120) for line in lines]


@pytest.mark.parametrize("tp", [2, 3, 4] if PARITY else [3])
def test_ranks_with_unequal_vocabulary_shards_use_equal_chunks(tp: int) -> None:
    problems = check(SMALL, tp, SMALL_CHUNK)
    assert not problems, "\n".join(problems)


@in_parity
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("vocabulary", [32769, 50257, 49159])
def test_odd_vocabularies_match_one_process_for_all_token_counts(vocabulary: int) -> None:
    problems, count = [], 0
    for rows, seq in SHAPES:
        for packed in (False, True):
            case = Case(vocabulary, rows, seq, packed)
            model = model_of(case)
            expected = reference(copy.deepcopy(model), case.documents)
            for tp in (2, 3, 4):
                problems += compare({case: model}, {case: expected}, tp)
                count += 1
    assert not problems, "\n".join(problems)
    assert count == 36
