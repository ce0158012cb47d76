"""One training step in one process: no host sync, non-finite gradients, norms, schedules, delayed metrics."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from components import training
from components.batch import Batch
from components.checkpoint.tensors import list_optimizers
from components.config.schema import AdamWConfig, Schedule
from components.config.schema.optimizer import (
    AdamW8bitConfig,
    CustomOptimizerConfig,
    LionConfig,
    MuonConfig,
    NorMuonConfig,
    SGDConfig,
)
from components.config.schema.training import StageConfig, TrainingConfig
from components.models.anatomy import read_anatomy
from components.models.attention import use_causal_sdpa
from components.models.layers import select_trained, vector_parameters
from components.protocol.errors import ConfigError
from components.protocol.processes import _FORWARDED_SIGNALS, STOP_SIGNALS, collected_signals, record_stop_signals
from components.training.loss import count_inputs
from components.training.optimizers.muon import divide_parameters
from components.training.optimizers.optim import keep_group_rates
from components.training.state import FIELDS, TrainState

LLAMA = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def tiny_model() -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **LLAMA))
    assert use_causal_sdpa(model)
    return model


def rows_of(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (input_ids, labels); the first half of each row's labels is ignored."""
    tokens = torch.randint(3, 64, (rows, length))
    labels = tokens.clone()
    labels[:, : length // 2] = -100
    return tokens, labels


def batch(rows: int, length: int, device: str = "cpu") -> Batch:
    return Batch.from_labels(*(each.to(device) for each in rows_of(rows, length)))


def prepared(model: nn.Module) -> training.Prepared:
    return training.Prepared(model, training.StepSettings(device=torch.device("cpu")))


def test_training_step_has_no_host_sync() -> None:
    """On the meta device .item(), bool() and .cpu() raise: a step that runs there has no host sync anywhere."""
    with torch.device("meta"):
        model = tiny_model()
    optimizer = training.build_optimizer(model, AdamWConfig())
    settings = training.StepSettings(device=torch.device("meta"))
    batches = [batch(2, 16, "meta") for _ in range(2)]
    vector = training.train_step(training.Prepared(model, settings), batches, optimizer)
    assert vector.vector.shape == (len(training.FIELDS),)
    with pytest.raises(RuntimeError):
        vector["loss"].item()  # shows that a host sync would have raised


def test_gradient_accumulation_matches_one_large_micro_batch() -> None:
    """One micro-batch of four rows and four of one row give the same loss, norm and weights."""
    tokens, labels = rows_of(4, 12)
    labels[0, :11] = -100  # unequal numbers of target tokens
    results = []
    for size in (4, 1):
        model = tiny_model().double()
        optimizer = training.build_optimizer(model, AdamWConfig())
        micro_batches = [Batch.from_labels(tokens[i : i + size], labels[i : i + size]) for i in range(0, 4, size)]
        vector = training.train_step(prepared(model), micro_batches, optimizer)
        results.append((vector.vector, model.lm_head.weight.detach()))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-12, atol=0)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-10, atol=1e-14)


def test_tokens_of_a_score_head_are_those_up_to_the_last_target() -> None:
    targets = torch.tensor([[-100, -100, 1, -100], [0, -100, -100, 0], [-100] * 4])
    assert count_inputs(targets) == 3 + 4 + 0  # the last row is padding
    assert count_inputs(targets).dtype == torch.float64


def test_padding_does_not_change_the_loss() -> None:
    model = tiny_model().double()
    tokens, labels = rows_of(2, 10)
    alone = Batch.from_labels(tokens, labels)
    padded = Batch.from_labels(nn.functional.pad(tokens, (0, 6)), nn.functional.pad(labels, (0, 6), value=-100))
    expected = training.evaluate(prepared(model), [alone])
    for rows in (padded, alone.pad_to(16)):
        found = training.evaluate(prepared(model), [rows])
        assert found.loss == pytest.approx(expected.loss, rel=1e-12)
        assert found.count == expected.count


