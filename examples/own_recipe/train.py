"""Training of a causal LM until its held-out loss reaches a goal: a recipe written from an empty file.

python examples/own_recipe/train.py goal.eval_loss=5
"""

from __future__ import annotations

from dataclasses import dataclass, field

from meshbook import ConfigError, TrainConfig, data, models, recipe, training


@dataclass(kw_only=True, slots=True)
class GoalConfig:
    """Section `goal` of the config."""

    eval_loss: float = 2.0
    """Held-out loss at which training ends, above 0."""

    def __post_init__(self) -> None:
        if self.eval_loss <= 0:
            raise ConfigError(f"goal.eval_loss={self.eval_loss}: must be above 0")


@dataclass(kw_only=True, slots=True)
class ToGoalConfig(TrainConfig):
    """The sections of every training recipe, and `goal`."""

    goal: GoalConfig = field(default_factory=GoalConfig)


@recipe("to_goal")
def main(cfg: ToGoalConfig) -> None:
    """Train on this rank. The launcher calls it in every process."""
    with training.Run(cfg) as run:
        tokenizer = models.load_tokenizer(cfg.model)
        train_set = data.build_dataset(cfg.data, tokenizer, seq_len=cfg.training.seq_len, split="train")
        eval_set = data.build_dataset(cfg.data, tokenizer, seq_len=cfg.training.seq_len, split="eval")
        batches = data.TrainBatches(train_set, run.plan, seed=cfg.run.seed, fingerprint=train_set.fingerprint)
        held_out = data.EvalBatches(eval_set, run.plan)

        model = training.prepare(cfg, run, len(tokenizer))
        optimizer = training.build_optimizer(model, cfg.optimizer)
        objective = training.NextToken()

        run.begin(model, optimizer, batches, held_out)
        for step in run.steps():
            step.done(training.train_step(model, step.batches, optimizer, objective, step.requests))
            reached = False
            if step.due_eval:
                measured = training.evaluate(model, held_out, run=run)
                run.report_eval(measured)
                reached = bool(measured.count) and measured.loss <= cfg.goal.eval_loss  # the same on every rank
            if step.due_save:
                run.save(step)
            if reached:
                run.print(f"reached goal.eval_loss={cfg.goal.eval_loss} after {step.number} steps")
                break
        run.finish()


if __name__ == "__main__":
    main()
