"""Pretraining of a causal LM from scratch on plain text, on any mesh. All tokens but a row's first are targets.

python recipes/pretrain.py                                                   # 2M parameters on the standard library
python recipes/pretrain.py data=text data.path=tinyshakespeare.txt           # your text
python recipes/pretrain.py model=llama_2m model.config.hidden_size=512 data=text data.path=corpus/
python recipes/pretrain.py parallelism=fsdp2_tp2 cluster=local_4proc         # another mesh, the same loss curve
python recipes/pretrain.py -m optimizer.lr=3e-4,1e-3,3e-3                    # a sweep, with a table at the end
"""

from __future__ import annotations

from components import data, models, training
from components.config.schema import PretrainConfig
from components.launch import recipe


@recipe("pretrain")
def main(cfg: PretrainConfig) -> None:
    """Train on this rank. The launcher calls it in every process."""
    with training.Run(cfg) as run:
        # Data: global_batch_size sequences per step on every mesh; their order depends on (seed, step) only
        tokenizer = models.load_tokenizer(cfg.model)
        tokenizer.chat_template = None  # the model is not trained on chats, and is exported without a template
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
