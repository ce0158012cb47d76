"""Hardware files, sizes and pipeline schedules of the planner, against transformers, torch and a simulated step."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import schedules as torch_schedules
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)
from transformers.models.mistral4.modeling_mistral4 import Mistral4ForCausalLM

from components.config.schema.model import ModelConfig
from components.config.schema.parallelism import SINGLE_STAGE, SPLIT_BACKWARD, V_SHAPED, ParallelismConfig
from components.config.schema.parallelism import PipelineSchedule as Schedule
from components.config.shape import ModelShape, read_shape
from components.models.anatomy import SLIDING, read_anatomy
from components.planning.formulas import step_time
from components.planning.formulas.architecture import Architecture, read_architecture
from components.planning.formulas.families import FAMILIES
from components.planning.formulas.hardware import Hardware, NodeLinks, read_hardware
from components.planning.formulas.memory import _generation_terms, _read_rank
from components.planning.formulas.pipeline import (
    Interval,
    StageSeconds,
    StageWork,
    WorkKind,
    _schedule_order,
    pipeline_seconds,
    send_hops,
    timeline,
)
from components.protocol.errors import ConfigError
from components.training.step_cost import model_flops
from tests.config.composed import config_of
from tests.config.ready import HUB_MODELS
from tests.unit.test_planning_time import workload

FOLDER = Path(__file__).resolve().parents[2] / "conf" / "gpu"
FILES = sorted(FOLDER.glob("*.yaml"))


def test_the_known_gpus_have_files() -> None:
    names = ["a100_40", "a100_80", "b200", "cpu", "h100_80", "h100_96", "h200", "l40s", "mi300x"]
    assert [file.stem for file in FILES] == names


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_file_loads_and_every_value_states_its_source(file: Path) -> None:
    hardware = read_hardware(file)

    assert hardware.name == file.stem
    assert hardware.copy_bandwidth < hardware.memory_bandwidth
    assert hardware.matmul_flops(2) < hardware.bf16_flops
    assert hardware.node_bandwidth > hardware.network_bandwidth
    text = file.read_text().splitlines()
    assert text[0].startswith("# ")
    assert all("  # " in line for line in text[1:])


def test_data_sheet_values_of_the_h100() -> None:
    hardware = read_hardware(FOLDER / "h100_80.yaml")
    assert (hardware.bf16_flops, hardware.memory_bandwidth, hardware.gpus_per_node) == (989.4e12, 3.35e12, 8)
    assert hardware.node_links is NodeLinks.switch
    assert hardware.matmul_flops(1) > 1.5 * hardware.matmul_flops(2)
    assert hardware.peak_flops(8) == hardware.fp32_flops / 2


def test_float8_runs_at_the_speed_of_bfloat16_where_it_is_not_supported() -> None:
    hardware = read_hardware(FOLDER / "a100_80.yaml")
    assert hardware.fp8_flops is None
    assert hardware.matmul_flops(1) == hardware.matmul_flops(2)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("matmul_share: 0.", "matmul_shares: 0.", "unknown key matmul_shares; the keys are memory_bytes"),
        ("gpus_per_node: 8", "", "gpus_per_node is missing; add it"),
        ("bf16_flops: 989.4e+12", "bf16_flops: 0", "bf16_flops=0: must be greater than 0 and finite"),
        ("bf16_flops: 989.4e+12", "bf16_flops: -1.0", "bf16_flops=-1.0: must be greater than 0"),
        ("bf16_flops: 989.4e+12", "bf16_flops: .inf", "bf16_flops=inf: must be greater than 0 and finite"),
        ("bf16_flops: 989.4e+12", "bf16_flops: .nan", "bf16_flops=nan: must be greater than 0 and finite"),
        ("bf16_flops: 989.4e+12", "bf16_flops: fast", "bf16_flops=fast: must be a number"),
        ("bf16_flops: 989.4e+12", "bf16_flops: null", "bf16_flops=None: must be a number"),
        ("bf16_flops: 989.4e+12", "bf16_flops: true", "bf16_flops=True: must be a number"),
        ("bf16_flops: 989.4e+12", "bf16_flops: [1]", "bf16_flops=[1]: must be a number"),
        ("gpus_per_node: 8", "gpus_per_node: 7.5", "gpus_per_node=7.5: must be a whole number"),
        ("node_links: switch", "node_links: ring", "node_links=ring: must be switch or direct"),
        ("copy_share: 0.", "copy_share: 1.", "is a share and must be at most 1"),
    ],
)
def test_a_wrong_value_is_a_config_error_that_names_file_key_and_rule(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    text = (FOLDER / "h100_80.yaml").read_text()
    file = tmp_path / "mine.yaml"
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))

    with pytest.raises(ConfigError) as caught:
        read_hardware(file)

    assert all(str(file) in problem for problem in caught.value.problems)
    assert message in str(caught.value)


def test_all_problems_of_a_file_are_reported_at_once(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("memory_bytes: 0\nspeed: 1\n")
    with pytest.raises(ConfigError) as caught:
        read_hardware(file)
    assert len(caught.value.problems) == 2 + len(Hardware.__slots__) - 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *((None, "cannot be read"), ("- 1\n", "must hold keys and values")),
        *(("a: [", "is not valid YAML"), ("", "must hold")),
    ],
)
def test_a_file_that_is_no_mapping_is_a_config_error(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "mine.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_hardware(file)


SIZES = {
    "hidden_size": 96, "num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24,
    "intermediate_size": 160, "vocab_size": 1000, "pad_token_id": 0, "num_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 64, "sliding_window": 8,
}  # fmt: skip


def build(family: str) -> nn.Module:
    """Build a small model of a family on meta, with all sizes distinct."""
    cls = CONFIG_MAPPING[family]
    sizes = {**SIZES, "head_dim": 16} if family == "helium" else SIZES  # its heads are as wide as the hidden states
    if family == "gpt2":
        values: dict[str, Any] = {"n_embd": 96, "n_layer": 6, "n_head": 6, "vocab_size": 1000}
    else:
        values = {name: sizes[name] for name in {each.name for each in fields(cls)} & set(sizes)}
    if family == "gemma4_text":
        values |= {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 3}
        values |= {"enable_moe_block": True, "top_k_experts": 2, "global_head_dim": 32}
    with torch.device("meta"):
        if family == "mistral4":  # not among transformers' causal LMs
            return Mistral4ForCausalLM(cls(**values))
        return AutoModelForCausalLM.from_config(cls(**values))


def architecture(model: nn.Module, folder: Path) -> Architecture:
    """Read the architecture from the config.json that the model saves."""
    folder.joinpath("config.json").write_text(model.config.to_json_string(use_diff=False))
    return read_architecture(read_shape(ModelConfig(path=str(folder))), "the model")


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_flops_equal_those_of_the_built_model(family: str, tmp_path: Path) -> None:
    model = build(family)
    read = architecture(model, tmp_path)
    anatomy = read_anatomy(model)

    assert read.parameters == sum(each.numel() for each in model.parameters())
    built = (len(anatomy.layers), anatomy.hidden_size, anatomy.vocabulary, anatomy.tied)
    assert (read.layers, read.hidden, read.vocab, read.tied) == built
    for kind, own in zip(read.kinds, anatomy.layer_heads, strict=True):
        heads = *read.heads_of(kind)[:2], *read.score_widths(kind)
        assert not kind.attends or heads == (own.heads, own.kv_heads, own.keys, own.values)
    assert bool(read.experts) == bool(anatomy.experts)
    assert read.experts_per_token == (anatomy.experts_per_token or 0)
    assert sum(kind.is_windowed for kind in read.kinds) == anatomy.kinds.count(SLIDING)
    assert read.step_flops_per_row(64) == pytest.approx(model_flops(model).of([64]), rel=1e-12)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "qwen3_moe", "qwen3_next"])
def test_keys_and_values_of_generated_rows_are_those_that_transformers_keeps(family: str, tmp_path: Path) -> None:
    """After a forward on meta; a layer with a window keeps one token less than it sees."""
    model = build(family).to(torch.bfloat16)
    rows, tokens = 3, 20
    with torch.no_grad():
        cache = model(torch.zeros(rows, tokens, dtype=torch.int64, device="meta"), use_cache=True).past_key_values
    read = architecture(model, tmp_path)
    w = workload(architecture=read, generated_answers=100, rows_at_once=rows, generated_tokens=tokens)
    planned = _generation_terms(w, _read_rank(w, 0))[0].value
    kept = [each for layer in cache.layers if hasattr(layer, "keys") for each in (layer.keys, layer.values)]
    windowed = sum(kind.is_windowed for kind in read.kinds) / len(read.kinds)
    assert sum(each.nbytes for each in kept) == pytest.approx(planned, rel=0.13 * windowed + 1e-12)


def test_time_of_sampling_reads_weights_and_cache_for_each_token() -> None:
    """512 answers on 8 ranks, 16 at once, 100 tokens each, for two steps: 4 x 100 / 2 forwards."""
    sizes = {"layers": 40, "heads": 32, "kv_heads": 8, "hidden": 8192, "vocab": 100_000, "mlp": 28_672, "head_dim": 256}
    read = read_architecture(ModelShape(family="llama", tied=False, **sizes), "llama")
    w = workload(
        architecture=read, mesh={"dp_shard": 8}, generated_answers=512, rows_at_once=16, generated_tokens=1000,
        sampled_tokens=100 / 2,
    )  # fmt: skip
    hardware = read_hardware(FOLDER / "h100_80.yaml")
    weights = w.parameters * w.compute_bytes
    cache = 16 * 500 * 40 * 2 * 8 * 256 * w.compute_bytes
    (term,) = [each for each in step_time.estimate_time(w, hardware).terms if each.name == "sampling of answers"]
    assert term.value == pytest.approx(200 * (weights + cache) / hardware.copy_bandwidth, rel=1e-3)
    others = step_time.estimate_time(replace(w, sampled_tokens=0.0), hardware).terms
    assert not any("sampling" in each.name for each in others)


@pytest.mark.parametrize("kind", [LlamaForSequenceClassification, LlamaForCausalLM])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_and_flops_are_those_of_the_head_that_the_model_has(kind: type, tied: bool) -> None:
    """Against transformers: 6 FLOPs per token and matrix element, 12 per pair of tokens and element of a head."""
    config = LlamaConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, num_labels=3,
    )  # fmt: skip
    model = kind(config)
    sizes = {"layers": 2, "heads": 4, "kv_heads": 2, "hidden": 64, "vocab": 1000, "mlp": 128, "head_dim": 16}
    architecture = read_architecture(ModelShape(family="llama", tied=tied, **sizes), "llama")
    labels = 3 * (kind is LlamaForSequenceClassification)
    w = workload(architecture=architecture, labels=labels)
    assert w.parameters == sum(each.numel() for each in model.parameters())
    linear = sum(each.weight.numel() for each in model.modules() if isinstance(each, torch.nn.Linear))
    pairs = w.seq_len * (w.seq_len + 1) / 2
    assert step_time.model_flops(w) == pytest.approx(w.rows_per_step * (6 * linear * w.seq_len + 12 * 2 * 64 * pairs))


def test_family_defaults_are_those_of_transformers() -> None:
    for name, family in FAMILIES.items():
        config = CONFIG_MAPPING[name]()
        assert family.tied == config.tie_word_embeddings, name
        values = config.to_dict()
        assert family.sizes == {**family.sizes, **{key: values[key] for key in family.sizes if key in values}}, name
        if "kv_lora_rank" not in values:
            head_dim = values.get("head_dim") or config.hidden_size // config.num_attention_heads
            assert read_default(name).head_dim == head_dim, name


def read_default(family: str) -> Architecture:
    """Read the architecture of a family's default sizes, without the values that a family may derive."""
    config = CONFIG_MAPPING[family]()
    sizes = {"layers": config.num_hidden_layers, "hidden": config.hidden_size, "heads": config.num_attention_heads}
    experts = {"experts": 4, "experts_per_token": 2}
    further = {"layers_block_type": getattr(config, "layers_block_type", None), "hidden_size_per_layer_input": 0}
    shape = ModelShape(family=family, vocab=config.vocab_size, mlp=64, config=further, **sizes, **experts)
    return read_architecture(shape, family)