def test_loss_matches_transformers() -> None:
    model, (tokens, labels) = tiny_model().double(), rows_of(3, 14)
    rows = Batch.from_labels(tokens, labels)
    expected = model(input_ids=tokens, labels=labels).loss.item()
    found = training.evaluate(prepared(model), [rows]).loss
    assert found == pytest.approx(expected, rel=1e-6)  # transformers computes it in float32


def test_loss_is_computed_in_float32_or_float64() -> None:
    labels = torch.randint(0, 8, (2, 5))
    logits = torch.randn(2, 5, 8)
    assert training.CrossEntropy().of_logits(logits.bfloat16(), labels).dtype == torch.float32
    assert training.CrossEntropy().of_logits(logits.double(), labels).dtype == torch.float64


class FormerLoss:
    """A token loss without a base, whose `of_chunk` takes the parts of a chunk one by one."""

    def of_logits(self, logits: Any, targets: Any, weights: Any = None) -> torch.Tensor:
        return logits.sum()

    def per_token(self, logits: Any, targets: Any) -> torch.Tensor:
        return logits.sum(-1)

    def of_chunk(self, scores, targets, vocabulary, weights, values, *, per_token, with_gradient):  # type: ignore
        return scores.sum(), torch.ones_like(scores)


class FormerCrossEntropy(training.CrossEntropy):
    """A cross-entropy with the former signature."""

    of_chunk = FormerLoss.of_chunk  # type: ignore[assignment]


class FormerObjective:
    """An objective with the members of both kinds, without a base."""

    unit, metrics, token_loss = "target token", (), FormerLoss()

    def __init__(self, needs_row_scores: bool) -> None:
        self.needs_row_scores = needs_row_scores

    def count(self, batch: Batch) -> torch.Tensor:
        return training.count_targets(batch.targets)

    def with_token_values(self, model: Any, batches: Any) -> Any:
        return batches

    def token_sums(self) -> None:
        return None

    def row_values(self, model: Any, batches: Any) -> Any:
        return {}

    def step_sums(self, scores: Any) -> None:
        return None

    def weights(self, scores: Any, step_sums: Any = None) -> Any:
        raise NotImplementedError


class FormerMetrics(training.NextToken):
    """An objective that returns the sums of its metrics itself."""

    metrics = ("entropy",)

    def token_sums(self) -> torch.Tensor:
        return torch.ones(1, dtype=torch.float64)


def with_loss(token_loss: Any) -> training.NextToken:
    objective = training.NextToken()
    objective.token_loss = token_loss
    return objective


@pytest.mark.parametrize(
    ("objective", "parts"),
    [
        (FormerObjective(False), ("objective FormerObjective with needs_row_scores", "training.TokenObjective")),
        (FormerObjective(True), ("objective FormerObjective with needs_row_scores", "training.RowObjective")),
        (FormerMetrics(), ("objective FormerMetrics with token_sums", "to token_loss")),
        (with_loss(FormerLoss()), ("token_loss=FormerLoss", "must inherit training.TokenLoss")),
        (with_loss(FormerCrossEntropy()), ("FormerCrossEntropy.of_chunk", "rename scores to chunk.scores")),
    ],
)
def test_objectives_of_the_former_interface_are_rejected_with_what_to_rename(objective: Any, parts: Any) -> None:
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for use in (
        lambda: training.train_step(prepared(model), [batch(2, 16)], optimizer, objective),
        lambda: training.evaluate(prepared(model), [batch(2, 16)], objective),
    ):
        with pytest.raises(ConfigError) as rejected:
            use()
        (problem,) = rejected.value.problems
        assert all(part in problem for part in parts), problem


def test_gradient_norm_matches_torch() -> None:
    model = tiny_model()
    tokens, labels = rows_of(2, 8)
    model(input_ids=tokens, labels=labels).loss.backward()
    expected = torch.nn.utils.get_total_norm([p.grad.double() for p in model.parameters()])
    torch.testing.assert_close(training.gradient_norm(model.parameters()), expected, rtol=1e-6, atol=0)
    training.clip_gradients(model.parameters(), expected, 0.5)
    assert training.gradient_norm(model.parameters()).item() == pytest.approx(0.5, rel=1e-4)


