"""The recorded runs: recipes on small random models, on meshes of 1 to 4 local processes.

They are command lines only. The module imports nothing from the project, so refactoring cannot change the runs.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4


@dataclass(frozen=True)
class Run:
    """One run directory and the commands that start and resume it."""

    name: str
    recipe: str
    overrides: str
    """Overrides of every command, separated by spaces."""
    commands: tuple[str, ...]
    """Additional overrides of each command: its mesh and last step."""
    resumes_from: str = ""
    """Folder next to this file with a run directory, written by older code, that the first command resumes."""

    def arguments(self, command: int) -> list[str]:
        """Return the arguments of a command; its working directory contains the data and run directories."""
        data = "text" if self.recipe == "pretrain" else "jsonl"
        mesh, size = self.commands[command].split(" ", 1)[0], 1
        overrides = [*self.overrides.split(), *self.commands[command].split()]
        for each in overrides:
            name, _, value = each.partition("=")
            size *= int(value) if name in DEGREES else 1
        size = max(size, 2 if mesh == "parallelism=ddp" else 1)
        return [
            str(ROOT / "recipes" / f"{self.recipe}.py"),
            *(f"data={data}", f"data.path={data}.{SUFFIXES[data]}", "data.cache=null", "generation.samples=0"),
            *("cluster.device=cpu", f"cluster.procs_per_node={size}"),
            *(COMMON if self.recipe != "evaluate" else ()),
            f"run.dir={self.name}",
            *overrides,
        ]


DEGREES = [f"parallelism.{axis}" for axis in ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")]
SUFFIXES = {"text": "txt", "jsonl": "jsonl"}
COMMON = (
    f"model=tiny training.max_steps={STEPS} training.global_batch_size=8 training.micro_batch_size=2 "
    "training.seq_len=64 training.eval_every=2 training.log_every=1 optimizer.lr=1e-2 optimizer.warmup_steps=1 "
    "checkpoint.every=1 checkpoint.keep=9 logging.comm=true logging.examples=1 data.eval_fraction=0.1"
).split()
DOUBLE = "model.dtype=float64 model.compute_dtype=float64"
SMALL = (
    "model.config.hidden_size=16 model.config.intermediate_size=24 model.config.num_attention_heads=2 "
    "model.config.num_key_value_heads=1 model.heads=2 model.kv_heads=1 model.hidden=16"
)
MOE = "model=tiny_moe model.router_aux=sequence model.router_aux_coef=0.1"
FSDP2 = "parallelism=fsdp2"
RUNS = (
    Run("single", "finetune", "+model.config.attention_dropout=0.1 data.pack=true", ("parallelism=single",)),
    Run("ddp", "finetune", DOUBLE, ("parallelism=ddp parallelism.dp_replicate=2",)),
    Run("fsdp", "finetune", "parallelism.prefetch=1", (f"{FSDP2} parallelism.dp_shard=2",)),
    Run(
        "hsdp",
        "finetune",
        f"{DOUBLE} parallelism.defer_grad_sync=true parallelism.activation_checkpointing=full",
        (f"{FSDP2} parallelism.dp_replicate=2 parallelism.dp_shard=2 training.micro_batch_size=1",),
    ),
    Run(
        "tp_sp",
        "finetune",
        f"{DOUBLE} parallelism.activation_checkpointing=selective model.loss=chunked",
        (f"{FSDP2} parallelism.dp_shard=1 parallelism.tp=2 parallelism.sequence_parallel=true",),
    ),
    Run(
        "cp_packed",
        "finetune",
        f"{DOUBLE} data.pack=true",
        (f"{FSDP2} parallelism.dp_shard=1 parallelism.cp=2 parallelism.cp_attention=ulysses",),
    ),
    Run(
        "cp_tp",
        "pretrain",
        "data.pack=true",
        (f"{FSDP2} parallelism.dp_shard=1 parallelism.cp=2 parallelism.tp=2 parallelism.cp_attention=all_gather",),
    ),
    Run("pp", "finetune", f"{DOUBLE} model.loss=chunked", (f"{FSDP2} parallelism.dp_shard=1 parallelism.pp=2",)),
    Run(
        "pp_fsdp",
        "pretrain",
        "++model.config.num_hidden_layers=5 model.layers=5",
        (f"{FSDP2} parallelism.dp_shard=2 parallelism.pp=2 parallelism.pp_schedule=Interleaved1F1B",),
    ),
    Run("moe", "finetune", MOE, (f"{FSDP2} parallelism.dp_shard=1 parallelism.ep=2",)),
    Run("lora", "finetune", f"{DOUBLE} peft=lora peft.rank=4 peft.dropout=0.1", (f"{FSDP2} parallelism.dp_shard=2",)),
    Run("qlora", "finetune", "peft=qlora peft.rank=4", (f"{FSDP2} parallelism.dp_shard=2",)),
    Run(
        "resume",
        "pretrain",
        f"{DOUBLE} checkpoint.async_save=true",
        (
            f"{FSDP2} parallelism.dp_shard=2 training.max_steps=2",
            f"{FSDP2} parallelism.dp_shard=1 parallelism.tp=2",
            f"{FSDP2} parallelism.dp_shard=1 parallelism.pp=2 training.max_steps=6",
        ),
    ),
    Run(
        "before",
        "pretrain",
        f"{DOUBLE} {SMALL}",
        (f"{FSDP2} parallelism.dp_shard=1 parallelism.tp=2",),  # started with dp_shard=2
        resumes_from="before",
    ),
    Run(
        "moe_resume",
        "finetune",
        f"{MOE} {DOUBLE} optimizer=adamw_wsd",
        (
            f"{FSDP2} parallelism.dp_shard=1 parallelism.ep=2 parallelism.tp=2 training.max_steps=2",
            "parallelism=single",
        ),
    ),
    Run("evaluate", "evaluate", "model.path=single/export evaluation.seq_len=64", (f"{FSDP2} parallelism.dp_shard=2",)),
)
"""Training runs, one of them started by older code, and an evaluation of the first run's export."""


def write_data(folder: Path) -> None:
    """Write the prompts and the text for training."""
    rng = random.Random(5)
    vocabulary = ["mesh", "shard", "a", "token", "of", "the", "step", "loss", "rank", "is", "gathers", "sums"]

    def sentence(longest: int) -> str:
        return " ".join(rng.choice(vocabulary) for _ in range(rng.randint(2, longest)))

    rows = [{"prompt": sentence(6), "response": sentence(8)} for _ in range(80)]
    (folder / "jsonl.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "text.txt").write_text("\n\n".join(sentence(40) for _ in range(80)))
