"""Fine-tuning on flash cards: recipes/finetune.py, copied. The data come from cards.py and conf/data/cards.yaml.

python examples/own_data/train.py data=cards model=tiny training.epochs=5 training.global_batch_size=4
"""

from __future__ import annotations

from components import data, models, training
from components.config.schema import FinetuneConfig
from components.launch import recipe


@recipe("finetune")
def main(cfg: FinetuneConfig) -> None:
    """Train on this rank. The launcher calls it in every process."""
    with training.Run(cfg) as run:
        # Data: global_batch_size sequences per step on every mesh; their order depends on (seed, step) only
        tokenizer = models.load_tokenizer(cfg.model)
        train_set = data.build_dataset(cfg.data, tokenizer, seq_len=cfg.training.seq_len, split="train")
        eval_set = data.build_dataset(cfg.data, tokenizer, seq_len=cfg.training.seq_len, split="eval")
        batches = data.TrainBatches(train_set, run.plan, seed=cfg.run.seed, fingerprint=train_set.fingerprint)
        held_out = data.EvalBatches(eval_set, run.plan)
        tasks = training.load_tasks(cfg.evaluation, tokenizer)  # benchmarks of lm-eval; none by default

        # Model: built on meta, parallelized, then filled with weights shard by shard
        model = training.prepare(cfg, run, len(tokenizer))
        optimizer = training.build_optimizer(model, cfg.optimizer)
        objective = training.NextToken(cfg.objective)

        def evaluate() -> None:
            run.report_eval(training.evaluate(model, held_out, run=run))

        def generate() -> None:
            training.show_generations(model, tokenizer, eval_set, cfg.generation, run)

        run.begin(model, optimizer, batches, held_out)  # resumes from a checkpoint if there is one; prints the banner
        training.check_kernels(model, cfg.model, batches.at, run)
        evaluate()
        generate()
        for step in run.steps():  # the remaining steps; ends early on a stop request
            step.done(training.train_step(model, step.batches, optimizer, objective, step.requests))
            if step.due_eval:
                evaluate()
            if tasks.due(step):
                tasks.evaluate(model, run)
            if step.due_save:
                run.save(step)
        if run.due_eval:
            evaluate()
        run.finish()
        generate()  # this and the lines below do nothing if the run was stopped
        tasks.evaluate(model, run)
        run.export(tokenizer)


if __name__ == "__main__":
    main()