def test_a_rank_of_tp_and_ep_holds_its_share_of_each_weight() -> None:
    whole = read_default("qwen3_moe")
    local = {each.name: each for each in whole.layer_weights(whole.kinds[0], tp=2, ep=4)}
    for each in whole.layer_weights(whole.kinds[0]):
        parts = {"rows": 2, "columns": 2, "experts": 8, "replicated": 1}[each.sharding]
        assert local[each.name].size * parts == each.size, each.name


def test_fsdp_shards_dim_0_in_equal_chunks_of_which_the_last_may_be_smaller(tmp_path: Path) -> None:
    weight = next(read_default("llama").outer_weights())
    parameter = torch.empty(weight.rows, weight.width, device="meta")
    for ranks in (1, 3, 7, 64):
        assert weight.shard(ranks) == parameter.chunk(ranks)[0].numel()


def test_unknown_sizes_and_families_are_config_errors() -> None:
    with pytest.raises(ConfigError, match=r"model.path=me/mine: its sizes are unknown.*set model.family"):
        read_architecture(ModelShape(), "me/mine")
    with pytest.raises(ConfigError, match=r"model=me/mine: model.mlp unknown; set the missing sizes"):
        read_architecture(ModelShape(family="llama", layers=2, hidden=8, heads=2, vocab=16), "me/mine")
    with pytest.raises(ConfigError, match=r"model.family=mamba: the formulas do not cover this model type"):
        read_architecture(ModelShape(family="mamba"), "me/mine")
    known = {"layers": 2, "hidden": 8, "heads": 2, "vocab": 16, "mlp": 8}
    experts = {"expert_mlp": 8, "experts": 4, "experts_per_token": 2}
    with pytest.raises(ConfigError, match=r"model=me/mine: model.config.hybrid_override_pattern unknown"):
        read_architecture(ModelShape(family="nemotron_h", **known, **experts), "me/mine")
    with pytest.raises(ConfigError, match=r"formulas do not cover layers with inputs of their own"):
        read_architecture(ModelShape(family="gemma4_text", **known), "me/mine")
    short = {"layer_types": ["full_attention"]}
    for family, config in {"nemotron_h": {"hybrid_override_pattern": "MX"}, "qwen3_5_text": short}.items():
        with pytest.raises(ConfigError, match=r"model=me/mine: the lists of its layers cannot be read"):
            read_architecture(ModelShape(family=family, config=config, **known, **experts), "me/mine")
    with pytest.raises(ConfigError, match=r"model.config.linear_key_head_dim=wide: must be a whole number"):
        read_architecture(ModelShape(family="qwen3_5_text", config={"linear_key_head_dim": "wide"}, **known), "me/mine")


