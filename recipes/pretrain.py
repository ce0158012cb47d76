"""Pretraining of a causal LM from scratch on plain text, on any mesh: every token of a document carries loss.

python recipes/pretrain.py                                                   # 2M parameters on Python's own library
python recipes/pretrain.py data=text data.path=tinyshakespeare.txt           # your text
python recipes/pretrain.py model=llama_2m model.config.hidden_size=512 'data.path="corpus/"' data=text
python recipes/pretrain.py parallelism=fsdp2_tp2 cluster=local_4proc         # another mesh, the same loss curve
python recipes/pretrain.py -m optimizer.lr=3e-4,1e-3,3e-3                    # a sweep ends in one table
"""

from __future__ import annotations

from components import data, models, training
from components.config.schema import PretrainConfig
from components.launch import recipe


@recipe("pretrain")
def main(cfg: PretrainConfig) -> None:
    """Runs on every rank, after the processes were started."""
    with training.Run(cfg) as run:
        # Data: a step is global_batch_size sequences on every mesh, in an order that (seed, step) alone decides
        tokenizer = models.load_tokenizer(cfg.model)
        tokenizer.chat_template = None  # the model continues text and knows no turns; so it is exported
        train_set = data.build_dataset(cfg.data, tokenizer, seq_len=cfg.training.seq_len, split="train")
        eval_set = data.build_dataset(cfg.data, tokenizer, seq_len=cfg.training.seq_len, split="eval")
        padding = run.padding(tokenizer, cfg.training.seq_len)
        batches = data.TrainBatches(
            train_set, run.plan, seed=cfg.run.seed, padding=padding, fingerprint=train_set.fingerprint
        )

        # Model: built on meta, parallelized, then filled shard by shard
        model = training.prepare(cfg, run, len(tokenizer))
        optimizer = training.build_optimizer(model.module, cfg.optimizer)
        objective = training.NextToken.of(cfg.objective)

        def evaluate() -> None:
            held_out = run.plan.eval_batches(eval_set, padding)
            with run.status("evaluating"):
                loss, tokens = training.evaluate(model.replica, held_out, model.settings, run.agreed_to_stop)
            run.report_eval(loss, tokens)

        def generate() -> None:
            run.report_generations(training.generate_samples(model, tokenizer, eval_set, cfg.generation, run))

        run.resume(model, optimizer, batches)
        kernels = training.check_kernels(model.replica, cfg, batches.at, model.settings)
        run.begin(train_set, eval_set, kernels)
        evaluate()
        generate()
        for step in run.steps():  # every step that is left; ends on a request to stop
            numbers = training.train_step(model.replica, step.batches, optimizer, model.settings, step.asked, objective)
            step.done(numbers)
            if step.due_eval:
                evaluate()
            if step.due_save:
                run.save(step)
        if not run.stopped:
            evaluate()
        run.finish()
        if not run.stopped:
            generate()
        if not run.stopped:
            run.export(tokenizer)


if __name__ == "__main__":
    main()
