"""One pass over held-out data, sample generations during a run, and log-probabilities of continuations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from components import data, distributed, models, observability
from components.batch import Batch
from components.config.schema.data import IGNORED, DataConfig, MixtureDataConfig
from components.config.schema.training import EvalWeights, GenerationConfig
from components.conversation import Conversation, Prompt, parse_calls, same_json, text_of
from components.data.batches import Padding
from components.distributed.init import get_local_world_size_preinit
from components.json_collectives import all_gather_json
from components.protocol.processes import usable_memory
from components.training.context import RunContext
from components.training.loss import all_ranks, count_targets, reduce_loss, sum_over_ranks
from components.training.objectives import PLAIN, Chunk, RowScores, TokenLoss, TokenObjective, row_objective
from components.training.objectives.base import CROSS_ENTROPY
from components.training.objectives.cross_entropy import log_softmax, upcast
from components.training.prepared import Prepared
from components.training.step import autocast, forward_loss, local_batch, score_for, score_tokens, weights_of_rows

_FREE_SHARE, _FILLED_SHARE = 0.5, 0.9
"""Maximum fractions of a rank's free memory for unsharded weights, so that generation does not set the run's peak, and
for these with the keys and values of all rows."""
_GIB = 2**30
_GREEDY_LOSS = math.log(2) / 2
"""A token that is not the most likely one has at most half of the probability: a loss of at least log(2)."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of a pass over held-out data; the same on every rank."""

    loss: float
    """Mean loss per unit, of a distillation the cross-entropy of the data; NaN if there are no units, and ignored with
    a reward."""
    count: int
    """Units over all ranks; 0 if the pass was stopped."""
    unit: str = PLAIN.unit
    """Name of a unit, for logs."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means over units of the objective's additional metrics."""
    reward: float | None = None
    """Mean reward of generated answers, which training increases; None: an evaluation of a loss."""


@dataclass(frozen=True, slots=True)
class TaskScores:
    """Results of tasks; the same on every rank."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Values by TASK/METRIC, or TASK/METRIC/FILTER for a metric of processed answers."""
    documents: Mapping[str, int | None] = field(default_factory=dict)
    """Number of documents of each task outside of groups; None for a group."""


@torch.no_grad()
def evaluate(
    model: Prepared, batches: Iterable[Batch], objective: TokenObjective = PLAIN, run: RunContext | None = None
) -> Evaluation:
    """Return the mean loss per unit over the batches of all ranks; by default the plain cross-entropy.

    Every rank must pass the same number of batches, because the forward of a sharded model is a collective. For a model
    with a moving average, the loss is that of the averaged weights if training.eval_weights selects them; with `both`,
    the metric "loss_trained" is the loss of the trained weights.

    Args:
        run: Shows progress, and ends the pass once any rank has a stop request; None: neither.
    """
    with model.with_weights(model.evaluates_average):
        measured = _evaluate(model, batches, objective, run)
    if model.average is None or model.average.evaluated is not EvalWeights.both or not measured.count:
        return measured
    trained = _evaluate(model, batches, objective, run)
    if not trained.count:
        return trained
    return replace(measured, metrics={**measured.metrics, "loss_trained": trained.loss})


def _evaluate(
    model: Prepared, batches: Iterable[Batch], objective: TokenObjective, run: RunContext | None
) -> Evaluation:
    """Return the mean loss per unit under the weights that the module holds."""
    was_training = model.module.training
    model.module.eval()
    total = len(batches) if isinstance(batches, Sized) else None
    with nullcontext() if run is None else run.status("evaluating", total) as advance:
        sums, stopped = _sums(model, _counted(batches, advance), objective, run)
    model.module.train(was_training)
    if stopped:
        return Evaluation(float("nan"), 0, objective.unit)
    loss, local_count, targets, *metrics = sums.unbind()
    reduced = reduce_loss([loss], local_count, dp_group=all_ranks(), check_finite=False)
    total, count = torch.cat(reduced).tolist()
    means: dict[str, float] = {}
    if metrics:
        all_targets, *values = sum_over_ranks(torch.stack([targets, *metrics])).tolist()
        counted = max(all_targets if objective.metrics_per_target else count, 1)
        means = {name: value / counted for name, value in zip(objective.metrics, values, strict=True)}
    if CROSS_ENTROPY in means:  # comparable with other runs, unlike a divergence, which is a metric of its own
        total = means.pop(CROSS_ENTROPY) * count
    return Evaluation(total / count if count else float("nan"), int(count), objective.unit, means)