def test_norm_of_large_gradient_is_exact() -> None:
    """torch's float32 norm has an error of 1e-3 here."""
    layer = nn.Linear(4096, 2048, bias=False)
    layer.weight.grad = torch.randn(2048, 4096, generator=torch.Generator().manual_seed(0)).pow(3)
    exact = layer.weight.grad.double().norm().item()
    assert training.gradient_norm(layer.parameters()).item() == pytest.approx(exact, rel=1e-6)


def test_weight_decay_excludes_norms_and_biases() -> None:
    model = tiny_model()
    groups = training.build_optimizer(model, AdamWConfig(weight_decay=0.3)).param_groups
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    assert all(p.dim() >= 2 for p in groups[0]["params"])
    assert len(groups[1]["params"]) == 5  # two norms per layer and the final one


def test_stacked_biases_and_norms_are_vectors_for_weight_decay_and_muon() -> None:
    small = {**LLAMA, "intermediate_size": 32, "head_dim": 8}
    models = [
        AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **small, **values))
        for kind, values in (("gpt_oss", {"num_local_experts": 4}), ("cohere", {"use_qk_norm": True}))
    ]
    stacked = set()
    for model in models:
        vectors = vector_parameters(model)
        adamw = training.build_optimizer(model, AdamWConfig(weight_decay=0.3)).param_groups
        assert {*adamw[1]["params"]} == vectors
        muon = divide_parameters(model, read_anatomy(model), vectors)
        assert not vectors & {matrix.parameter for matrix in muon.matrices}
        for name, parameter in model.named_parameters():
            assert (parameter in vectors) == (name.endswith("bias") or "norm" in name or "sinks" in name), name
            if parameter in vectors and parameter.dim() > 1:
                stacked.add(".".join(name.split(".")[-2:]))
    assert stacked == {"experts.gate_up_proj_bias", "experts.down_proj_bias", "q_norm.weight", "k_norm.weight"}


def test_parameters_are_selected_by_their_names() -> None:
    model = tiny_model()
    cfg = TrainingConfig(trainable=["self_attn", "norm", "embed"], freeze=[r"layers\.0\.", r"v_proj"])
    select_trained(model, cfg)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    attention = {f"model.layers.1.self_attn.{name}_proj.weight" for name in "qko"}
    norms = {f"model.layers.1.{name}_layernorm.weight" for name in ("input", "post_attention")}
    assert trained == attention | norms | {"model.norm.weight", "model.embed_tokens.weight"}

    tied = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **LLAMA, tie_word_embeddings=True))
    names = {name: parameter.requires_grad for name, parameter in tied.named_parameters()}
    wrong = TrainingConfig(trainable=["self_atn"], freeze=["lm_head"])
    with pytest.raises(ConfigError) as error:
        select_trained(tied, wrong)
    assert error.value.problems[0].startswith(
        "training.trainable=self_atn: no trained parameter has such a name; match some of model.embed_tokens.weight, "
        "model.layers.N.self_attn.q_proj.weight"
    )
    with pytest.raises(ConfigError, match=r"freeze=lm_head: lm_head.weight is tied to model.embed_tokens.weight"):
        select_trained(tied, TrainingConfig(freeze=["lm_head"]))
    with pytest.raises(ConfigError, match="so that nothing is trained"):
        select_trained(tied, TrainingConfig(trainable=["norm"], freeze=["model"]))
    for groups, message in (
        (
            [{"match": "q_proj", "lr": 1.0}, {"match": "q_proj.weight", "lr": 2.0}],
            r"\[1\].match=q_proj.weight: .*before",
        ),
        ([{"match": "norm.bias", "lr": 1.0}], r"\[0\].match=norm.bias: no trained parameter"),
    ):
        with pytest.raises(ConfigError, match=message):
            select_trained(tied, TrainingConfig(), groups)
    assert names == {name: parameter.requires_grad for name, parameter in tied.named_parameters()}


