"""Peak memory and time of the loss by vocabulary size: all logits at once, and in chunks of tokens.

python scripts/benchmark/loss_memory.py                                      # 4,096 tokens, vocabularies of 8k to 256k
python scripts/benchmark/loss_memory.py --vocab 49152 --targets 0.3          # SmolLM2's head, 30 % of tokens targets
python scripts/benchmark/loss_memory.py --objective distillation --vocab 32768 131072    # forward KL from a teacher
python scripts/benchmark/loss_memory.py --dtype bfloat16 --hidden 4096       # on a GPU: allocated bytes

Each measurement is a forward and backward of LM head and loss on random hidden states, in a process of its own. Memory
is the peak above the inputs (hidden states, weight): resident memory since `clear_refs` on a CPU, allocated memory on a
GPU. It includes the gradients of the inputs, whose size is in a column of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys

import torch

from components.batch import bits_of
from components.config.schema.objective import DistillationConfig
from components.training.objectives import CrossEntropy
from components.training.objectives.chunked_loss import Head, Targets, linear_token_loss
from components.training.objectives.distillation import HIDDEN, DistillationLoss, TeacherHead
from scripts.benchmark.peers.meter import peak, reset_peak
from scripts.benchmark.peers.roof import now

METHODS = ("logits", "chunked")
NOT_MEASURED = {"bytes": math.nan, "seconds": math.nan}
VOCABULARIES = [8192, 16384, 32768, 49152, 65536, 131072, 262144]


def measure(method: str, vocabulary: int, args: argparse.Namespace) -> dict[str, float]:
    """Return the peak bytes above the inputs, and the median seconds of a forward and backward."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(args.tokens, args.hidden, generator=generator).to(device, dtype).requires_grad_()
    weight = torch.empty(vocabulary, args.hidden, device=device, dtype=dtype).normal_(std=0.02).requires_grad_()
    targets = torch.randint(0, vocabulary, (args.tokens,), generator=generator)
    targets[torch.rand(args.tokens, generator=generator) >= args.targets] = -100
    count = int((targets != -100).sum())
    targets = targets.to(device)
    teacher_hidden, head = hidden.detach() * 2, TeacherHead(weight.detach())
    distillation = DistillationLoss(DistillationConfig())
    distillation.teacher = head

    def forward_backward() -> None:
        if args.objective == "distillation" and method == "logits":
            teacher, student = (
                torch.nn.functional.linear(each, weight).float().log_softmax(-1) for each in (teacher_hidden, hidden)
            )
            terms = torch.nn.functional.kl_div(student, teacher.detach(), reduction="none", log_target=True)
            loss = terms.sum(-1).where(targets != -100, 0).sum()
        elif args.objective == "distillation":
            flat = Targets(targets, count, values={HIDDEN: bits_of(teacher_hidden)})
            loss = linear_token_loss(hidden, weight, None, flat, Head(), distillation)
        elif method == "logits":
            loss = CrossEntropy().of_logits(torch.nn.functional.linear(hidden, weight)[None], targets[None])
        else:
            loss = linear_token_loss(hidden, weight, None, Targets(targets, count), Head(), CrossEntropy())
        (loss / count).backward()
        hidden.grad = weight.grad = None

    before = _reset_peak(device)
    forward_backward()
    added, seconds = _peak(device) - before, []
    for _ in range(args.repeat):
        began = now(device.type)
        forward_backward()
        seconds.append(now(device.type) - began)
    return {"bytes": added, "seconds": statistics.median(seconds) if seconds else float("nan")}


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--vocab", type=int, nargs="+", default=VOCABULARIES)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--targets", type=float, default=1.0, help="share of tokens that are targets")
    parser.add_argument("--objective", choices=("cross_entropy", "distillation"), default="cross_entropy")
    parser.add_argument("--repeat", type=int, default=3, help="timed passes after the first; 0: memory only")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--max-gib", type=float, default=8, help="skip the logits method if it needs more memory")
    parser.add_argument("--one", nargs=2, metavar=("METHOD", "VOCABULARY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one[0], int(args.one[1]), args)))
        return
    print("| vocabulary | gradients MiB | logits MiB | chunked MiB | logits s | chunked s | chunked / logits |")
    print("|---|---|---|---|---|---|---|")
    for vocabulary in args.vocab:
        size = 2 if args.dtype == "bfloat16" else 4
        fits = (6 if args.objective == "distillation" else 3) * args.tokens * vocabulary * 4 <= args.max_gib * 2**30
        results = [
            _in_subprocess(method, vocabulary) if fits or method == "chunked" else NOT_MEASURED for method in METHODS
        ]
        gradients = (vocabulary + args.tokens) * args.hidden * size / 2**20
        memory = " | ".join(f"{each['bytes'] / 2**20:,.0f}" for each in results)
        seconds = " | ".join(f"{each['seconds']:.2f}" for each in results)
        ratio = results[1]["seconds"] / results[0]["seconds"]
        print(f"| {vocabulary:,} | {gradients:,.0f} | {memory} | {seconds} | {ratio:.2f} |", flush=True)


def _in_subprocess(method: str, vocabulary: int) -> dict[str, float]:
    command = [sys.executable, __file__, *sys.argv[1:], "--one", method, str(vocabulary)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    main()
