"""Distillation of a teacher into a smaller Hugging Face causal LM with the same tokenizer, on any mesh.

python recipes/distill.py teacher.path=outputs/big/export model.path=small   # your models
python recipes/distill.py teacher.path=Qwen/Qwen3-8B model=qwen3_0_6b data=jsonl data.path=mine.jsonl
python recipes/distill.py teacher.path=T model.config.num_hidden_layers=4 model.init=random   # a student from scratch
python recipes/distill.py teacher.path=T objective.divergence=reverse_kl objective.temperature=2
python recipes/distill.py teacher.path=T objective.cross_entropy_weight=0.5             # half of the loss from the data
python recipes/distill.py teacher.path=T 'evaluation.tasks=[hellaswag]' evaluation.every=500  # lm-eval on the student
python recipes/distill.py teacher.path=T parallelism=fsdp2_tp2 cluster=local_4proc      # another mesh, the same curve

python scripts/teacher.py teacher.path=T run.dir=outputs/teacher/mine                   # run the teacher once, and then
python recipes/distill.py teacher.stored=outputs/teacher/mine                           # train students without it

The teacher runs in every step on the student's mesh, unless its most likely tokens were stored before. Logged metrics
are means over target tokens: "divergence" of the student's distribution from the teacher's, and "cross_entropy" and
"teacher_cross_entropy" of the data's targets under the two models. "eval_loss" is the student's cross-entropy.
"""

from __future__ import annotations

from components import data, models, training
from components.config.schema import DistillConfig
from components.launch import recipe


@recipe("distill")
def main(cfg: DistillConfig) -> None:
    """Train on this rank. The launcher calls it in every process."""
    with training.Run(cfg) as run:
        tokenizer = models.load_tokenizer(cfg.model)
        tasks = training.load_tasks(cfg.evaluation, tokenizer)  # benchmarks for the student; none by default
        student = training.prepare(cfg, run, len(tokenizer))
        distillation = training.build_distillation(cfg, run, student, tokenizer)  # loads the teacher
        optimizer = training.build_optimizer(student, cfg.optimizer)

        seq_len = cfg.training.seq_len
        texts = {
            split: data.build_dataset(cfg.data, tokenizer, seq_len=seq_len, split=split) for split in ("train", "eval")
        }
        stored = {split: distillation.stored_values(each, split) for split, each in texts.items()}  # or None
        identity, values = texts["train"].fingerprint, stored["train"]
        batches = data.TrainBatches(
            texts["train"], run.plan, seed=cfg.run.seed, fingerprint=identity, token_values=values
        )
        held_out = data.EvalBatches(texts["eval"], run.plan, stored["eval"])

        run.begin(student, optimizer, batches, held_out)
        training.check_kernels(student, cfg.model, batches.at, run)
        run.report_eval(training.evaluate(student, held_out, distillation, run))
        for step in run.steps():
            step.done(training.train_step(student, step.batches, optimizer, distillation, step.requests))
            if step.due_eval:
                run.report_eval(training.evaluate(student, held_out, distillation, run))
            if tasks.due(step):
                tasks.evaluate(student, run)
            if step.due_save:
                run.save(step)
        if run.due_eval:
            run.report_eval(training.evaluate(student, held_out, distillation, run))
        run.finish()
        training.show_generations(student, tokenizer, texts["eval"], cfg.generation, run)
        tasks.evaluate(student, run)  # this and the lines below do nothing if the run was stopped
        run.export(tokenizer)


if __name__ == "__main__":
    main()
