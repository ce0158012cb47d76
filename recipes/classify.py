"""Sequence classification and reward models on any mesh: a Hugging Face decoder with a score head, full or LoRA.

python recipes/classify.py data.path=mail.jsonl data.num_labels=2             # rows of text and label (0, 1, ...)
python recipes/classify.py data.path=mail.jsonl 'data.label_names=[ham,spam]'   # labels by name
python recipes/classify.py data.path=mail.csv data.text_column=body data.label_column=class data.num_labels=5
python recipes/classify.py objective=reward data=preferences data.path=pairs.jsonl   # rows of prompt, chosen, rejected
python recipes/classify.py objective=reward data=preferences data.path=pairs.jsonl peft=lora optimizer.lr=5e-4
python recipes/classify.py data.path=mail.jsonl data.num_labels=2 parallelism=fsdp2_tp2 cluster=local_4proc
python scripts/score.py outputs/classify/RUN/export pairs.jsonl                 # rewards and accuracy of an export

The last token of each text is scored, and AutoModelForSequenceClassification loads the export. Batch sizes count texts
or pairs. Logged metrics are means over them: "accuracy", and for a reward model the "margin" between the rewards of
the chosen and the rejected answer.
"""

from __future__ import annotations

from components import data, models, training
from components.config.schema import ClassifyConfig
from components.launch import recipe


@recipe("classify")
def main(cfg: ClassifyConfig) -> None:
    """Train on this rank. The launcher calls it in every process."""
    with training.Run(cfg) as run:
        # Labeled texts or pairs of answers, each with a target at its last token
        tokenizer = models.load_tokenizer(cfg.model)
        rows = data.build_scored(cfg.data, tokenizer, seq_len=cfg.training.seq_len, split="train")
        eval_rows = data.build_scored(cfg.data, tokenizer, seq_len=cfg.training.seq_len, split="eval")
        train_batches = data.TrainBatches(rows, run.plan, seed=cfg.run.seed, fingerprint=rows.fingerprint)
        eval_batches = data.EvalBatches(eval_rows, run.plan)

        # Model: a decoder whose score head is new, unless model.path has one
        model = training.prepare(cfg, run, len(tokenizer))
        scoring = training.build_scoring(cfg.objective, run.mesh)
        optimizer = training.build_optimizer(model, cfg.optimizer)

        run.begin(model, optimizer, train_batches, eval_batches)
        training.check_kernels(model, cfg.model, train_batches.at, run, scoring)
        run.report_eval(training.evaluate(model, eval_batches, scoring, run))
        for step in run.steps():
            step.done(training.train_step(model, step.batches, optimizer, scoring, step.requests))
            if step.due_eval:
                run.report_eval(training.evaluate(model, eval_batches, scoring, run))
            if step.due_save:
                run.save(step)
        if run.due_eval:
            run.report_eval(training.evaluate(model, eval_batches, scoring, run))
        run.finish()
        if run.stopped:
            return
        run.export(tokenizer)


if __name__ == "__main__":
    main()
