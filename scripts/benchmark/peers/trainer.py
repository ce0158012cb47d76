"""transformers.Trainer, without logs, evaluation and saves, on the workload's micro-batches."""

from __future__ import annotations

import tempfile
from typing import Any

import torch

from scripts.benchmark.peers.hf import load_model
from scripts.benchmark.peers.meter import Meter, run
from scripts.benchmark.peers.workload import Workload


class MicroBatches(torch.utils.data.Dataset):
    """Data set whose items are whole micro-batches, so that each step has the same documents in every arm."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def __len__(self) -> int:
        return self._workload.total_steps * self._workload.accumulation

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self._workload.micro_batch(*divmod(index, self._workload.accumulation))


def train(workload: Workload, meter: Meter) -> None:
    """Train by the Trainer, with optimizer, schedule and clipping set by its arguments."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    losses: list[torch.Tensor] = []

    class StepRecorder(TrainerCallback):
        def on_step_end(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
            meter.step(torch.stack(losses).sum(), optimizer)
            losses.clear()

    class SequentialTrainer(Trainer):
        def compute_loss(self, *arguments: Any, **options: Any) -> Any:
            loss = super().compute_loss(*arguments, **options)
            losses.append(loss.detach())
            return loss

        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    arguments = TrainingArguments(
        tempfile.mkdtemp(prefix="compare-trainer-"),
        max_steps=workload.total_steps,
        per_device_train_batch_size=1,  # an item is a micro-batch
        gradient_accumulation_steps=workload.accumulation,
        optim="adamw_torch_fused",
        learning_rate=workload.lr,
        lr_scheduler_type="constant",
        adam_beta1=workload.betas[0],
        adam_beta2=workload.betas[1],
        adam_epsilon=workload.eps,
        weight_decay=0.0,
        max_grad_norm=workload.max_grad_norm,
        bf16=workload.precision == "mixed",
        use_cpu=workload.device == "cpu",
        torch_compile=workload.compile,
        dataloader_pin_memory=workload.device == "cuda",
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
    )
    trainer = SequentialTrainer(
        load_model(workload),
        arguments,
        train_dataset=MicroBatches(workload),
        data_collator=lambda items: items[0],
        callbacks=[StepRecorder()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


if __name__ == "__main__":
    run(train, "transformers", "accelerate", "peft")