def test_options_of_hub_models_state_every_size() -> None:
    """`python scripts/plan.py model=NAME` needs no hub."""
    for name, option in HUB_MODELS.items():
        known = {key: option.values[key] for key in option.values if key in {each.name for each in fields(ModelShape)}}
        assert json.dumps(known)
        assert read_architecture(ModelShape(**known), name).parameters > 0, name


def test_sizes_that_a_local_config_omits_are_not_those_of_the_option(tmp_path: Path) -> None:
    sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 32000, **sizes}))
    cfg = config_of("finetune", f"model.path={tmp_path}")
    assert read_architecture(read_shape(cfg.model), "llama").parameters == 6_738_415_616  # Llama 7B


SEVERAL_STAGES = [each for each in Schedule if each not in SINGLE_STAGE]
TORCH_KINDS = {
    torch_schedules.FORWARD: WorkKind.forward,
    torch_schedules.FULL_BACKWARD: WorkKind.backward,
    torch_schedules.BACKWARD_INPUT: WorkKind.input_gradient,
    torch_schedules.BACKWARD_WEIGHT: WorkKind.weight_gradient,
}


def allowed(schedule: Schedule, pp: int, micro_batches: int) -> bool:
    """Return whether torch accepts the number of micro-batches."""
    if schedule == "DualPipeV":
        return micro_batches >= 2 * pp
    if schedule == "1F1B":
        return micro_batches >= pp
    return not schedule.startswith("Interleaved") or micro_batches % max(1, micro_batches // pp) == 0


def torch_order(schedule: Schedule, pp: int, per_rank: int, micro_batches: int) -> list[list[StageWork]]:
    """Return the order of a schedule of torch, which computes it in the constructor, from its group's ranks."""
    instance = object.__new__(torch_schedules.get_schedule_class(str(schedule)))
    rounds = max(1, micro_batches // pp)
    values = {
        "pp_group_size": pp, "n_local_stages": per_rank, "_n_microbatches": micro_batches, "number_of_rounds": rounds,
        "_num_stages": pp * per_rank, "num_stages": pp * per_rank, "microbatches_per_round": micro_batches // rounds,
        "_stages": [None] * per_rank,
    }  # fmt: skip
    for name, value in values.items():
        setattr(instance, name, value)
    orders = []
    for rank in range(pp):
        instance.rank = rank
        actions = [each for each in instance._calculate_single_rank_operations(rank) if each is not None]
        flat = [part for each in actions for part in (each.sub_actions or (each,))]
        orders.append(
            [StageWork(TORCH_KINDS[each.computation_type], each.stage_index, each.microbatch_index) for each in flat]
        )
    return orders


def run(schedule: Schedule, pp: int, micro_batches: int, head: float = 1.0, send: float = 0.0) -> list[Interval]:
    """Return the timeline of stages with forward 1 and backward 2 per rank, of which 1 for the weights."""
    return timeline(schedule, ranks(schedule, pp), stages(schedule, pp, head), micro_batches, send)


def ranks(schedule: Schedule, pp: int) -> list[int]:
    """Return the rank of each stage."""
    return ParallelismConfig(pp=pp, pp_schedule=schedule).stage_ranks(pp)


def stages(schedule: Schedule, pp: int, head: float = 1.0) -> list[StageSeconds]:
    """Return stages of equal length, but for the last, which takes `head` times as long."""
    per_rank = len(ranks(schedule, pp)) // pp
    one = StageSeconds(1 / per_rank, 2 / per_rank, 1 / per_rank)
    return [*[one] * (pp * per_rank - 1), StageSeconds(*(head * value for value in one))]


def end(intervals: list[Interval]) -> float:
    """Return the time of the last interval's end."""
    return max(each.start + each.seconds for each in intervals)


@pytest.mark.parametrize("schedule", SEVERAL_STAGES)
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_orders_are_those_of_torch(schedule: Schedule, pp: int) -> None:
    compared = 0
    for per_rank in (2,) if schedule in V_SHAPED else (2, 3, 4):
        for micro_batches in (1, 2, 3, 4, 6, 8, 16, 24):
            if allowed(schedule, pp, micro_batches):
                expected = torch_order(schedule, pp, per_rank, micro_batches)
                assert _schedule_order(schedule, pp, per_rank, micro_batches) == expected, (per_rank, micro_batches)
                compared += 1
    assert compared >= 2


def test_gpipe_computes_all_forwards_first_and_1f1b_alternates() -> None:
    text = {
        schedule: ["".join(work.kind for work in order) for order in _schedule_order(Schedule(schedule), 3, 1, 4)]
        for schedule in SINGLE_STAGE
    }
    assert text == {"GPipe": ["FFFFBBBB"] * 3, "1F1B": ["FFFBFBBB", "FFBFBFBB", "FBFBFBFB"]}


@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 4), (4, 8), (4, 12), (8, 16), (8, 64)])
def test_a_timeline_computes_everything_once_in_a_possible_order(
    schedule: Schedule, pp: int, micro_batches: int
) -> None:
    intervals = run(schedule, pp, micro_batches, send=0.25)
    place = ranks(schedule, pp)
    number = len(place) * micro_batches
    kinds = Counter(each.kind for each in intervals)

    assert kinds[WorkKind.forward] == number
    assert kinds[WorkKind.backward] + kinds[WorkKind.input_gradient] == number
    assert kinds[WorkKind.input_gradient] == kinds[WorkKind.weight_gradient]
    assert bool(kinds[WorkKind.weight_gradient]) == (schedule in SPLIT_BACKWARD)
    for rank in range(pp):
        own = sorted(each for each in intervals if each.rank == rank)
        assert all(a.start + a.seconds <= b.start + 1e-9 for a, b in pairwise(own))
    weights = WorkKind.weight_gradient
    work = [each for each in intervals if each.kind is not weights]
    ends = {(each.kind == "F", each.stage, each.micro_batch): each.start + each.seconds for each in work}
    for each in intervals:
        forward = each.kind is WorkKind.forward
        inputs = [(False, each.stage)] if each.kind is weights else [(True, each.stage)] * (not forward)
        neighbor = each.stage + (-1 if forward else 1)
        if each.kind is not weights and 0 <= neighbor < len(place):
            inputs.append((forward, neighbor))
        for kind, stage in inputs:
            delay = 0.25 if place[stage] != place[each.stage] else 0.0
            assert each.start >= ends[kind, stage, each.micro_batch] + delay - 1e-9


