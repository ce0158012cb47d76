"""Held-out loss, perplexity and sample generations of a checkpoint, an export, or any Hugging Face model.

python recipes/evaluate.py                                                       # the pretrained model
python recipes/evaluate.py run=outputs/finetune/RUN                              # a run: its model, data and checkpoint
python recipes/evaluate.py run=outputs/finetune/RUN data.max_eval_samples=50     # the other keys override the run's
python recipes/evaluate.py model.path=outputs/finetune/RUN/export                # an exported run
python recipes/evaluate.py evaluation.checkpoint=outputs/finetune/RUN/checkpoints/step_40
python recipes/evaluate.py evaluation.checkpoint=... evaluation.average=true     # its average (training.ema_decay)
python recipes/evaluate.py run=outputs/finetune/RUN evaluation.tasks='[hellaswag]'  # benchmark tasks of lm-eval
python recipes/evaluate.py peft=lora evaluation.checkpoint=...                   # a run with adapters
python recipes/evaluate.py model=qwen3_0_6b data=gsm8k parallelism=fsdp2_tp2     # another model, data set and mesh
"""

from __future__ import annotations

import math

from components import checkpoint, data, models, training
from components.config.schema import EvaluateConfig
from components.launch import recipe


@recipe("evaluate")
def main(cfg: EvaluateConfig) -> None:
    """Evaluate on this rank. The launcher calls it in every process."""
    with training.EvaluationRun(cfg) as run:
        # Data: every held-out sample is evaluated by exactly one data-parallel rank
        tokenizer = models.load_tokenizer(cfg.model, run.resume_from)
        eval_set = data.build_dataset(cfg.data, tokenizer, seq_len=cfg.evaluation.seq_len, split="eval")
        tasks = training.load_tasks(cfg.evaluation, tokenizer)  # benchmarks of lm-eval; none by default

        # Model: built on meta, parallelized, then filled with weights shard by shard
        model = training.prepare(cfg, run, len(tokenizer))
        if run.resume_from is not None:
            checkpoint.load_model_weights(run.resume_from, model.module, averaged=cfg.evaluation.average)

        run.begin(model, notes=[*model.notes, ("held-out data", eval_set.facts)])
        measured = training.evaluate(model, data.EvalBatches(eval_set, run.plan), run=run)
        run.report_eval(measured)
        if measured.count:
            perplexity = math.inf if measured.loss > 700 else math.exp(measured.loss)  # exp overflows at 710
            run.print(f"perplexity {perplexity:.3f} per target token")
        for name, source in data.sources_of(eval_set).items():
            of_source = training.evaluate(model, data.EvalBatches(source, run.plan), run=run)
            if not run.stopped:
                run.print(f"{name}: held-out loss {of_source.loss:.4f} over {of_source.count:,} target tokens")
        tasks.evaluate(model, run)
        training.show_generations(model, tokenizer, eval_set, cfg.generation, run)


if __name__ == "__main__":
    main()