def test_groups_have_their_own_rates_in_every_optimizer() -> None:
    groups = [
        {"match": "norm", "weight_decay": 0.2},
        {"match": r"layers\.1.*mlp", "lr": 0.5},
        {"match": "mlp", "lr": 3},
    ]
    kinds = [
        AdamWConfig(lr=0.1, groups=groups),
        SGDConfig(lr=0.1, groups=groups, weight_decay=0.01),
        AdamW8bitConfig(lr=0.1, groups=groups),
        MuonConfig(lr=0.1, adamw_lr=0.4, groups=groups, weight_decay=0.01),
        NorMuonConfig(lr=0.1, adamw_lr=0.4, groups=groups, weight_decay=0.01),
        LionConfig(lr=0.1, groups=groups, weight_decay=0.01),
        CustomOptimizerConfig(factory="torch.optim:Adagrad", lr=0.1, groups=groups),
    ]
    for config in kinds:
        model = tiny_model()
        ready = training.Prepared(model, prepared(model).settings, anatomy=read_anatomy(model))
        optimizers = list_optimizers(training.build_optimizer(ready, config))
        names = {parameter: name for name, parameter in model.named_parameters()}
        for optimizer in optimizers:
            keep_group_rates(optimizer, config)
            training.set_learning_rate(optimizer, config, 0, 10)
        scale = training.learning_rate(config, 0, 10) / config.lr
        rates = {
            names[p]: (g["lr"], g["weight_decay"]) for o in optimizers for g in o.param_groups for p in g["params"]
        }
        assert rates.keys() == set(names.values())
        for name, (rate, decay) in rates.items():
            outside = isinstance(config, MuonConfig) and ("norm" in name or "layers" not in name)
            lr = 0.4 if outside else 0.1
            lr = lr if "mlp" not in name else 0.5 if "layers.1" in name else 3
            assert (rate, decay) == (pytest.approx(scale * lr), 0.2 if "norm" in name else 0.01), (config.kind, name)


def test_learning_rate_schedules_reach_their_end_points() -> None:
    def curve(**values: object) -> list[float]:
        config = AdamWConfig(lr=1.0, min_lr_ratio=0.1, **values)
        return [training.learning_rate(config, step, 20) for step in range(20)]

    warm = curve(schedule=Schedule.cosine, warmup_steps=4)
    assert warm[:4] == [0.25, 0.5, 0.75, 1.0]
    assert warm[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in zip(warm[4:], warm[5:], strict=False))
    assert curve(schedule=Schedule.linear)[-1] == pytest.approx(0.1)
    assert curve(schedule=Schedule.linear)[9] == pytest.approx(1 - 0.9 * 0.5)
    assert set(curve(schedule=Schedule.constant)) == {1.0}
    wsd = curve(schedule=Schedule.wsd, decay_steps=5)
    assert wsd[:15] == [1.0] * 15
    assert wsd[-1] == pytest.approx(0.1)


def test_stages_change_the_learning_rate_linearly_to_that_of_their_last_step() -> None:
    """Also as wsd's decay and after a warmup; a stage without a ratio keeps the rate of the one before."""
    config = AdamWConfig(lr=0.4, schedule=Schedule.constant, warmup_steps=2)
    stages = [StageConfig(until_step=4), StageConfig(until_step=8, lr_ratio=0.5), StageConfig(until_step=10),
              StageConfig(until_step=12, lr_ratio=1.5), StageConfig(lr_ratio=0.0)]  # fmt: skip
    rates = [training.learning_rate(config, step, 16, stages) for step in range(16)]
    expected = [0.2, 0.4, 0.4, 0.4, 0.35, 0.3, 0.25, 0.2, 0.2, 0.2, 0.4, 0.6, 0.45, 0.3, 0.15, 0.0]
    assert rates == pytest.approx(expected, abs=1e-15)
    wsd = AdamWConfig(lr=0.4, schedule=Schedule.wsd, warmup_steps=2, decay_steps=5, min_lr_ratio=0.0)
    stages = [StageConfig(until_step=15), StageConfig(lr_ratio=0.0)]
    for step in range(20):
        found = training.learning_rate(config, step, 20, stages)
        assert found == pytest.approx(training.learning_rate(wsd, step, 20), abs=1e-15)