def _counted(batches: Iterable[Batch], advance: Callable[[], None] | None) -> Iterator[Batch]:
    """Yield the batches, and advance the progress bar after each."""
    for batch in batches:
        yield batch
        if advance is not None:
            advance()


def _sums(
    model: Prepared, batches: Iterable[Batch], objective: TokenObjective, run: RunContext | None
) -> tuple[torch.Tensor, bool]:
    """Return this rank's sums (loss, units, targets, *metrics) in float64, and whether the pass was stopped."""
    settings, rows = model.settings, row_objective(objective)
    sums = torch.zeros(3 + len(objective.metrics), dtype=torch.float64, device=settings.device)
    scores: list[RowScores] = []  # three float64 values per row
    for host_batch in batches:
        if run is not None and run.agreed_to_stop():
            return sums, True
        batch = host_batch.to(settings.device)
        local = local_batch(batch, settings)
        sums[2] += count_targets(batch.targets) * settings.counts_rows
        if rows is not None:
            scores.append(score_for(model, [local], rows))
            sums[1] += objective.count(batch) * settings.counts_rows
        else:
            (local,) = objective.token_loss.with_token_values(model, [local])
            loss = forward_loss(model, local, objective.token_loss).double() * settings.counts_tokens
            sums[:2] += torch.stack([loss, objective.count(batch) * settings.counts_rows])
    if rows is None:
        token_sums = objective.token_loss.take_sums(len(objective.metrics))
        sums[3:] += token_sums.to(settings.device, non_blocking=True) * settings.counts_tokens
    elif scores:
        weighted = weights_of_rows(model, RowScores.joined(scores), rows)
        measured = [weighted.metrics[name] for name in objective.metrics]
        sums[0] += weighted.loss_sum * settings.counts_rows
        sums[3:] += torch.stack(measured) * settings.counts_rows
    return sums, False


