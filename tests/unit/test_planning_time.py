"""Predicted time of an optimizer step, against independent arithmetic and published speeds of other programs."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from components.config.schema.model import Float8, LossMethod
from components.config.schema.optimizer import AdamWConfig, MuonConfig
from components.config.schema.parallelism import (
    ActivationCheckpointing,
    ContextAttention,
    MeshShape,
    ParallelismConfig,
    PipelineSchedule,
    Strategy,
)
from components.config.schema.run import PeftConfig, PeftMethod
from components.planning.formulas.architecture import read_architecture
from components.planning.formulas.communication import _OVERLAP_LOSS, communication_works, exposed_seconds, mesh_groups
from components.planning.formulas.hardware import (
    Hardware,
    LayerWork,
    Matmul,
    NodeLinks,
    _layer_matmuls,
    layer_works,
    read_hardware,
)
from components.planning.formulas.pipeline import timeline
from components.planning.formulas.step_time import TIME_ERROR, StepTime, estimate_time, model_flops
from components.planning.formulas.workload import MESHBOOK, Workload, total
from scripts.benchmark.published import (
    FITTED,
    MODELS,
    POINTS,
    Comparison,
    by_source,
    compare_points,
    ordered_pairs,
    percentile,
    read_points,
)

ROOT = Path(__file__).resolve().parents[2]
H100 = read_hardware(ROOT / "conf" / "gpu" / "h100_80.yaml")


def workload(model: str = "8b", *, mesh: dict[str, int] | None = None, **changes: Any) -> Workload:
    """Return full training of a model on a mesh, with 2 micro-batches of 2 x 4,096 tokens."""
    degrees = {"dp_shard": 1, **(mesh or {})}
    options = changes.pop("parallelism", {})
    values: dict[str, Any] = {
        "architecture": read_architecture(MODELS[model], model),
        "mesh": MeshShape(**degrees),
        "parallelism": ParallelismConfig(**degrees, **options),
        "seq_len": 4096, "micro_batch": 2, "micro_batches": 2, "stored_bytes": 4, "compute_bytes": 2,
        "float8": Float8.none, "compiled": True, "fused": False, "loss": LossMethod.logits,
        "optimizer": AdamWConfig(), "peft": PeftConfig(),
    }  # fmt: skip
    return Workload(**{**values, **changes})


def estimated(model: str = "8b", **changes: Any) -> StepTime:
    """Return the estimate of such a workload on H100s."""
    return estimate_time(workload(model, **changes), H100)


def term(estimate: StepTime, name: str) -> float:
    """Return the seconds of a term; 0 if it is left out."""
    return sum(each.value for each in estimate.terms if each.name == name)


@pytest.fixture(scope="module")
def compared() -> list[Comparison]:
    rows, skipped = compare_points(read_points(POINTS))
    assert not skipped
    return rows


def test_errors_on_published_speeds_that_were_not_used_to_fit(compared: list[Comparison]) -> None:
    errors = [abs(each.error) for each in compared if not each.is_fitted]
    assert sum(each.is_fitted for each in compared) == len(FITTED) == 8
    assert len(errors) == 14
    assert statistics.median(errors) <= 0.08
    assert percentile(errors, 0.9) == pytest.approx(TIME_ERROR, abs=0.005)


def test_the_order_of_published_speeds_of_a_source(compared: list[Comparison]) -> None:
    pairs = [ordered_pairs(rows) for rows in by_source(compared).values()]
    assert sum(right for right, _ in pairs) >= 0.95 * sum(number for _, number in pairs)


def test_the_terms_sum_to_the_seconds_and_state_their_numbers() -> None:
    estimate = estimated(mesh={"dp_shard": 8, "tp": 2})
    assert total(estimate.terms) == estimate.seconds
    assert all(each.formula and any(digit.isdigit() for digit in each.formula) for each in estimate.terms)
    assert estimate.tokens_per_second_per_gpu == pytest.approx(2 * 2 * 4096 / 2 / estimate.seconds)


@pytest.mark.parametrize("model", MODELS)
def test_flops_of_the_terms_are_those_of_the_model(model: str) -> None:
    """Matmuls of all layers and the head, 3 passes, and attention are the model FLOPs that the MFU counts."""
    load = workload(model)
    architecture = load.architecture
    per_token = (
        sum(each.flops for each in _layer_matmuls(load, load.architecture.kinds[0], MESHBOOK)) / load.local_tokens
    )
    head = 2 * architecture.hidden * architecture.vocab
    pairs = sum(architecture.attended_pairs(load.seq_len, windowed=kind.is_windowed) for kind in architecture.kinds)
    attention = 12 * architecture.heads * architecture.head_dim * pairs
    flops = 3 * load.seq_len * (architecture.layers * per_token + head) + attention

    assert flops == pytest.approx(architecture.step_flops_per_row(load.seq_len), rel=1e-12)
    assert model_flops(load) == pytest.approx(4 * flops, rel=1e-12)


def test_attention_computes_two_matmuls_forward_and_five_backward() -> None:
    load = workload()
    architecture = load.architecture
    flops = 32 * 4 * 7 * 2 * architecture.hidden * architecture.attended_pairs(4096)  # 32 layers, 4 rows, 7 matmuls
    assert term(estimate_time(load, H100), "attention") == pytest.approx(flops / (989.4e12 * H100.attention_share))


def test_frozen_weights_count_four_flops_per_token() -> None:
    full, lora = (workload(peft=PeftConfig(method=method)) for method in (PeftMethod.none, PeftMethod.lora))
    tokens = 4 * 4096
    assert model_flops(full) - model_flops(lora) == pytest.approx(2 * full.architecture.matmul_weights * tokens)


def test_communication_beside_computation_slows_it_and_what_outlasts_it_is_exposed() -> None:
    assert exposed_seconds(1.0, 10.0) == _OVERLAP_LOSS
    assert exposed_seconds(10.0, 1.0) == 9.0 + _OVERLAP_LOSS
    assert exposed_seconds(0.0, 1.0) == 0.0
    assert exposed_seconds(2.0, 0.0) == 2.0
    assert exposed_seconds(1.0, 10.0, overlaps=False) == 1.0


def test_small_matmuls_are_slower_per_flop() -> None:
    large, narrow, small = (Matmul(8192, *dims).slowdown(128) for dims in ((4096, 4096), (4096, 512), (256, 512)))
    assert 1.0 < large < narrow < small
    assert Matmul(128, 1 << 40, 1 << 40).slowdown(128) == pytest.approx(2.0)


def test_one_gpu_communicates_nothing() -> None:
    names = {each.name for each in estimated().terms}
    assert names == {"matmuls", "attention", "elementwise", "LM head and loss", "gradient accumulation", "optimizer"}


def test_a_matmul_rate_of_the_peak_is_the_only_cost_of_an_ideal_machine() -> None:
    ideal = replace(
        H100, matmul_share=1.0, attention_share=1.0, memory_bandwidth=1e30, launch_seconds=1e-30, network_latency=1e-30
    )
    estimate = estimate_time(workload("405b"), ideal)
    assert 0.9 < estimate.mfu < 1.0  # tiles, and attention's backward of 2.5 instead of 2 forwards


FASTER = [
    *("bf16_flops", "memory_bandwidth", "node_bandwidth", "network_bandwidth", "matmul_share", "attention_share"),
    *("copy_share", "node_share", "network_share", "host_bandwidth", "host_memory_bandwidth"),
]


@pytest.mark.parametrize("name", FASTER)
def test_faster_hardware_is_never_slower(name: str) -> None:
    for mesh, options in (
        ({"dp_shard": 16}, {}),
        ({"dp_shard": 16}, {"cpu_offload": True}),
        ({"dp_shard": 4, "tp": 4}, {"sequence_parallel": True}),
        ({"dp_shard": 2, "pp": 4, "cp": 2}, {}),
    ):
        load = workload(mesh=mesh, parallelism=options, micro_batches=4)
        slow, fast = (estimate_time(load, replace(H100, **{name: getattr(H100, name) * f})) for f in (0.5, 1.0))
        assert fast.seconds <= slow.seconds, (mesh, name)


def test_ranks_fill_nodes_with_tp_innermost() -> None:
    groups = mesh_groups(MeshShape(pp=2, dp_shard=4, cp=2, tp=4), H100)
    assert (groups.tp.size, groups.tp.local) == (4, 4)
    assert (groups.cp.size, groups.cp.local) == (2, 2)
    assert (groups.fsdp.size, groups.fsdp.local) == (8, 2)  # 2 of cp in each node
    assert groups.fsdp.bandwidth == pytest.approx(2 * 50e9 * H100.network_share)
    assert groups.tp.bandwidth == pytest.approx(450e9 * H100.node_share)
    apart = mesh_groups(MeshShape(dp_shard=4, tp=8), H100)
    assert (apart.fsdp.local, apart.fsdp.bandwidth) == (1, pytest.approx(50e9 * H100.network_share))
    assert mesh_groups(MeshShape(tp=6, dp_shard=4), H100).tp.local == 2  # a group of 6 straddles nodes of 8


def test_a_pair_of_directly_linked_gpus_has_a_share_of_the_links() -> None:
    board = replace(H100, gpus_per_node=4, node_links=NodeLinks.direct)
    pair, four = (mesh_groups(MeshShape(tp=tp), board).tp for tp in (2, 4))
    assert pair.bandwidth == pytest.approx(four.bandwidth / 3)


def test_an_all_reduce_sends_the_bytes_of_a_ring() -> None:
    group = replace(mesh_groups(MeshShape(tp=8), H100).tp, latency=0.0)
    assert group.all_reduce(1e9) == pytest.approx(2 * 7 / 8 * 1e9 / group.bandwidth)


def test_fsdp_hides_gathers_behind_computation() -> None:
    alone, sharded = (estimated(mesh={"dp_shard": n}) for n in (1, 8))
    exposed = term(sharded, "FSDP all-gathers (exposed)")
    bandwidth = mesh_groups(MeshShape(dp_shard=8), H100).fsdp.bandwidth
    sent = 2 * 2 * (7 / 8) * 2 * 7.5e9 / bandwidth  # 2 micro-batches, forward and backward, 2 bytes
    assert 0.3 * sent < exposed < 0.8 * sent
    assert sharded.seconds > alone.seconds


def test_keeping_parameters_gathers_half_as_often() -> None:
    reshard, keep = (
        estimated(mesh={"dp_shard": 8}, parallelism={"reshard_after_forward": value}) for value in (True, False)
    )
    assert term(keep, "FSDP all-gathers (exposed)") < 0.6 * term(reshard, "FSDP all-gathers (exposed)")


def test_a_head_that_is_not_tied_is_gathered_and_reduced_beside_layers() -> None:
    load = workload(mesh={"dp_shard": 8})
    tied = replace(load, architecture=replace(load.architecture, tied=True))
    group, head = mesh_groups(load.mesh, H100).fsdp, load.architecture.vocab * load.architecture.hidden
    for name, sent in (
        ("gradient reduction (exposed)", group.all_gather(4 * head)),
        ("FSDP all-gathers (exposed)", 2 * group.all_gather(2 * head)),  # two micro-batches
    ):
        more = term(estimate_time(load, H100), name) - term(estimate_time(tied, H100), name)
        assert more == pytest.approx(_OVERLAP_LOSS * sent, rel=0.02)


def test_async_tp_overlaps_three_of_four_collectives() -> None:
    options = {"sequence_parallel": True}
    together, apart = (estimated(mesh={"tp": 8}, parallelism={**options, "async_tp": value}) for value in (True, False))
    ratio = term(together, "tp communication") / term(apart, "tp communication")
    assert ratio == pytest.approx(1 / 4 + 3 / 4 * _OVERLAP_LOSS)


def test_deferred_reduction_reduces_once() -> None:
    once, each = (
        estimated(mesh={"dp_shard": 8}, micro_batches=4, parallelism={"defer_grad_sync": value})
        for value in (True, False)
    )
    name = "gradient reduction (exposed)"
    assert term(each, name) == pytest.approx(4 * term(once, name))


def test_recomputation_repeats_the_forward() -> None:
    seconds = {
        policy: term(
            estimated("1b", parallelism={"activation_checkpointing": policy}, compiled=False),
            "recomputation",
        )
        for policy in ActivationCheckpointing
    }
    estimate = estimated("1b", compiled=False)
    forward = 16 * 2 * sum(each.forward for each in works(workload("1b", compiled=False)))
    assert seconds[ActivationCheckpointing.none] == 0
    assert seconds[ActivationCheckpointing.alternate] == pytest.approx(seconds[ActivationCheckpointing.full] / 2)
    assert 0.75 * forward < seconds[ActivationCheckpointing.full] < forward  # without the last matmul
    elementwise = 16 * 2 * works(workload("1b", compiled=False))[-1].forward
    assert seconds[ActivationCheckpointing.selective] == pytest.approx(elementwise)
    assert term(estimate, "recomputation") == 0


def works(load: Workload) -> list[LayerWork]:
    """Return the computation of a layer."""
    return layer_works(load, load.architecture.kinds[0], H100, MESHBOOK)


def test_frozen_weights_have_no_gradients() -> None:
    full = workload(peft=PeftConfig())
    lora = workload(peft=PeftConfig(method=PeftMethod.lora))
    assert term(estimate_time(lora, H100), "matmuls") == pytest.approx(
        term(estimate_time(full, H100), "matmuls") * 2 / 3
    )
    assert term(estimate_time(lora, H100), "adapters") > 0
    assert term(estimate_time(lora, H100), "optimizer") < 0.01 * term(estimate_time(full, H100), "optimizer")
    qlora = estimated(peft=PeftConfig(method=PeftMethod.qlora))
    assert term(qlora, "dequantization") > 0


def test_extra_forwards_and_a_frozen_model_cost_forwards() -> None:
    load = workload()
    plain = estimate_time(load, H100)
    forward = plain.stages[0].forward * 2
    more = estimate_time(replace(load, extra_forwards=1.0), H100)
    assert more.seconds - plain.seconds == pytest.approx(forward)
    distilled = estimate_time(replace(load, frozen=load.architecture), H100)
    assert distilled.seconds - plain.seconds == pytest.approx(forward)


def test_replicas_reduce_whole_gradients() -> None:
    mesh = {"dp_replicate": 8, "dp_shard": 1}
    estimate = estimated("1b", mesh=mesh, parallelism={"strategy": Strategy.ddp})
    assert term(estimate, "gradient reduction (exposed)") > 0
    assert term(estimate, "FSDP all-gathers (exposed)") == 0
    assert term(estimate, "optimizer") == term(estimated("1b"), "optimizer")


def test_small_models_wait_for_launches() -> None:
    small = workload("1b", seq_len=64, micro_batch=1, compiled=False)
    assert term(estimate_time(small, H100), "kernel launches (exposed)") > 0
    assert term(estimated("1b", compiled=False), "kernel launches (exposed)") == 0


def test_float8_is_faster_on_hardware_that_supports_it() -> None:
    bf16, float8 = (estimated(float8=kind).seconds for kind in (Float8.none, Float8.tensorwise))
    assert 0.6 * bf16 < float8 < 0.9 * bf16


def layer_work(load: Workload, name: str, hardware: Hardware = H100) -> LayerWork:
    """Return the collectives of an axis in a layer."""
    kind, groups = load.architecture.kinds[0], mesh_groups(load.mesh, hardware)
    found = communication_works(load, kind, groups, hardware, MESHBOOK)
    return next(each for each in found if each.name == name)


def test_tp_sends_two_all_reduces_of_the_hidden_states_per_pass() -> None:
    for sequence_parallel in (False, True):
        load = workload(mesh={"tp": 4}, parallelism={"sequence_parallel": sequence_parallel})
        work = layer_work(load, "tp communication", replace(H100, node_latency=1e-30))
        hidden = 2 * 4096 * 4096 * 2
        assert work.forward == pytest.approx(2 * 2 * 3 / 4 * hidden / (450e9 * H100.node_share))
        assert work.backward == work.forward


def test_replicated_attention_communicates_for_the_mlp_only() -> None:
    sharded, replicated = (layer_work(workload(mesh={"tp": tp}), "tp communication") for tp in (4, 6))
    assert workload().architecture.heads % 6
    assert replicated.detail.startswith("2 gathers")
    assert sharded.detail.startswith("4 gathers")


def test_ulysses_sends_queries_keys_values_and_outputs_once() -> None:
    work = layer_work(workload(mesh={"cp": 4}), "cp communication", replace(H100, node_latency=1e-30))
    tokens = 2 * 4096 / 4
    sent = tokens * 128 * (32 + 8 + 8 + 32) * 2 * 3 / 4  # three of four parts of each tensor leave a rank
    assert work.forward == pytest.approx(sent / (450e9 * H100.node_share))


def test_gathered_keys_cost_more_attention_than_exchanged_heads_only_with_masks() -> None:
    for compute_bytes, low, high in ((2, 1, 1), (4, 2, 4)):
        seconds = {
            method: term(
                estimate_time(
                    workload(mesh={"cp": 4}, parallelism={"cp_attention": method}, compute_bytes=compute_bytes), H100
                ),
                "attention",
            )
            for method in ContextAttention
        }
        assert seconds[ContextAttention.auto] == seconds[ContextAttention.ulysses]
        assert low <= seconds[ContextAttention.all_gather] / seconds[ContextAttention.ulysses] <= high


def test_context_parallel_splits_the_attention_of_a_row() -> None:
    one, four = (estimated(mesh={"cp": cp}) for cp in (1, 4))
    assert term(four, "attention") == pytest.approx(term(one, "attention") / 4)


def test_experts_exchange_tokens_within_and_across_nodes() -> None:
    fast = replace(H100, node_latency=1e-30, network_latency=1e-30)
    tokens = 2 * 4096 * 8 * 2048 * 2 * MESHBOOK.expert_imbalance
    node = layer_work(workload("qwen3_moe_30b", mesh={"ep": 8}), "ep communication", fast)
    assert node.forward == pytest.approx(2 * tokens * 7 / 8 / (450e9 * H100.node_share))
    nodes = layer_work(workload("qwen3_moe_30b", mesh={"ep": 16}), "ep communication", fast)
    inside, outside = tokens * 7 / 16 / (450e9 * H100.node_share), tokens * 8 / 16 / (50e9 * H100.network_share)
    assert nodes.forward == pytest.approx(2 * (inside + outside))


def test_expert_parallel_keeps_the_flops_of_a_rank() -> None:
    one, eight = (estimated("qwen3_moe_30b", mesh={"ep": ep}) for ep in (1, 8))
    # As many routed tokens on the mean rank, in longer groups per expert.
    assert 0.7 < term(eight, "expert matmuls") / term(one, "expert matmuls") / MESHBOOK.expert_imbalance < 1.0
    assert term(eight, "routing waits") > 0
    assert term(one, "routing waits") == 0


def test_muon_orthogonalizes_each_matrix_on_one_of_the_ranks_that_share_it() -> None:
    adamw = workload(mesh={"dp_shard": 8})
    muon = replace(adamw, optimizer=MuonConfig())
    name = "Newton-Schulz iterations"
    seconds = {
        ranks: term(estimate_time(replace(muon, mesh=MeshShape(dp_shard=ranks)), H100), name) for ranks in (1, 8)
    }
    shapes = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(4096, 14336)] * 3
    flops = 32 * 5 * sum(4 * m * m * n + 2 * m**3 for m, n in shapes)
    assert term(estimate_time(adamw, H100), name) == 0
    assert 1.0 < seconds[1] / (flops / H100.matmul_flops(2)) < 1.3
    assert seconds[8] < 0.3 * seconds[1]


def test_offloading_moves_parameters_and_updates_at_the_speed_of_the_host() -> None:
    load = workload(mesh={"dp_shard": 8})
    kept = estimate_time(load, H100)
    moved = estimate_time(replace(load, parallelism=replace(load.parallelism, cpu_offload=True)), H100)
    assert term(kept, "cpu offload") == 0
    # Two micro-batches, forward and backward, float32 parameters; one float32 gradient.
    assert term(moved, "cpu offload") == pytest.approx((4 * 4 + 4) * 8.03e9 / 8 / 55e9, rel=0.01)
    ratio = H100.memory_bandwidth / H100.host_memory_bandwidth
    assert term(moved, "optimizer") == pytest.approx(term(kept, "optimizer") * ratio)


@pytest.mark.parametrize("schedule", PipelineSchedule)
def test_a_pipeline_waits_as_its_timeline_does(schedule: PipelineSchedule) -> None:
    load = workload("70b", mesh={"pp": 4}, parallelism={"pp_schedule": schedule}, micro_batches=16, compiled=False)
    estimate = estimate_time(load, H100)
    names = {"pipeline sends", "optimizer", "FSDP copies", "gradient accumulation", "kernel launches (exposed)"}
    without = estimate.seconds - sum(each.value for each in estimate.terms if each.name in names)
    intervals = timeline(schedule, load.parallelism.stage_ranks(4), estimate.stages, 16)
    assert max(each.start + each.seconds for each in intervals) == pytest.approx(without, rel=0.05)
    assert estimate.send_seconds > 0
    assert term(estimate, "pipeline sends") > 0


@pytest.mark.parametrize(("reshards", "gathers"), [(True, 9), (False, 1)])
def test_pipelines_gather_when_a_forward_follows_a_forward_or_a_backward_a_forward(
    reshards: bool, gathers: int
) -> None:
    options = {"reshard_after_forward": reshards}
    estimate = estimated(mesh={"pp": 2, "dp_shard": 4}, parallelism=options, micro_batches=8)
    formula = next(each.formula for each in estimate.terms if each.name == "FSDP all-gathers (exposed)")
    assert formula.startswith(f"{gathers} rounds x 16 layers x ")  # FF BF BF ... BF BB: 2 + 7 of 16 passes


def test_pipelines_reduce_gradients_after_the_last_backward() -> None:
    load = workload(mesh={"pp": 2, "dp_shard": 4}, micro_batches=8)
    groups = mesh_groups(load.mesh, H100)
    stage = load.architecture.parameters / 2 * 4 * 3 / 4 / groups.fsdp.bandwidth
    assert term(estimate_time(load, H100), "gradient reduction (exposed)") == pytest.approx(stage, rel=0.01)


def test_the_last_stage_has_the_head() -> None:
    estimate = estimated("8b", mesh={"pp": 4}, micro_batches=8)
    assert estimate.stages[-1].forward > 1.05 * estimate.stages[0].forward
    assert estimate.stages[1].forward == estimate.stages[2].forward
    deep = estimated("8b", mesh={"pp": 4}, micro_batches=64)
    assert term(deep, "pipeline bubble") == pytest.approx(term(estimate, "pipeline bubble"), rel=1e-6)


def test_an_estimate_takes_less_than_a_millisecond() -> None:
    mesh = {"pp": 8, "dp_shard": 8, "tp": 8}
    load = workload("405b", mesh=mesh, parallelism={"sequence_parallel": True}, micro_batches=16)
    estimate_time(load, H100)
    start = time.process_time()
    for _ in range(100):
        estimate_time(load, H100)
    assert (time.process_time() - start) / 100 < 1e-3


def published(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script."""
    command = [sys.executable, str(ROOT / "scripts" / "benchmark" / "published.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_the_report_names_rows_sources_and_skipped_rows(tmp_path: Path) -> None:
    lines = POINTS.read_text().splitlines()
    file = tmp_path / "points.csv"
    unknown = [
        lines[1].replace(",8b,", ",deepseek_v3,"),
        lines[1].replace("H100-96GB-HBM2e-500W", "TPU-v5p"),
        lines[1].replace(",5762,", ",,"),
        "x",
    ]
    file.write_text("\n".join([*lines, *unknown]) + "\n")

    done = published(str(file))

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("skipped: ") == 4
    assert "model deepseek_v3 is unknown" in done.stdout
    assert "hardware TPU-v5p is unknown" in done.stdout
    assert "no constant was fitted to: 14 rows, median error" in done.stdout
    assert "pairs in the right order" in done.stdout


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *((None, "cannot be read"), ("a,b\n1,2\n", "has no column id")),
        *((b"\xff\xfe\x00", "is not a CSV file"), ("", "has no")),
    ],
)
def test_a_wrong_file_is_one_message_and_exit_status_2(
    tmp_path: Path, content: str | bytes | None, message: str
) -> None:
    file = tmp_path / "points.csv"
    if content is not None:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    done = published(str(file))
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert str(file) in done.stderr
    assert message in done.stderr
