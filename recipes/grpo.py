"""Reinforcement learning with verifiable rewards (GRPO and its relatives) of a Hugging Face causal LM on any mesh.

python recipes/grpo.py data.path=problems.jsonl                         # columns prompt, answer, a number to be found
python recipes/grpo.py data.path=openai/gsm8k data.subset=main data.prompt_column=question 'reward.functions=[gsm8k]'
python recipes/grpo.py data.path=P 'reward.functions=[mine.py:score,length]' 'reward.weights=[1,0.1]'  # your own
python recipes/grpo.py data.path=P peft=lora optimizer.lr=1e-4          # adapters, instead of all weights
python recipes/grpo.py data.path=P objective=dapo                       # or dr_grpo, cispo, gspo, rloo, reinforce_pp
python recipes/grpo.py data.path=P objective.beta=0.01                  # stay close to the model before training
python recipes/grpo.py data.path=P rollouts.batches=4                   # four optimizer steps per batch of answers
python recipes/grpo.py data.path=P rollouts.replay=outputs/other        # train on the answers that another run sampled
python recipes/grpo.py data.path=P parallelism=fsdp2_tp2 cluster=local_4proc    # another mesh, the same reward curve
python recipes/grpo.py data.path=P run.dir=outputs/mine                 # the same command again resumes the run
python scripts/rollouts.py outputs/mine --step 12                       # read answers with their rewards

Batch sizes count answers, rollouts.group of each prompt. "reward" is the mean reward of a batch of answers, and
"eval_reward" that of an answer to each held-out prompt. "zero_groups" is the share of prompts whose answers all have
the same reward, which teach nothing, "cut" the share of answers without an end. Every answer is in run.dir/rollouts.
"""

from __future__ import annotations

from components import data, models, training
from components.config.schema import GrpoConfig
from components.launch import recipe


@recipe("grpo")
def main(cfg: GrpoConfig) -> None:
    """Train on this rank. The launcher calls it in every process."""
    with training.Run(cfg) as run, training.RewardFunctions(cfg.reward, cfg.rollouts.max_new_tokens) as reward:
        tokenizer = models.load_tokenizer(cfg.model)
        tasks = training.load_tasks(cfg.evaluation, tokenizer)  # of lm-eval; none by default
        model = training.prepare(cfg, run, len(tokenizer))
        policy = training.build_policy(cfg, run, model, len(tokenizer))  # the loss, and the reference if it has one

        seq_len = cfg.training.seq_len
        prompts = {
            split: data.build_prompts(cfg.data, tokenizer, cfg.rollouts, seq_len=seq_len, split=split)
            for split in ("train", "eval")
        }
        batches = data.PromptBatches(prompts["train"], run.plan, cfg.rollouts, seed=cfg.run.seed)
        rollouts = training.Rollouts(cfg, run, model, tokenizer, batches, policy, reward)
        optimizer = training.build_optimizer(model, cfg.optimizer)

        run.begin(model, optimizer, batches)
        run.report_eval(rollouts.evaluate(prompts["eval"]))
        for step in run.steps():
            if not rollouts.sample(step):  # and reward the answers, or load those that the step shares
                break  # stopped while sampling: the run resumes with this step
            run.log(step, **rollouts.metrics)
            step.done(training.train_step(model, rollouts.batches(step), optimizer, policy, step.requests))
            if step.due_eval:
                run.report_eval(rollouts.evaluate(prompts["eval"]))
            if tasks.due(step):
                tasks.evaluate(model, run)
            if step.due_save:
                run.save(step)
        if run.due_eval:
            run.report_eval(rollouts.evaluate(prompts["eval"]))
        run.finish()
        rollouts.show()
        training.show_generations(model, tokenizer, prompts["eval"], cfg.generation, run)
        tasks.evaluate(model, run)  # this and the line below do nothing if the run was stopped
        run.export(tokenizer)


if __name__ == "__main__":
    main()