def show_generations(
    model: Prepared, tokenizer: Any, held_out: data.HasPrompts, cfg: GenerationConfig, run: RunContext
) -> None:
    """Generate and print answers to held-out prompts and to `generation.prompts`. A collective.

    Held-out prompts have the system message and tools of their sample; the others have `data.system_prompt`. Held-out
    answers with tool calls (generation.tool_calls) are generated greedily, and only compared, not printed. Those whose
    calls are not read back from the template's text are left out; `unread` is their share.

    Nothing is printed once a stop request arrives.
    """
    prompts, turns = [], list[Prompt]()
    if not run.agreed_to_stop():
        given = encoded_prompts(tokenizer, cfg.prompts, run.data)
        prompts = [*data.sample_prompts(held_out, cfg.samples), *given]
        turns = data.prompts_of_calls(held_out, cfg.tool_calls)
    if not prompts and not turns:
        return
    longest = max(len(prompt.tokens) for prompt in (*prompts, *turns)) + cfg.max_new_tokens
    rows = min(cfg.rows, -(-(len(prompts) + len(turns)) // run.mesh.size("dp_cp")))
    with (
        model.with_weights(model.evaluates_average),
        generation_forward(model, run, rows, longest) as forward,
        run.status("generating", cfg.max_new_tokens * -(-(len(prompts) + len(turns)) // forward.share[1])) as advance,
    ):

        def show_progress(index: int, answer: list[int]) -> bool:
            advance()
            return False

        generated = partial(
            models.generate_tokens,
            model.module,
            tokenizer,
            max_new_tokens=cfg.max_new_tokens,
            forward=forward,
            ends=show_progress,
        )
        answers = generated(prompts, sampling=models.Sampling(cfg.temperature, cfg.top_p, cfg.seed))
        called = generated(turns)
    texts = [str(tokenizer.decode(tokens, skip_special_tokens=True)).strip() for tokens in answers]
    asked = [prompt.text for prompt in prompts]
    run.report_generations(list(zip(asked, texts, strict=True)) if texts else [])
    if called:
        shares = _tool_call_shares(tokenizer, turns, called, cfg.max_new_tokens)
        calls = [prompt.calls for prompt in held_out.prompts if prompt.calls is not None]
        run.report_tool_calls({**shares, "unread": calls.count([]) / len(calls)}, len(called))


def _tool_call_shares(
    tokenizer: Any, turns: Sequence[Prompt], answers: Sequence[Sequence[int]], max_new_tokens: int
) -> dict[str, float]:
    """Return the shares of answers with the right tool calls, and of those without an end; these are wrong."""
    names = right = cut = 0
    for turn, tokens in zip(turns, answers, strict=True):
        if len(tokens) >= max_new_tokens:
            cut += 1
            continue
        found, expected = parse_calls(str(tokenizer.decode(tokens))), turn.calls or []
        names += [call[:2] for call in found] == [call[:2] for call in expected]
        right += same_json(found, expected)
    count = len(turns)
    return {"name_accuracy": names / count, "arguments_accuracy": right / count, "cut": cut / count}


def encoded_prompts(tokenizer: Any, prompts: Iterable[str | Conversation], cfg: DataConfig | None) -> list[Prompt]:
    """Return prompts with their tokens; those without a system message get that of all conversations of the data.

    Raises ConfigError if the chat template rejects a conversation.
    """
    sources = cfg.sources.values() if isinstance(cfg, MixtureDataConfig) else [cfg]
    systems = {getattr(source, "system_prompt", None) for source in sources}
    system = systems.pop() if len(systems) == 1 else None
    encoded = []
    for each in prompts:
        if isinstance(each, str):
            encoded.append(Prompt(each, models.encode_prompt(tokenizer, each, system)))
            continue
        _, messages, tools, kwargs, *_ = each.with_system(system)
        tokens = models.encode_messages(tokenizer, messages, tools, kwargs)
        encoded.append(Prompt(text_of(messages[-1].get("content")), tokens))
    return encoded


def _free_memory(device: torch.device) -> int:
    """Return the bytes that this rank can still allocate on a device.

    On a CPU: an equal share of the machine's usable memory for each local rank, without what this process has used at
    its peak.
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    share = usable_memory() // max(1, get_local_world_size_preinit())
    return max(0, share - observability.peak_memory_bytes(device))


@contextmanager
def generation_forward(
    model: Prepared, run: RunContext, rows: int, tokens: int, *, reports: bool = True
) -> Iterator[models.RowsForward]:
    """Context of a forward for generation; the ranks divide prompts over dp and cp. A collective.

    FSDP2 gathers the weights once for all tokens if they fit in `_FREE_SHARE` of the free memory of every rank, with
    the keys and values in `_FILLED_SHARE` of it, else for every token; a line reports which. Under tp no rank divides
    sequences. Under pp all ranks generate one answer after another, and weights are gathered for every token.

    Args:
        rows: Most answers that a rank generates at once.
        tokens: Most tokens of a prompt with its answer.
        reports: Whether to print the line.
    """
    mesh = run.mesh
    with ExitStack() as stack:
        stack.enter_context(distributed.whole_sequences(model.called_modules))
        stack.enter_context(autocast(model.settings))
        if model.pipeline is not None:
            yield models.RowsForward(model.pipeline.logits, keeps_cache=False, stopped=run.agreed_to_stop)
            return
        cache = rows * tokens * _cache_bytes(model, mesh.size("tp"))
        gathered = _gathers_once(model, cache, run if reports else RunContext(run.mesh, run.device))
        if gathered:
            stack.enter_context(distributed.unshard_fsdp2_model(model.module))
        yield models.RowsForward(
            call=model.module,
            rows=rows,
            device=model.settings.device,
            share=(mesh.rank("dp_cp"), mesh.size("dp_cp")),
            same_rows=mesh["tp"].get_group() if mesh.size("tp") > 1 else None,
            lockstep=mesh.size("ep") > 1 or not gathered,
            stopped=run.agreed_to_stop,
        )


def _cache_bytes(model: Prepared, tp: int) -> int:
    """Return the bytes of the keys and values of a token on this rank; layers with a window count like the others."""
    anatomy = model.anatomy or models.read_anatomy(model.module)
    width = sum(
        max(1, layer.kv_heads // tp) * (layer.keys + layer.values)
        for layer, kind in zip(anatomy.layer_heads, anatomy.kinds, strict=False)
        if kind not in ("linear_attention", "conv", "mlp", "moe")
    )
    return width * (model.compute_dtype or model.module.dtype).itemsize


def _gathers_once(model: Prepared, cache: int, run: RunContext) -> bool:
    """Return whether FSDP2's weights fit into memory at once beside `cache` bytes, the same on all ranks; report it.

    True without FSDP2.
    """
    needed = distributed.unsharded_bytes(model.module)
    figures = all_gather_json([needed, _free_memory(model.settings.device)])
    if not any(needed for needed, _ in figures):
        return True
    needed, free = max(figures, key=lambda each: each[0] / max(each[1], 1))  # of the fullest rank
    fits: bool = needed <= _FREE_SHARE * free and needed + cache <= _FILLED_SHARE * free
    sizes = f"{needed / _GIB:.2f} GiB, keys and values up to {cache / _GIB:.2f} GiB; {free / _GIB:.2f} GiB free"
    run.print(f"generation: weights gathered {'once' if fits else 'for each token'} ({sizes})")
    return fits


@dataclass(frozen=True, slots=True)
class Continuation:
    """Tokens whose last ones are scored."""

    tokens: tuple[int, ...]
    """Context and continuation, at most one token more than the model's context length."""
    scored: int
    """Number of tokens of the continuation, at least 1 and less than all."""

    @property
    def length(self) -> int:
        """Number of tokens that the model takes: all but the last."""
        return len(self.tokens) - 1


@dataclass(frozen=True, slots=True)
class _ForwardPass:
    """Requests that one rank computes at once."""

    length: int
    """Padded length of the rows, the same on all ranks."""
    indices: tuple[int, ...]
    """Requests of the rows."""
    counts: bool
    """Whether the requests are this rank's own. A rank without requests left computes one of another rank too, since
    the forward of a sharded model is a collective."""


@dataclass(frozen=True, slots=True)
class RequestBatches:
    """How requests are divided into forward passes."""

    dp_rank: int
    dp_size: int
    padding: Padding
    """Padding of rows of up to the model's context length."""
    tokens: int
    """Tokens of a forward pass of one rank, unless one row has more."""
    rows: int | None = None
    """Rows of a forward pass of one rank; None: given by `tokens`."""

    def split(self, lengths: Sequence[int]) -> list[_ForwardPass]:
        """Return this rank's forward passes over requests of the given lengths; all ranks have the same number.

        Requests are sorted by decreasing length, so that rows have little padding and the first pass needs the most
        memory.
        """
        order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
        passes, start = [], 0
        while start < len(order):
            length = self.padding.length_of(lengths[order[start]])
            rows = self.rows or max(1, self.tokens // length)
            of_all = order[start : start + rows * self.dp_size]
            own = of_all[self.dp_rank :: self.dp_size]
            passes.append(_ForwardPass(length, tuple(own or of_all[:1]), counts=bool(own)))
            start += len(of_all)
        return passes


class SignedLogProbability(TokenLoss):
    """Token loss with a sign: the loss if the target is the most likely token, else the negative loss.

    The sign is free because losses are not negative; `decode` reads both. The token of the smallest id counts as the
    most likely of several equally likely ones.
    """

    def of_logits(
        self, logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Raise TypeError: these values have no meaningful sum."""
        raise TypeError("signed log-probabilities exist per token only")

    def per_token(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the values (batch, seq) of logits (batch, seq, vocabulary); 0 where the target is ignored."""
        is_target = targets != IGNORED
        scores = upcast(logits[is_target])  # (targets, vocabulary)
        values, _ = self.of_chunk(Chunk(scores, targets[is_target], per_token=True, with_gradient=False))
        return scores.new_zeros(targets.shape).masked_scatter(is_target, values)

    def of_chunk(self, chunk: Chunk) -> tuple[torch.Tensor, None]:
        """Return the values (tokens,) of a chunk: see `TokenLoss`. They have no gradient."""
        vocabulary, (index, is_local) = chunk.vocabulary, chunk.position()
        log_probs, _ = log_softmax(chunk.scores, vocabulary.group, with_log_sum=False)  # (tokens, local vocabulary)
        log_prob = log_probs.gather(1, index)[:, 0].where(is_local, 0)  # (chunk,)
        largest, best = log_probs.max(-1)  # (chunk,), (chunk,)
        best += vocabulary.first
        if vocabulary.group is not None:
            dist.all_reduce(log_prob, group=vocabulary.group)
            overall = largest.clone()
            dist.all_reduce(overall, dist.ReduceOp.MAX, group=vocabulary.group)
            best = best.where(largest == overall, vocabulary.size)
            dist.all_reduce(best, dist.ReduceOp.MIN, group=vocabulary.group)
        return torch.where(best == chunk.targets, -log_prob, log_prob) * (chunk.targets != IGNORED), None

    @staticmethod
    def decode(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probabilities of values, and whether each is of a token that is not the most likely one."""
        return -values.abs(), ~(values > -_GREEDY_LOSS)  # NaN is a miss


@torch.no_grad()
def score_continuations(
    model: Prepared, requests: Sequence[Continuation], batches: RequestBatches, stopped: Callable[[], bool]
) -> list[tuple[float, bool]] | None:
    """Return the log-probability of each continuation, and whether greedy decoding would produce it. A collective.

    Call it on all ranks with the same requests. Each data-parallel rank computes a part of them; the results are
    summed over all ranks, so that they agree. The model must be in evaluation mode.

    Args:
        stopped: Called before each forward pass; must return the same value on all ranks. True ends the scoring, and
            None is returned.
    """
    settings = model.settings
    scores = torch.zeros(len(requests), 2, dtype=torch.float64, device=settings.device)  # log-probability, misses
    for each in batches.split([request.length for request in requests]):
        if stopped():
            return None
        batch = _batch([requests[index] for index in each.indices], each.length, batches.padding.token_id)
        local = local_batch(batch.to(settings.device), settings)
        values = score_tokens(model, local, SignedLogProbability())  # (rows, seq / cp)
        if each.counts and values is not None and settings.counts_tokens:
            log_probs, is_miss = SignedLogProbability.decode(values)
            of_rows = torch.stack([log_probs.double().sum(1), is_miss.double().sum(1)], dim=1)  # (rows, 2)
            scores[torch.tensor(each.indices, device=settings.device)] = of_rows
    sums = sum_over_ranks(scores).tolist()
    return [(log_prob, misses == 0) for log_prob, misses in sums]


def _batch(requests: Sequence[Continuation], length: int, padding: int) -> Batch:
    """Return the requests as rows of `length` tokens, with the continuations as targets."""
    input_ids = torch.full((len(requests), length), padding)
    targets = torch.full((len(requests), length), IGNORED)
    for row, each in enumerate(requests):
        input_ids[row, : each.length] = torch.tensor(each.tokens[:-1])
        targets[row, each.length - each.scored : each.length] = torch.tensor(each.tokens[-each.scored :])
    return Batch(input_ids=input_ids, targets=targets, target_count=sum(request.scored for request in requests))
