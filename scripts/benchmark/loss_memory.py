"""Peak memory and time of the loss by vocabulary size: all logits at once, and in chunks of tokens.

python scripts/benchmark/loss_memory.py                                      # 4,096 tokens, vocabularies of 8k to 256k
python scripts/benchmark/loss_memory.py --vocab 49152 --targets 0.3          # SmolLM2's head, 30 % of tokens targets
python scripts/benchmark/loss_memory.py --objective distillation --vocab 32768 131072    # forward KL from a teacher
python scripts/benchmark/loss_memory.py --objective dpo --vocab 32768 131072             # 4 pairs, both passes
python scripts/benchmark/loss_memory.py --dtype bfloat16 --hidden 4096       # on a GPU: allocated bytes

Each measurement is a forward and backward of LM head and loss on random hidden states, in a process of its own. Memory
is the peak above the inputs (hidden states, weight): resident memory since `clear_refs` on a CPU, allocated memory on a
GPU. It includes the gradients of the inputs, whose size is in a column of its own. DPO in chunks takes two passes, a
first one for the log-probabilities of the rows; from logits it takes one, with gradients by autograd.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from typing import NamedTuple

import torch
import torch.nn.functional as F

from components.batch import bits_of
from components.config.schema.objective import DistillationConfig, DPOConfig
from components.terminal import HelpText
from components.training.objectives import CrossEntropy
from components.training.objectives.base import RowScores
from components.training.objectives.chunked_loss import Head, Targets, linear_token_loss
from components.training.objectives.distillation import HIDDEN, DistillationLoss, TeacherHead
from components.training.objectives.preference import DPO, REFERENCE
from scripts.benchmark.peers.meter import peak, reset_peak
from scripts.benchmark.peers.roof import now

METHODS = ("logits", "chunked")
NOT_MEASURED = {"bytes": math.nan, "seconds": math.nan}
VOCABULARIES = [8192, 16384, 32768, 49152, 65536, 131072, 262144]


PAIRS = 4
"""Pairs of answers that the tokens are divided into for DPO."""


class Inputs(NamedTuple):
    """Inputs of the LM head and the loss."""

    hidden: torch.Tensor  # (tokens, hidden)
    weight: torch.Tensor  # (vocabulary, hidden)
    targets: torch.Tensor  # (tokens,)
    count: int
    """Number of targets that are not ignored."""

    @property
    def logits(self) -> torch.Tensor:
        """Logits of all tokens, (tokens, vocabulary)."""
        return F.linear(self.hidden, self.weight)


def cross_entropy(inputs: Inputs, method: str) -> torch.Tensor:
    """Return the mean cross-entropy."""
    hidden, weight, targets, count = inputs
    if method == "logits":
        return CrossEntropy().of_logits(inputs.logits[None], targets[None]) / count
    return linear_token_loss(hidden, weight, None, Targets(targets, count), Head(), CrossEntropy()) / count


def distillation(inputs: Inputs, method: str) -> torch.Tensor:
    """Return the mean KL divergence from a teacher with the same head and other hidden states."""
    hidden, weight, targets, count = inputs
    teacher_hidden = hidden.detach() * 2
    if method == "logits":
        teacher, student = (F.linear(each, weight).float().log_softmax(-1) for each in (teacher_hidden, hidden))
        terms = F.kl_div(student, teacher.detach(), reduction="none", log_target=True)
        return terms.sum(-1).where(targets != -100, 0).sum() / count
    loss = DistillationLoss(DistillationConfig())
    loss.teacher = TeacherHead(weight.detach())
    flat = Targets(targets, count, values={HIDDEN: bits_of(teacher_hidden)})
    return linear_token_loss(hidden, weight, None, flat, Head(), loss) / count


def dpo(inputs: Inputs, method: str) -> torch.Tensor:
    """Return the mean DPO loss of pairs, or a loss with its gradient; the reference's log-probabilities are given."""
    hidden, weight, targets, count = inputs
    reference = torch.zeros(2 * PAIRS, dtype=torch.float64, device=hidden.device)
    cfg = DPOConfig()
    if method == "logits":
        losses = F.cross_entropy(inputs.logits.float(), targets, reduction="none")
        rewards = cfg.beta * (-losses.view(2 * PAIRS, -1).sum(1).double() - reference)
        return -F.logsigmoid(rewards[0::2] - rewards[1::2]).sum() / PAIRS
    with torch.no_grad():
        flat = Targets(targets, count)
        losses = linear_token_loss(hidden, weight, None, flat, Head(), CrossEntropy(), per_token=True)
    log_probs, lengths = -losses.view(2 * PAIRS, -1).sum(1), (targets != -100).view(2 * PAIRS, -1).sum(1)
    rows = DPO(cfg).weights(RowScores(log_probs.double(), lengths.double(), {REFERENCE: reference}))
    factors = rows.factors.repeat_interleave(len(targets) // (2 * PAIRS))
    flat = Targets(targets, count, weights=factors)
    return linear_token_loss(hidden, weight, None, flat, Head(), CrossEntropy()) / PAIRS


OBJECTIVES = {"cross_entropy": cross_entropy, "distillation": distillation, "dpo": dpo}


def measure(method: str, vocabulary: int, args: argparse.Namespace) -> dict[str, float]:
    """Return the peak bytes above the inputs, and the median seconds of a forward and backward."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(args.threads)
    inputs = make_inputs(vocabulary, args, device)
    objective = OBJECTIVES[args.objective]

    def forward_backward() -> None:
        objective(inputs, method).backward()
        inputs.hidden.grad = inputs.weight.grad = None

    before = _reset_peak(device)
    forward_backward()
    added, seconds = _peak(device) - before, []
    for _ in range(args.repeat):
        began = now(device.type)
        forward_backward()
        seconds.append(now(device.type) - began)
    return {"bytes": added, "seconds": statistics.median(seconds) if seconds else float("nan")}


def make_inputs(vocabulary: int, args: argparse.Namespace, device: torch.device) -> Inputs:
    """Return random hidden states, weights and targets, which do not depend on the method."""
    dtype = getattr(torch, args.dtype)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(args.tokens, args.hidden, generator=generator).to(device, dtype).requires_grad_()
    weight = torch.randn(vocabulary, args.hidden, generator=generator).mul_(0.02).to(device, dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (args.tokens,), generator=generator)
    targets[torch.rand(args.tokens, generator=generator) >= args.targets] = -100
    return Inputs(hidden, weight, targets.to(device), int((targets != -100).sum()))


def _reset_peak(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    return reset_peak()


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return peak()


def main() -> None:
    """Measure each vocabulary size with each method, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpText)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--vocab", type=int, nargs="+", default=VOCABULARIES)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--targets", type=float, default=1.0, help="share of tokens that are targets")
    parser.add_argument("--objective", choices=list(OBJECTIVES), default="cross_entropy")
    parser.add_argument("--repeat", type=int, default=3, help="timed passes after the first; 0: memory only")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--max-gib", type=float, default=8, help="skip the logits method if it needs more memory")
    parser.add_argument("--one", nargs=2, metavar=("METHOD", "VOCABULARY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one[0], int(args.one[1]), args)))
        return
    print("| vocabulary | gradients MiB | logits MiB | chunked MiB | logits s | chunked s | ratio |")
    print("|---|---|---|---|---|---|---|")
    for vocabulary in args.vocab:
        size = 2 if args.dtype == "bfloat16" else 4
        fits = (6 if args.objective == "distillation" else 3) * args.tokens * vocabulary * 4 <= args.max_gib * 2**30
        results = [
            _in_subprocess(method, vocabulary) if fits or method == "chunked" else NOT_MEASURED for method in METHODS
        ]
        gradients = (vocabulary + args.tokens) * args.hidden * size / 2**20
        memory = " | ".join(f"{result['bytes'] / 2**20:,.0f}" for result in results)
        seconds = " | ".join(f"{result['seconds']:.2f}" for result in results)
        ratio = results[1]["seconds"] / results[0]["seconds"]
        print(f"| {vocabulary:,} | {gradients:,.0f} | {memory} | {seconds} | {ratio:.2f} |", flush=True)


def _in_subprocess(method: str, vocabulary: int) -> dict[str, float]:
    command = [sys.executable, __file__, *sys.argv[1:], "--one", method, str(vocabulary)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    main()