def test_groups_with_their_own_learning_rate_keep_its_ratio_to_the_schedule() -> None:
    config = AdamWConfig(lr=0.1, schedule=Schedule.linear, min_lr_ratio=0.0)
    head, rest = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.AdamW([{"params": [head], "lr": 0.3}, {"params": [rest]}], lr=0.1)
    for step in range(2):
        keep_group_rates(optimizer, config)  # again when a recipe begins again with it
        training.set_learning_rate(optimizer, config, step, 2)
        expected = training.learning_rate(config, step, 2)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([3 * expected, expected])


def test_step_reader_lags_by_a_fixed_number_of_steps() -> None:
    reader = training.StepReader(lag=2)
    vectors = [torch.tensor([float(i), 1, 7, 0, i == 1, 0, i == 0, 0.5], dtype=torch.float64) for i in range(4)]
    metrics = [reader.push(step, training.StepNumbers(vector), began=0.0) for step, vector in enumerate(vectors)]
    assert [[m.step for m in arrived] for arrived in metrics] == [[], [], [0], [1]]
    assert (metrics[2][0].must_stop, metrics[2][0].must_save) == (False, True)
    assert (metrics[3][0].must_stop, metrics[3][0].must_save) == (True, False)
    assert [m.loss for m in reader.flush()] == [2.0, 3.0]
    assert reader.flush() == []


def test_drained_step_reader_returns_every_step_once() -> None:
    reader = training.StepReader(lag=1)
    vector = torch.tensor([1.0, 1, 7, 0, 1, 0, 1, 0.5], dtype=torch.float64)
    arrivals = [reader.push(step, training.StepNumbers(vector), began=0.0, drain=step % 3 != 0) for step in range(6)]
    assert [[m.step for m in arrived] for arrived in arrivals] == [[], [0, 1], [2], [], [3, 4], [5]]
    assert all(m.must_stop for arrived in arrivals for m in arrived)


def test_logged_tensor_may_change_before_it_is_read() -> None:
    reader, value = training.StepReader(lag=1), torch.zeros(())
    for step in (1, 2):
        value += 1
        reader.log({"count": value})
        arrived = reader.push(step, training.StepNumbers(torch.zeros(8, dtype=torch.float64)), began=0.0)
    assert [each.others for each in [*arrived, *reader.flush()]] == [{"count": 1.0}, {"count": 2.0}]


@pytest.mark.parametrize("metrics", [(), ("reward",)], ids=["recipe", "objective"])
def test_only_a_reward_that_the_recipe_logs_is_the_reward_of_the_step(metrics: tuple[str, ...]) -> None:
    """The objective KTO has a metric of this name, which is one of several metrics beside its loss."""
    reader, names = training.StepReader(lag=0), (*FIELDS, *metrics)
    numbers = training.StepNumbers(torch.zeros(len(names), dtype=torch.float64), names)
    reader.log({"length": 3.0} if metrics else {"reward": torch.tensor(0.25), "length": 3.0})
    (step,) = reader.push(1, numbers, began=0.0)
    assert (step.reward, step.others) == (
        (None, {"reward": 0.0, "length": 3.0}) if metrics else (0.25, {"length": 3.0})
    )
    state = TrainState()
    for number, reward in enumerate((step.reward, 0.5, None), 1):
        state.record(replace(step, step=number, reward=reward))
    assert (state.first_reward, state.last_reward) == ((0.5 if metrics else 0.25), 0.5)


