"""Preference optimization (DPO, SimPO, ORPO, KTO) of a Hugging Face causal LM on any mesh: full or LoRA.

python recipes/dpo.py data.path=pairs.jsonl                             # rows of prompt, chosen, rejected
python recipes/dpo.py data.path=pairs.jsonl data.chosen_column=better data.rejected_column=worse
python recipes/dpo.py data.path=pairs.jsonl peft=lora optimizer.lr=5e-4 # adapters; they need a higher learning rate
python recipes/dpo.py data.path=pairs.jsonl objective.beta=0.3          # stay closer to the reference (default: 0.1)
python recipes/dpo.py data.path=pairs.jsonl objective.label_smoothing=0.1               # for noisy preferences (cDPO)
python recipes/dpo.py data.path=pairs.jsonl objective=simpo             # without a reference model
python recipes/dpo.py data.path=rated.jsonl objective=kto               # rows of prompt, completion, label
python recipes/dpo.py data.path=pairs.jsonl parallelism=fsdp2_tp2 cluster=local_4proc   # another mesh, the same curve
python recipes/dpo.py data.path=pairs.jsonl 'evaluation.tasks=[hellaswag]'          # tasks of lm-eval, at the end
python recipes/dpo.py data.path=pairs.jsonl run.dir=outputs/mine        # the same command again resumes the run

Batch sizes count pairs. Logged metrics are means over pairs. Under DPO, "margin" is beta x (log-ratio of the chosen
answer - that of the rejected one), where a log-ratio is the log-probability minus the reference's; "accuracy" is the
share of pairs with a positive margin. "log_prob_accuracy" is the share whose chosen answer has the higher probability.
"""

from __future__ import annotations

from components import data, models, training
from components.config.schema import DpoConfig
from components.launch import recipe


@recipe("dpo")
def main(cfg: DpoConfig) -> None:
    """Train on this rank. The launcher calls it in every process."""
    with training.Run(cfg) as run:
        tokenizer = models.load_tokenizer(cfg.model)
        tasks = training.load_tasks(cfg.evaluation, tokenizer)  # of lm-eval; none by default
        model = training.prepare(cfg, run, len(tokenizer))
        preference = training.build_preference(cfg, run, model, len(tokenizer))

        # Pairs of answers, with their log-probabilities under the reference, the model before training, if it has one
        seq_len = cfg.training.seq_len
        read = {
            split: data.build_pairs(cfg.data, tokenizer, seq_len=seq_len, split=split) for split in ("train", "eval")
        }
        pairs = {split: training.with_reference(model, each, preference, run) for split, each in read.items()}
        batches = data.TrainBatches(pairs["train"], run.plan, seed=cfg.run.seed, fingerprint=pairs["train"].fingerprint)
        held_out = data.EvalBatches(pairs["eval"], run.plan)
        optimizer = training.build_optimizer(model, cfg.optimizer)

        run.begin(model, optimizer, batches, held_out)
        training.check_kernels(model, cfg.model, batches.at, run)
        run.report_eval(training.evaluate(model, held_out, preference, run))
        for step in run.steps():
            step.done(training.train_step(model, step.batches, optimizer, preference, step.requests))
            if step.due_eval:
                run.report_eval(training.evaluate(model, held_out, preference, run))
            if tasks.due(step):
                tasks.evaluate(model, run)
            if step.due_save:
                run.save(step)
        if run.due_eval:
            run.report_eval(training.evaluate(model, held_out, preference, run))
        run.finish()
        training.show_generations(model, tokenizer, pairs["eval"], cfg.generation, run)
        tasks.evaluate(model, run)  # this and the lines below do nothing if the run was stopped
        run.export(tokenizer)


if __name__ == "__main__":
    main()
