"""Fine-tuning of a Hugging Face causal LM on any mesh: all parameters or LoRA adapters.

python recipes/finetune.py                                              # SmolLM2-135M on Python's documentation
python recipes/finetune.py data=mine.jsonl                              # your prompts and responses
python recipes/finetune.py parallelism=fsdp2_tp2 cluster=local_4proc    # another mesh, the same loss curve
python recipes/finetune.py experiment=lora_smollm2                      # LoRA; peft=lora with any model
python recipes/finetune.py run.dir=outputs/mine training.max_steps=200  # the same command again resumes the run
python recipes/finetune.py -m optimizer.lr=1e-5,1e-4,1e-3               # a sweep, with a table at the end
python recipes/finetune.py parallelism=fsdp2_tp4 cluster=slurm_8node    # on a login node: checks, submits, returns
torchrun --nproc-per-node 8 recipes/finetune.py model=llama3_1_8b optimizer=adamw_large  # your launcher
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