def test_logged_value_does_not_replace_a_metric_of_the_objective() -> None:
    reader = training.StepReader()
    numbers = training.StepNumbers(torch.zeros(len(FIELDS) + 2, dtype=torch.float64), (*FIELDS, "kl", "reward"))
    reader.log({"reward": 0.5, "skipped": 1.0})
    with pytest.raises(
        ValueError, match=r"^run.log\(step, reward=...\): reward is a metric of the objective .* kl, reward$"
    ):
        reader.push(1, numbers, began=0.0)


class SlowVector(torch.Tensor):
    """Metrics of a step whose transfer to the host takes a while."""

    def tolist(self) -> Any:
        time.sleep(0.05)
        return super().tolist()


@pytest.mark.parametrize("every", [1, 3])  # steps between evaluations or saves
def test_step_seconds_include_the_wait_for_a_drained_step(every: int) -> None:
    reader = training.StepReader(lag=1)
    metrics = []
    for step in range(6):
        began = time.perf_counter()
        vector = torch.tensor([1.0, 1, 7, 0, 0, 0, 0, 0.5], dtype=torch.float64).as_subclass(SlowVector)
        metrics += reader.push(step, training.StepNumbers(vector), began, drain=step % every == every - 1)
    assert [m.step for m in metrics] == list(range(6))
    assert all(m.seconds >= 0.05 for m in metrics[1:])  # each waits for the step before it; the first has none


@pytest.mark.parametrize("install", [collected_signals, record_stop_signals, training.StopRequest])
def test_closed_terminal_is_ignored_under_nohup(install: Callable[[], Any]) -> None:
    before = {number: signal.getsignal(number) for number in _FORWARDED_SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with install() or nullcontext():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_stop_request_stores_signals_and_restores_handlers(number: int) -> None:
    nohup = signal.signal(number, signal.SIG_DFL)  # under which SIGHUP stays ignored
    before = signal.getsignal(number)
    with training.StopRequest() as stop:
        assert stop.flags.tolist() == [0, 0, 0]
        os.kill(os.getpid(), number)
        assert stop.flags.tolist() == [1, 0, 0]
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.flags.tolist() == [1, 1, 0]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(number) is before
    signal.signal(number, nohup)


@pytest.mark.parametrize(
    ("losses", "min_delta", "counts"),
    [
        ([3.0, 2.0, 2.5, 2.0, 1.9], 0.0, [0, 0, 1, 2, 0]),
        ([3.0, 2.95, 2.89, 2.85], 0.1, [0, 1, 0, 1]),
        ([math.nan, 3.0, math.nan, math.inf], 0.0, [1, 0, 1, 2]),
        ([3.0, None, 3.0], 0.0, [0, 0, 1]),
    ],
)
def test_evaluations_without_improvement_are_counted_across_resumes(
    losses: list[float | None], min_delta: float, counts: list[int]
) -> None:
    state, found = TrainState(), []
    for number, loss in enumerate(losses):
        state.step = 10 * number
        state.count_eval(loss, min_delta)
        found.append(state.evals_without_improvement)
        state = TrainState.from_dict(state.to_dict())
        if loss is not None:
            state.count_eval(loss, min_delta)  # the evaluation at the start of a resumed run
    assert found == counts


def test_evaluations_without_a_higher_reward_are_counted() -> None:
    state, found = TrainState(), []
    for number, reward in enumerate([0.1, 0.3, 0.35, 0.41, math.nan, 0.2, None]):
        state.step = 10 * number
        state.count_eval(None if reward is None else math.nan, 0.1, reward)  # such an evaluation has no loss
        found.append(state.evals_without_improvement)
        state = TrainState.from_dict(state.to_dict())
    assert found == [0, 0, 1, 0, 1, 2, 2]
    assert (state.best_eval_reward, state.best_eval_loss) == (0.41, None)


def test_state_of_a_checkpoint_from_before_rewards_is_read() -> None:
    values = {
        name: value for name, value in TrainState(step=3, first_loss=2.0).to_dict().items() if "reward" not in name
    }
    assert len(values) == len(TrainState().to_dict()) - 4
    assert TrainState.from_dict(values) == TrainState(step=3, first_loss=2.0)
