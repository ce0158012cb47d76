"""Rollouts of recipes/grpo.py: answers are sampled from the model in training, rewarded, stored, and shown.

All ranks know all answers, rewards and advantages of a batch. The sampled tokens are a function of the weights, the
seed, the number of the prompt in the order of the data and the position, and rewards are computed once for each answer,
so a run has the same answers on every mesh, as far as the arithmetic has the same bits.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from components import data, models
from components.batch import Batch
from components.config.schema.data import IGNORED
from components.config.schema.objective import AdvantageScale, Baseline, KLEstimator
from components.config.schema.recipes import GrpoConfig
from components.config.schema.rollouts import CutAnswers, GroupFilter, Normalization
from components.json_collectives import all_gather_json, broadcast_json
from components.protocol.errors import ConfigError, field_values
from components.protocol.failures import StatedFailure
from components.protocol.run_files import ROLLOUTS
from components.training.answers import Answers, micro_batches
from components.training.evaluation import Evaluation, generation_forward
from components.training.loss import sum_over_ranks
from components.training.objectives.loss_head import vocabulary_of
from components.training.objectives.policy import (
    ADVANTAGE,
    OLD,
    REFERENCE_TOKENS,
    WEIGHT,
    Policy,
    SampledLoss,
    advantages_of,
    summed_rewards,
)
from components.training.prepared import Prepared
from components.training.rewards import RewardFunctions
from components.training.step import local_batch, score_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from components.training.run import Run, Step

_INDEX = "index"
"""Name in `Batch.token_values` of the place of a token among those of all answers."""


class FailedRewards(StatedFailure, RuntimeError):
    """Failure of a run whose reward functions failed for too many answers."""


class Rollouts:
    """Samples, rewards, stores and loads the answers that a run trains on."""

    def __init__(
        self,
        cfg: GrpoConfig,
        run: Run,
        model: Prepared,
        tokenizer: PreTrainedTokenizerBase,
        batches: data.PromptBatches,
        policy: Policy,
        reward: RewardFunctions,
    ) -> None:
        """Raises ConfigError if the model's context is shorter than training.seq_len.

        `reward`: is not called if the answers of another run are replayed, but for held-out prompts.
        """
        context, seq_len = models.context_length(model.module), cfg.training.seq_len
        if context is not None and seq_len > context:
            raise ConfigError(
                f"training.seq_len={seq_len}: answers are sampled within the model's context of {context} tokens; "
                "lower it to that, or extend the context (model/rope=yarn)"
            )
        self._cfg, self._run, self._model, self._tokenizer = cfg, run, model, tokenizer
        self._batches, self._policy, self._reward = batches, policy, reward
        self._folder = Path(run.dir) / ROLLOUTS
        rollouts = cfg.rollouts
        prompts = rollouts.batches * run.plan.global_batch_size // rollouts.group
        batch = f"{prompts} prompts x {rollouts.group} answers of up to {rollouts.max_new_tokens} tokens"
        used = f", for {rollouts.updates} steps" if rollouts.updates > 1 else ", on policy: ratios are 1, not clipped"
        source = f"those of {rollouts.replay}" if rollouts.replay else f"temperature {rollouts.temperature:g}"
        model.notes.insert(0, ("rollouts", f"{batch}{used}; {source}; rewards: {', '.join(cfg.reward.functions)}"))
        self._first = 0  # optimizer step that is the first to train on these answers
        self._answers: Answers
        self._advantages: list[np.ndarray] = []
        self._stops: set[int] = set()
        self.metrics: dict[str, float] = {}
        """Values of the answers for `Run.log` in the first step that trains on them; empty in the others."""

    def sample(self, step: Step) -> bool:
        """Sample and reward the answers that a step trains on, or load them, and store them. A collective.

        The steps of rollouts.batches and rollouts.passes share them. Returns False if a stop request ended the
        sampling: the step cannot be done, and the run resumes with it.

        Raises ConfigError if answers of an earlier step are missing, or those of rollouts.replay do not fit.
        """
        self.metrics = {}
        first = step.number - (step.number - 1) % self._cfg.rollouts.updates
        if first == self._first:
            return True
        began = time.perf_counter()
        if self._first == 0:
            self._remove_after(first)
        answers = self._stored(first, step.number)
        if answers is None:
            answers = self._new(first)
        if answers is None:
            return False
        self._first, self._answers = first, answers
        self._advantages = self._advantages_of(answers)
        if step.number == first:
            self.metrics = self._metrics_of(answers, time.perf_counter() - began)
        return True

    def batches(self, step: Step) -> list[Batch]:
        """Return this rank's micro-batches of a step from the answers that were sampled for it."""
        cfg, answers = self._cfg.rollouts, self._answers
        size = len(answers) // cfg.batches
        start = (step.number - self._first) % cfg.batches * size
        part = answers.select(range(start // cfg.group, (start + size) // cfg.group))
        values: dict[str, Sequence[np.ndarray]] = {
            ADVANTAGE: self._advantages[start : start + size],
            WEIGHT: [np.full(length, self._policy.token_weight(length)) for length in part.lengths],
            # An answer that serves one update is on policy: its probability ratio is 1 without rounding.
            **{name: each for name, each in part.log_probs.items() if name != OLD or cfg.updates > 1},
        }
        masked = [not ended for ended in part.ended] if cfg.overlong is CutAnswers.mask else []
        return micro_batches(part, self._run.plan, values, masked=masked, packed=self._packed)

    @property
    def _packed(self) -> int | None:
        return self._cfg.training.seq_len if self._cfg.data.pack else None

    def evaluate(self, prompts: data.Prompts) -> Evaluation:
        """Return the mean reward of one answer to each held-out prompt. A collective.

        The answers are generated as generation.temperature, .top_p and .seed say, by default greedily.
        """
        generation = self._cfg.generation
        sampling = models.Sampling(generation.temperature, generation.top_p, generation.seed, keeps_stop=True)
        with self._model.with_weights(self._model.evaluates_average):
            answers = self._sampled(prompts, range(len(prompts)), 1, sampling)
        if answers is None:
            return Evaluation(math.nan, 0, "answer")
        scores = answers.scores(self._cfg.reward.weights)
        metrics = {"answer_tokens": float(np.mean(answers.lengths)), "cut": 1 - float(np.mean(answers.ended))}
        metrics |= {name: _mean(each) for name, each in self._named(answers.rewards).items()}
        known = int((~np.isnan(scores)).sum())
        return Evaluation(math.nan, known, "answer", metrics, reward=_mean(scores))

    def show(self) -> None:
        """Print the best and the worst answer of the last batch to the prompt whose rewards differ most, on rank 0."""
        if not self._first:
            return
        cfg, answers = self._cfg.rollouts, self._answers
        groups = answers.scores(self._cfg.reward.weights).reshape(-1, cfg.group)
        highest, lowest = (np.where(np.isnan(groups), least, groups) for least in (-math.inf, math.inf))
        number = int(np.argmax(highest.max(1) - lowest.min(1)))
        prompt = self._tokenizer.decode(answers.prompts[number], skip_special_tokens=True)
        self._run.print(f"\nprompt: {prompt}")
        for name, place in (("best", int(highest[number].argmax())), ("worst", int(lowest[number].argmin()))):
            tokens = answers.tokens[number * cfg.group + place]
            text = self._tokenizer.decode(tokens, skip_special_tokens=True)
            reward = groups[number, place]
            self._run.print(f"{name} of {cfg.group} answers, reward {reward:.4g}, {len(tokens)} tokens: {text}")

    def _new(self, first: int) -> Answers | None:
        """Return new answers with their log-probabilities, stored; None after a stop request."""
        cfg, before = self._cfg.rollouts, self._batches.drawn
        if cfg.replay is None:
            found = self._drawn(first)
            if found is None:
                return None
            answers, drawn = found
        else:
            answers, drawn = self._replayed(Path(cfg.replay).expanduser() / ROLLOUTS / _name(first), first)
        answers = self._with_log_probs(answers)
        self._batches.drawn = drawn
        if self._run.rank == 0:
            answers.write(self._folder / _name(first), {**self._identity, "before": before, "drawn": drawn})
        return answers

    def _drawn(self, first: int) -> tuple[Answers, int] | None:
        """Sample answers to the next prompts; return them, and the prompts drawn up to their end. None after a stop.

        With rollouts.filter, prompts whose answers have equal rewards are left out while others can be drawn.
        """
        cfg, start = self._cfg.rollouts, self._batches.drawn
        needed = cfg.batches * self._run.plan.size_of(first - 1) // cfg.group
        most = needed * (1 if cfg.filter is GroupFilter.none else cfg.max_draws)
        sampling = models.Sampling(cfg.temperature, seed=self._cfg.run.seed, keeps_stop=True)
        parts, is_kept = list[Answers](), list[bool]()
        while sum(is_kept) < needed and len(is_kept) < most:
            begin = start + len(is_kept)
            numbers = range(begin, begin + min(needed - sum(is_kept), most - len(is_kept)))
            sampling = replace(sampling, first_sample=begin * cfg.group)
            part = self._sampled(self._batches.dataset, numbers, cfg.group, sampling, first)
            if part is None:
                return None
            parts.append(part)
            groups = part.scores(self._cfg.reward.weights).reshape(-1, cfg.group)
            has_spread = [len(set(each[~np.isnan(each)].tolist())) > 1 for each in groups]
            is_kept += has_spread if cfg.filter is GroupFilter.zero_variance else [True] * len(groups)
        left_out = [number for number, kept in enumerate(is_kept) if not kept]
        chosen = [number for number, kept in enumerate(is_kept) if kept]
        chosen = sorted(chosen + left_out[: needed - len(chosen)])
        return Answers.joined(parts).select(chosen), start + len(is_kept)

    def _sampled(
        self, prompts: Any, numbers: range, group: int, sampling: models.Sampling, step: int = 0
    ) -> Answers | None:
        """Sample and reward answers to some prompts, by their numbers in the order; None after a stop request."""
        cfg, run, model = self._cfg.rollouts, self._run, self._model
        indices = self._batches.indices(numbers.start, len(numbers)) if step else numbers
        rows = [prompts[index] for index in indices]
        repeated = [row.prompt for row in rows for _ in range(group)]
        rows_at_once = min(cfg.rows, -(-len(repeated) // run.mesh.size("dp_cp")))  # of a rank
        reports = not self._stops
        self._stops = self._stops or models.stop_tokens(model.module, self._tokenizer)
        with (
            generation_forward(model, run, rows_at_once, self._cfg.training.seq_len, reports=reports) as forward,
            run.status("sampling", cfg.max_new_tokens * -(-len(repeated) // forward.share[1])) as advance,
        ):

            def show_progress(index: int, answer: list[int]) -> bool:
                advance()
                return False

            tokens = models.generate_tokens(
                model.module, self._tokenizer, repeated, cfg.max_new_tokens, forward, sampling, show_progress
            )
        if not tokens:
            return None
        answers = Answers(
            group=group,
            samples=list(numbers),
            prompts=[list(row.prompt.tokens) for row in rows],
            tokens=tokens,
            ended=[each[-1] in self._stops for each in tokens],
            rewards=np.zeros((0, len(tokens))),
        )
        return replace(answers, rewards=self._rewards(answers, rows, step))

    def _rewards(self, answers: Answers, rows: Sequence[data.RewardedPrompt], step: int) -> np.ndarray:
        """Return the rewards (functions, answers) in float64; NaN: none. A collective.

        The first rank of each dp rank rewards whole groups.

        Raises ConfigError if a function breaks its contract, and FailedRewards if they fail for too many answers.
        """
        run, group, cfg = self._run, answers.group, self._cfg.reward
        scores = run.mesh.counts_tokens and run.mesh.rank("cp") == 0
        own = range(run.plan.dp_rank, len(rows), run.plan.dp_size) if scores else range(0)
        places = [place for number in own for place in range(number * group, (number + 1) * group)]
        texts = [str(self._tokenizer.decode(answers.tokens[place], skip_special_tokens=True)) for place in places]
        of_rows = [rows[place // group] for place in places]
        columns = {
            name: [row.columns.get(name) for row in of_rows]
            for name in sorted({n for row in of_rows for n in row.columns})
        }
        columns |= {
            "prompts": [row.content for row in of_rows],
            "token_ids": [answers.tokens[place] for place in places],
            "stopped": [answers.ended[place] for place in places],
        }
        problems, rewards, failed, failure = list[str](), list[Any](), 0, ""
        if places:
            try:
                scored = self._reward.score(texts, columns, step)
                rewards, failed, failure = scored.rewards, scored.failed, scored.failure
            except ConfigError as error:  # on all ranks, which would wait for this one otherwise
                problems = error.problems
        found = all_gather_json([problems, places, rewards, failed, failure])
        if problems := [problem for each in found for problem in each[0]]:
            raise ConfigError(list(dict.fromkeys(problems)))
        result = np.full((len(cfg.functions), len(answers)), math.nan)
        for _, of_rank, values, *_ in found:
            if of_rank:
                result[:, of_rank] = np.array(values, dtype=np.float64)
        failures = sum(each[3] for each in found)
        text = next((each[4] for each in found if each[4]), "")
        if failures > cfg.max_failures * len(answers):
            raise FailedRewards(
                f"reward.max_failures={cfg.max_failures:g}: {failures} of {len(answers)} answers have no reward, as "
                f"reward.functions failed or took too long; correct them, or raise it. The first failure:\n{text}"
            )
        if failures:
            run.print(f"warning: {failures} of {len(answers)} answers have no reward. The first failure:\n{text}")
        if np.isnan(result).all():
            text = (
                f"reward.functions={cfg.functions}: none of {len(answers)} answers has a reward; number, gsm8k, exact "
                "and regex compare with data.answer_column, where they found nothing; set it, or use another function"
            )
            if step and not self._first:  # the first batch: a mistake in the config, not a rare batch
                raise FailedRewards(text)
            run.print(f"warning: {text}")
        return self._with_penalty(result, answers)

    def _with_penalty(self, rewards: np.ndarray, answers: Answers) -> np.ndarray:
        """Return rewards with another row for rollouts.overlong=penalty."""
        cfg = self._cfg.rollouts
        if cfg.overlong is not CutAnswers.penalty:
            return rewards
        beyond = np.array(answers.lengths) - (cfg.max_new_tokens - cfg.overlong_margin)
        penalty = -np.clip(beyond / cfg.overlong_margin, 0.0, 1.0)
        return np.vstack([rewards, np.where(np.isnan(rewards).all(0), math.nan, penalty)])

    def _named(self, rewards: np.ndarray) -> dict[str, np.ndarray]:
        """Return the rewards of each function by the name of its metric, if there are several."""
        full = self._cfg.reward.functions
        names = [name.rpartition(":")[2] for name in full]
        names = names if len(set(names)) == len(names) else list(full)
        names += ["overlong"] * (len(rewards) - len(names))
        return {f"reward/{name}": each for name, each in zip(names, rewards, strict=True)} if len(names) > 1 else {}

    def _advantages_of(self, answers: Answers) -> list[np.ndarray]:
        """Return the advantage of each token of each answer, (tokens,) float64."""
        cfg, policy = self._cfg.reward, self._policy.cfg
        scores, kl = answers.scores(self._cfg.reward.weights), None
        if cfg.normalize is Normalization.normalize_then_sum:
            scores = summed_rewards(answers.rewards, cfg.weights, cfg.normalize, answers.group)
            policy = replace(policy, scale=AdvantageScale.none, baseline=Baseline.none)
        if policy.beta > 0 and policy.kl is KLEstimator.k1:
            both = zip(answers.log_probs[OLD], answers.log_probs[REFERENCE_TOKENS], strict=True)
            kl = [old - reference for old, reference in both]
        return advantages_of(policy, scores, answers.group, answers.lengths, kl)

    @property
    def _needed(self) -> list[str]:
        """Names of the log-probabilities that advantages and loss use."""
        policy = self._policy.cfg
        needs_old = self._cfg.rollouts.updates > 1 or (policy.beta > 0 and policy.kl is KLEstimator.k1)
        return [OLD] * needs_old + [REFERENCE_TOKENS] * (policy.beta > 0)

    @torch.no_grad()
    def _with_log_probs(self, answers: Answers) -> Answers:
        """Return answers with the log-probabilities of their tokens under the present weights and the reference.

        A collective. They are those of a forward of whole rows, as in training: one with a cache rounds otherwise.
        """
        model, settings, ends = self._model, self._model.settings, np.cumsum([0, *answers.lengths])
        index = [np.arange(start, end) for start, end in zip(ends[:-1], ends[1:], strict=True)]
        found = torch.zeros(len(self._needed), int(ends[-1]), dtype=torch.float64, device=settings.device)
        loss = SampledLoss(self._cfg.rollouts.temperature)
        if not self._needed:
            return answers
        for batch in micro_batches(answers, self._run.plan, {_INDEX: index}, packed=self._packed):
            local = local_batch(batch.to(settings.device), settings)
            plain, is_target = replace(local, token_values={}), local.targets != IGNORED
            places = local.token_values[_INDEX][is_target]
            for row, name in zip(found, self._needed, strict=True):
                score = score_tokens if name == OLD or self._policy.reference is None else self._policy.reference
                losses = score(model, plain, loss)
                if losses is not None:
                    row[places] = -losses[is_target].double()
        totals = sum_over_ranks(found * settings.counts_tokens).cpu().numpy()
        parts = {name: np.split(row, ends[1:-1]) for name, row in zip(self._needed, totals, strict=True)}
        return replace(answers, log_probs=parts)

    def _metrics_of(self, answers: Answers, seconds: float) -> dict[str, float]:
        """Return the values of new answers for metrics.jsonl, the same on every rank."""
        scores, lengths = answers.scores(self._cfg.reward.weights), answers.lengths
        groups = [each[~np.isnan(each)] for each in scores.reshape(-1, answers.group)]
        return {
            "reward": _mean(scores),
            "reward_std": float(np.mean([each.std(ddof=1) for each in groups if len(each) > 1] or [0.0])),
            **{name: _mean(each) for name, each in self._named(answers.rewards).items()},
            "zero_groups": float(np.mean([len(set(each.tolist())) < 2 for each in groups])),
            "unrewarded": float(np.isnan(scores).mean()),
            "answer_tokens": float(np.mean(lengths)),
            "answer_tokens_max": float(max(lengths)),
            "cut": 1 - float(np.mean(answers.ended)),
            "prompts_drawn": float(self._batches.drawn),
            "rollout_seconds": seconds,
        }

    @property
    def _identity(self) -> Mapping[str, Any]:
        """Return what the answers of a step depend on, besides the weights."""
        cfg = self._cfg
        return {
            "prompts": self._batches.dataset.fingerprint,  # type: ignore[attr-defined]
            "run.seed": cfg.run.seed,
            **_prefixed("rollouts", cfg.rollouts, without=("rows", "max_draws")),
            **_prefixed("reward", cfg.reward, without=("timeout_seconds", "max_failures")),
            "training.global_batch_size": cfg.training.global_batch_size,
            "log_probs": self._needed,
        }

    def _stored(self, first: int, number: int) -> Answers | None:
        """Return the answers that this run stored before an interruption, for the step `number` or an earlier one.

        A collective. None if there are none and they can be sampled, since `number` is their first step.
        """
        folders, is_begun = [self._folder], number > first
        if is_begun and self._run.resume_from is not None:  # perhaps another run's checkpoint
            folders.append(self._run.resume_from.parent.parent / ROLLOUTS)
        problems, answers, drawn = list[str](), None, -1
        for file in (folder / _name(first) for folder in dict.fromkeys(folders)):
            answers, problem, drawn = self._fitting(file, is_begun)
            if not (problem := max(all_gather_json(problem))):
                break
            problems, answers = [*problems, f"{file}: {problem}"], None
        if answers is None and is_begun:
            raise ConfigError(
                f"{'; '.join(problems)}; step {number} trains on the answers that were sampled for "
                f"step {first}, and the weights of that time are gone: restore the file, resume from a checkpoint of "
                f"step {first - 1}, or choose another run.dir to start over"
            )
        if answers is not None:
            self._batches.drawn = drawn
            self._run.print(f"step {number}: trains on the answers that were stored before for step {first}")
            if self._run.rank == 0 and not (self._folder / _name(first)).exists():
                answers.write(self._folder / _name(first), {**self._identity, "before": -1, "drawn": drawn})
        return answers

    def _fitting(self, file: Path, is_begun: bool) -> tuple[Answers | None, str, int]:
        """Return the answers in a file, why they are none of this run's ("": they are), and the prompts drawn."""
        try:
            answers, stated = Answers.read(file)
        except FileNotFoundError:
            return None, "missing", -1
        except (OSError, ValueError, LookupError) as error:
            return None, f"damaged ({type(error).__name__}: {error})", -1
        before, drawn = stated.pop("before"), stated.pop("drawn")
        own = json.loads(json.dumps(self._identity))
        if changed := [name for name in {**own, **stated} if own.get(name) != stated.get(name)]:
            return None, f"sampled with another {', '.join(changed)}", -1
        if self._batches.drawn != (drawn if is_begun else before):
            return None, "sampled at another place in the data", -1
        return answers, "", drawn

    def _replayed(self, file: Path, first: int) -> tuple[Answers, int]:
        """Return the answers of another run, and the prompts that it had drawn. A collective."""
        key, size = f"rollouts.replay={self._cfg.rollouts.replay}", vocabulary_of(self._model.module)
        problem, answers, drawn = "", None, 0
        try:
            answers, stated = Answers.read(file)
            drawn = stated["drawn"]
            wanted = self._cfg.rollouts.batches * self._run.plan.size_of(first - 1)
            rewards = ("reward.functions", "rollouts.overlong_margin")
            if stated["prompts"] != self._identity["prompts"]:
                problem = "its prompts differ from those of this run; use the same data and tokenizer"
            elif changed := [name for name in rewards if stated[name] != self._identity[name]]:
                problem = f"its answers were rewarded with another {' and '.join(changed)}; use that run's"
            elif (len(answers), answers.group) != (wanted, self._cfg.rollouts.group):
                problem = (
                    f"{file.name} holds {len(answers)} answers in groups of {answers.group}, and step {first} needs "
                    f"{wanted} in groups of {self._cfg.rollouts.group}; use that run's training.global_batch_size, "
                    "rollouts.group and rollouts.batches"
                )
            elif max(map(max, answers.tokens)) >= size:
                problem = f"{file.name} holds token ids beyond the {size:,} of the model; use the model of that run"
        except FileNotFoundError:
            problem = f"has no {file.name}, the answers of step {first}; lower training.max_steps"
        except (OSError, ValueError, LookupError) as error:
            problem = f"{file.name} is damaged ({type(error).__name__}: {error})"
        problem = max(all_gather_json(problem))  # all ranks use the file, or none
        if answers is None or problem:
            raise ConfigError(f"{key}: {problem}")
        return answers, drawn

    def _remove_after(self, first: int) -> None:
        """Remove the answers of later steps, which an earlier attempt took from a later checkpoint. A collective."""
        if self._run.rank == 0 and self._folder.is_dir():
            for file in self._folder.glob("*.safetensors"):
                if file.stem.isdecimal() and int(file.stem) > first:
                    file.unlink(missing_ok=True)
        broadcast_json(None)


def _prefixed(section: str, cfg: Any, without: Sequence[str]) -> dict[str, Any]:
    """Return the values of a section by key, but for some."""
    return {f"{section}.{key}": value for key, value in field_values(cfg).items() if key not in without}


def _name(first: int) -> str:
    return f"{first:06d}.safetensors"


def _mean(values: np.ndarray) -> float:
    """Return the mean of values without NaN; NaN of none."""
    known = values[~np.isnan(values)]
    return math.fsum(known) / len(known) if len(known) else math.nan
