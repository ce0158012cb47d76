"""Fine-tuning of a Hugging Face causal LM on any mesh: every parameter, or adapters (LoRA).

python recipes/finetune.py                                              # SmolLM2-135M on Python's documentation
python recipes/finetune.py data=jsonl data.path=mine.jsonl              # your prompts and responses
python recipes/finetune.py parallelism=fsdp2_tp2 cluster=local_4proc    # another mesh, the same loss curve
python recipes/finetune.py experiment=lora_smollm2                      # LoRA; peft=lora with any model
python recipes/finetune.py run.dir=outputs/mine training.max_steps=200  # typed again, the command resumes
python recipes/finetune.py -m parallelism=ddp,fsdp2,fsdp2_tp2           # a sweep over meshes ends in one table
python recipes/finetune.py parallelism=fsdp2_tp4 cluster=slurm_8node    # from a login node: checks, submits, returns
torchrun --nproc-per-node 8 recipes/finetune.py model=llama3_1_8b       # your own launcher
"""

from __future__ import annotations

from components import data, models, training
from components.config.schema import FinetuneConfig
from components.launch import recipe


@recipe("finetune")
def main(cfg: FinetuneConfig) -> None:
    """Runs on every rank, after the processes were started."""
    with training.Run(cfg) as run:
        # Data: a step is global_batch_size sequences on every mesh, in an order that (seed, step) alone decides
        tokenizer = models.load_tokenizer(cfg.model)
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