@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 4), (4, 8), (4, 32), (8, 16)])
def test_bubbles_are_those_of_the_literature(pp: int, micro_batches: int) -> None:
    """In units of a rank's forward 1, input gradient 1 and weight gradient 1 of a micro-batch, idle time per step."""
    idle = {schedule: end(run(schedule, pp, micro_batches)) - 3 * micro_batches for schedule in Schedule}
    literature = {
        3 * (pp - 1): "GPipe 1F1B",  # Huang et al. 2019, Narayanan et al. 2019
        3 * (pp - 1) / 2: "Interleaved1F1B LoopedBFS",  # Narayanan et al. 2021: divided by the stages per rank
        (pp - 1) / 2: "InterleavedZeroBubble ZBVZeroBubble DualPipeV",  # Qi et al. 2023: F + I - W, divided likewise
    }
    expected = {Schedule(name): seconds for seconds, names in literature.items() for name in names.split()}
    assert idle == pytest.approx(expected)


@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize("head", [1.0, 1.5])
def test_the_closed_formula_is_close_to_the_simulation(schedule: Schedule, head: float) -> None:
    for pp, micro_batches in ((2, 4), (4, 4), (4, 8), (8, 16), (8, 64), (16, 32)):
        if not allowed(schedule, pp, micro_batches):
            continue
        seconds, formula = pipeline_seconds(schedule, ranks(schedule, pp), stages(schedule, pp, head), micro_batches)
        simulated = end(run(schedule, pp, micro_batches, head))
        tolerance = 1e-9 if schedule in SINGLE_STAGE else 0.11
        assert seconds == pytest.approx(simulated, rel=tolerance), (pp, micro_batches, formula)


def test_fewer_micro_batches_than_ranks_leave_rounds_idle() -> None:
    for schedule in ("Interleaved1F1B", "LoopedBFS"):
        seconds, _ = pipeline_seconds(
            Schedule(schedule), ranks(Schedule(schedule), 8), stages(Schedule(schedule), 8), 4
        )
        assert seconds == pytest.approx(end(run(Schedule(schedule), 8, 4)))


@pytest.mark.parametrize("schedule", Schedule)
def test_sends_prolong_a_step_as_often_as_in_the_simulation(schedule: Schedule) -> None:
    for pp, micro_batches in ((4, 8), (4, 16), (8, 16), (8, 32)):
        simulated = (end(run(schedule, pp, micro_batches, send=0.01)) - end(run(schedule, pp, micro_batches))) / 0.01
        per_rank = len(ranks(schedule, pp)) // pp
        tolerance = 0.25 if schedule in SPLIT_BACKWARD else 1e-6
        if schedule == "LoopedBFS":
            assert simulated <= send_hops(schedule, pp, per_rank, micro_batches)
        else:
            assert send_hops(schedule, pp, per_rank, micro_batches) == pytest.approx(simulated, rel=tolerance)
