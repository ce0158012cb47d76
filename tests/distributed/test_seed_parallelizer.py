"""The parallelizer page (004): ours against the published behaviour. Docstrings name SEED_NOTES section 5's object."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from components.config.errors import ConfigError
from components.config.schema import ParallelismConfig
from components.distributed import megatron, parallelizer
from components.distributed.mesh import init_distributed
from components.distributed.tensor.apply_tp import apply_tensor_parallel
from components.distributed.tensor.tensor_parallel import ReplicatedParameters
from components.distributed.tensor.tp_plan import MissingPlanError, get_hf_tp_shard_plan, load_plan
from components.models import read_anatomy
from components.training import gradient_norm
from tests.distributed import published_parallelizer as published
from tests.distributed.contrast import both_sides, contrast
from tests.distributed.parity import build, pad, samples_of_step
from tests.harness import run_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Towers(nn.Module):
    """Two stacks one after the other, a list within a list, and layers in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList([Block(), Block()])
        self.nested = nn.ModuleList([nn.ModuleList([Block()]), nn.ModuleList([Block()])])
        self.by_name = nn.ModuleDict({"a": Block(), "b": Block()})


def mesh_1d(name: str = "data_parallel") -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,))


def check_containers(rank: int, apply: Any) -> None:
    model = Towers()
    apply(model, mesh_1d(), None)
    units = {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    blocks = {name for name, module in model.named_modules() if isinstance(module, Block)}
    assert units == blocks, f"units are {sorted(units)}"


@both_sides
def test_containers_are_descended_into(side: str) -> None:
    """apply_fsdp_sharding_recursively: nested ModuleList, ModuleDict ignored."""
    ours, theirs = parallelizer.apply_fsdp_sharding_recursively, published.apply_fsdp
    contrast(side, check_containers, ours=ours, published=theirs, symptom="ModuleList|units are")


def test_a_bare_list_is_sharded_like_a_child_list() -> None:
    def on_rank(rank: int) -> None:
        lists = nn.ModuleList([Block(), nn.ModuleList([Block()])]), nn.ModuleDict({"a": Block(), "b": Block()})
        for blocks in lists:
            parallelizer.apply_fsdp_sharding_recursively(blocks, mesh_1d(), None)
            units = [isinstance(module, FSDPModule) for module in blocks.modules() if isinstance(module, Block)]
            assert units == [True, True]
            assert all(isinstance(parameter, DTensor) for parameter in blocks.parameters())

    run_ranks(2, on_rank)


def check_only_the_last_unit_stays(rank: int, apply: Any) -> None:
    model = nn.Module()
    model.first, model.second = nn.ModuleList([Block(), Block()]), nn.ModuleList([Block(), Block()])
    apply(model, mesh_1d(), None)
    stays = []
    for block in [*model.first, *model.second]:
        block(torch.ones(1, 4))
        stays.append(not isinstance(block.linear.weight, DTensor))
    assert stays == [False, False, False, True], f"gathered after the forward: {stays}"


@both_sides
def test_only_the_very_last_unit_stays_gathered(side: str) -> None:
    """apply_fsdp_sharding_recursively: skips reshard on the last of each list."""
    ours, theirs = parallelizer.apply_fsdp_sharding_recursively, published.apply_fsdp
    contrast(side, check_only_the_last_unit_stays, ours=ours, published=theirs, symptom="gathered after the forward")


def check_plan_of_transformers_5(rank: int, plan_of: Any) -> None:
    plan = plan_of(build("qwen3", torch.float32))
    assert "model.layers.*.self_attn.q_norm" in plan
    assert plan["lm_head"].output_layouts[0].is_replicate()


@both_sides
def test_style_names_of_transformers_5_are_known(side: str) -> None:
    """get_hf_tp_shard_plan: ValueError for Llama, Mistral, Qwen3 in transformers 5."""
    contrast(
        side,
        check_plan_of_transformers_5,
        ours=get_hf_tp_shard_plan,
        published=published.hf_plan,
        symptom="Unknown parallel style",
        world_size=1,
    )


TP_STYLES = [
    "all_reduce",
    "colwise",
    "colwise_gather_output",
    "colwise_rep",
    "embedding_colwise",
    "embedding_rowwise",
    "local_params",
    "mla_kv_a_proj",
    "moe_identity_expert",
    "moe_tp_experts",
    "packed_colwise",
    "packed_rowwise",
    "replicate",
    "replicated_with_grad_allreduce",
    "rowwise",
    "rowwise_rep",
    "rowwise_split_input",
    "sequence_parallel",
]


def test_every_style_of_transformers_is_translated_or_refused_by_name() -> None:
    """get_hf_tp_shard_plan: an unknown style falls back, with a log line only, to a Llama-shaped plan."""
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    assert set(TP_STYLES) <= set(ALL_PARALLEL_STYLES)
    for name in TP_STYLES:
        assert parallelizer.translate_to_torch_parallel_style(name) is not None
    for name in {*ALL_PARALLEL_STYLES, "diagonal"} - set(TP_STYLES):  # those of expert parallelism
        with pytest.raises(ValueError, match=f"Unknown parallel style: '{name}'"):
            parallelizer.translate_to_torch_parallel_style(name)
    with pytest.raises(AssertionError):
        parallelizer.translate_to_torch_parallel_style(3)  # type: ignore[arg-type]


def test_translated_styles_are_not_shared() -> None:
    """translate_to_torch_parallel_style: shared mutable instances."""
    ours, theirs = parallelizer.translate_to_torch_parallel_style, published.translate
    assert theirs("colwise") is theirs("colwise")
    assert ours("colwise") is not ours("colwise")


def test_import_paths() -> None:
    """import_class_from_path: no dot is an unpack error, nested attributes are not found."""
    with pytest.raises(ModuleNotFoundError):
        published.import_class_from_path("torch.nn.Linear.forward")
    assert parallelizer.import_class_from_path("torch.nn.Linear.forward") is nn.Linear.forward
    assert parallelizer.import_class_from_path("torch.nn:Linear") is nn.Linear
    with pytest.raises(ValueError, match="unpack"):
        published.import_class_from_path("Linear")
    with pytest.raises(ConfigError, match="'Linear' is not an import path"):
        parallelizer.import_class_from_path("Linear")
    with pytest.raises(ConfigError, match="torch.nn has no 'Lineer'"):
        parallelizer.import_class_from_path("torch.nn.Lineer")
    with pytest.raises(ConfigError, match="no module 'torhc'"):
        parallelizer.import_class_from_path("torhc.nn.Linear")


def test_a_failing_import_is_not_dropped() -> None:
    """import_classes_from_paths: failures are printed and dropped, None is a TypeError."""
    assert published.import_classes_from_paths(["torch.nn.Lineer"]) == []
    with pytest.raises(ConfigError, match="Lineer") as caught:
        parallelizer.import_classes_from_paths(["torch.nn.Linear", "torch.nn.Lineer", "nowhere.X"])
    assert len(caught.value.problems) == 2
    with pytest.raises(TypeError):
        published.import_classes_from_paths(None)  # type: ignore[arg-type]
    assert parallelizer.import_classes_from_paths(None) == []  # type: ignore[arg-type]


def check_gpt2_without_tp(rank: int, parallelize: Any) -> None:
    model = parallelize(build("gpt2", torch.float32), mesh_1d())
    model(input_ids=torch.ones(1, 8, dtype=torch.int64)).logits.sum().backward()


@both_sides
def test_models_without_llama_s_attributes(side: str) -> None:
    """fsdp2_strategy_parallelize (a): GPT-2 fails with tp=1."""
    ours = parallelizer.fsdp2_strategy_parallelize
    contrast(side, check_gpt2_without_tp, ours=ours, published=published.fsdp2, symptom="no attribute 'model'")


def own_plan(model: nn.Module) -> dict[str, Any]:
    """Functions and values that a user's plan may be, by import path."""
    return {"model.layers.*.mlp.up_proj": "colwise"} if model is not None else {}


def own_plan_without_arguments() -> dict[str, Any]:
    return {"model.layers.*.mlp.down_proj": "rowwise"}


def own_plan_of_two(model: nn.Module, tp: int) -> dict[str, Any]:
    return {}


EMPTY_PLAN: dict[str, Any] = {}


def test_a_plan_s_path_may_lead_to_a_dict_or_a_function_of_the_model_or_of_nothing() -> None:
    """fsdp2_strategy_parallelize, tp_shard_plan: a dictionary, or a function that returns one."""
    model = build("llama", torch.float32)
    assert list(load_plan(f"{__name__}:own_plan", model)) == ["model.layers.*.mlp.up_proj"]
    assert list(load_plan(f"{__name__}:own_plan_without_arguments", model)) == ["model.layers.*.mlp.down_proj"]
    with pytest.raises(ConfigError, match="own_plan_of_two.*must take the model, or no argument"):
        load_plan(f"{__name__}:own_plan_of_two", model)
    with pytest.raises(ConfigError, match="builtins:dict"):
        load_plan("builtins:dict", model)


@pytest.mark.parametrize("plan", [{}, f"{__name__}:EMPTY_PLAN"], ids=["dict", "path"])
def test_an_empty_plan_shards_nothing_over_tp(plan: Any) -> None:
    """fsdp2_strategy_parallelize, tp_shard_plan: what is given takes precedence."""

    def on_rank(rank: int) -> set[str]:
        model, expected = build("llama", torch.float64), build("llama", torch.float64)
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
        parallelizer.fsdp2_strategy_parallelize(
            model, mesh, mp_policy=MixedPrecisionPolicy(), tp_shard_plan=copy.deepcopy(plan)
        )
        tokens = torch.arange(8)[None]
        assert torch.equal(model(input_ids=tokens).logits, expected(input_ids=tokens).logits)
        return {str(parameter.placements[-1]) for parameter in model.parameters()}

    assert run_ranks(2, on_rank) == [{"R"}] * 2


def test_a_plan_of_single_layers_is_a_plan() -> None:
    """get_hf_tp_shard_plan: raises if no plan is found, that is if nothing would be sharded."""
    model = build("llama", torch.float32)
    type(model)._tp_plan, saved = None, type(model)._tp_plan
    try:
        model._tp_plan, model.model._tp_plan = {}, {"layers.0.self_attn.q_proj": "colwise"}
        plan = get_hf_tp_shard_plan(model)
        assert isinstance(plan["model.layers.0.self_attn.q_proj"], ColwiseParallel)
        for nothing in ({}, {"layers.*.self_attn.q_prj": "colwise"}, {"layers.0.input_layernorm": "sequence_parallel"}):
            model.model._tp_plan = nothing
            with pytest.raises(AssertionError, match="LlamaForCausalLM has no tensor-parallel plan"):
                get_hf_tp_shard_plan(model)
    finally:
        type(model)._tp_plan = saved


def test_later_plans_win() -> None:
    """get_hf_tp_shard_plan: the class's, the instance's, the inner model's."""
    model = build("llama", torch.float32)
    up, down = "model.layers.*.mlp.up_proj", "model.layers.*.mlp.down_proj"
    type(model)._tp_plan, saved = {up: "rowwise", down: "rowwise"}, type(model)._tp_plan
    try:
        model._tp_plan = {up: "replicate"}
        model.model._tp_plan = {}
        assert isinstance(get_hf_tp_shard_plan(model)[up], ReplicatedParameters)
        model.model._tp_plan = {"layers.*.mlp.up_proj": "colwise"}
        plan = get_hf_tp_shard_plan(model)
        assert (type(plan[up]), type(plan[down])) == (ColwiseParallel, RowwiseParallel)
    finally:
        type(model)._tp_plan = saved


def test_a_custom_plan_s_attention_that_tp_does_not_divide_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """fsdp2_strategy_parallelize: it leaves the plan, and rank 0 logs which entries did."""

    def on_rank(rank: int) -> list[str]:
        caplog.clear()
        model, expected = build("llama_uneven_heads", torch.float64), build("llama_uneven_heads", torch.float64)
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
        own = {f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        own |= {"model.layers.*.self_attn.o_proj": RowwiseParallel(), "model.layers.*.mlp.up_proj": ColwiseParallel()}
        own |= {"model.layers.*.mlp.gate_proj": ColwiseParallel(), "model.layers.*.mlp.down_proj": RowwiseParallel()}
        parallelizer.fsdp2_strategy_parallelize(model, mesh, mp_policy=MixedPrecisionPolicy(), tp_shard_plan=own)
        tokens = torch.arange(8)[None]
        torch.testing.assert_close(
            model(input_ids=tokens).logits, expected(input_ids=tokens).logits, rtol=1e-12, atol=1e-12
        )
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    (warning,), others = run_ranks(2, on_rank)
    assert "3 heads and 3 kv heads cannot be divided evenly" in warning
    assert "removed from the plan: model.layers.*.self_attn.q_proj" in warning
    assert "mlp" not in warning
    assert others == []


@pytest.mark.parametrize(("names", "axis"), [(("data_parallel", "tp"), "tp"), (("data_parallel", "cp"), "cp")])
def test_an_axis_that_nothing_covers_is_refused(names: tuple[str, str], axis: str) -> None:
    """fsdp2_strategy_parallelize, the names of the meshes: over another axis ranks would drift apart."""

    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        with pytest.raises(ConfigError, match=f"nothing is sharded or summed over {axis},"):
            parallelizer.fsdp2_strategy_parallelize(build("llama", torch.float32), mesh)
        mesh[names]._flatten("dp_cp")
        model = parallelizer.fsdp2_strategy_parallelize(build("llama", torch.float32), mesh)
        assert next(model.parameters()).device_mesh.size() == 4

    run_ranks(4, on_rank)


def test_every_axis_of_a_user_s_mesh_reduces() -> None:
    """init_distributed of page 003, and FSDP2 over an axis of its mesh: logits are those of one process."""
    shapes = (
        {"dp_shard": 2, "cp": 2},
        {"dp_replicate": 2, "dp_shard": 2},
        {"pp": 2, "tp": 2},
        {"dp_shard": 2, "ep": 2},
    )

    def on_rank(rank: int) -> None:
        for degrees in shapes:
            mesh = init_distributed(ParallelismConfig(**{"dp_shard": 1, **degrees}))
            assert mesh is not None
            for name in mesh.mesh_dim_names:
                ones = torch.ones(1)
                dist.all_reduce(ones, group=mesh.get_group(name))
                assert ones.item() == mesh[name].size(), (degrees, name)
        mesh = init_distributed(ParallelismConfig(**shapes[0]))
        model, expected = build("llama", torch.float64), build("llama", torch.float64)
        policy = MixedPrecisionPolicy()
        with pytest.raises(ConfigError, match="over cp,"):
            parallelizer.fsdp2_strategy_parallelize(model, mesh, mp_policy=policy, dp_mesh_name="dp_shard")
        parallelizer.fsdp2_strategy_parallelize(model, mesh["dp_shard"], mp_policy=policy, dp_mesh_name="dp_shard")
        tokens = torch.arange(8)[None]
        assert torch.equal(model(input_ids=tokens).logits, expected(input_ids=tokens).logits)

    run_ranks(4, on_rank, init=False)


def check_default_policy(rank: int, parallelize: Any) -> None:
    model = parallelize(build("llama", torch.float32), mesh_1d())
    logits = model(input_ids=torch.ones(1, 8, dtype=torch.int64)).logits
    assert logits.dtype == torch.float32
    logits.sum().backward()


@both_sides
def test_the_default_policy_runs(side: str) -> None:
    """fsdp2_strategy_parallelize (b): float32 outputs of each block meet bfloat16 weights in the next."""
    ours = parallelizer.fsdp2_strategy_parallelize
    contrast(side, check_default_policy, ours=ours, published=published.fsdp2, symptom="same dtype")


def check_few_kv_heads(rank: int, parallelize: Any) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
    model = parallelize(build("llama_one_kv_head", torch.float32), mesh)
    model(input_ids=torch.ones(1, 8, dtype=torch.int64)).logits.sum().backward()


@both_sides
def test_fewer_kv_heads_than_tp_ranks(side: str) -> None:
    """fsdp2_strategy_parallelize (d): kv_heads < tp refused, no replication."""
    ours = parallelizer.fsdp2_strategy_parallelize
    contrast(side, check_few_kv_heads, ours=ours, published=published.fsdp2, symptom="divisible by the TP size")


def test_hybrid_sharding_and_silence(capfd: pytest.CaptureFixture[str]) -> None:
    """fsdp2_strategy_parallelize (e, f): HSDP refused; print() on all ranks."""

    def on_rank(rank: int) -> tuple[str, ...]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = build("llama", torch.float32)
        parallelizer.shard_with_fsdp2(model, mesh)
        return tuple(str(place) for place in next(model.parameters()).placements)

    assert run_ranks(4, on_rank) == [("R", "S(0)")] * 4
    assert capfd.readouterr().out == ""


def test_a_plan_entry_that_matches_nothing_is_an_error() -> None:
    """fsdp2_strategy_parallelize (i): no check that plan keys matched anything."""

    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
        plan = {"model.layers.*.self_attn.q_prj": "colwise"}
        styles = {path: parallelizer.translate_to_torch_parallel_style(style) for path, style in plan.items()}
        with pytest.raises(ConfigError, match="'model.layers.\\*.self_attn.q_prj' matches no module"):
            parallelizer.fsdp2_strategy_parallelize(build("llama", torch.float32), mesh, tp_shard_plan=styles)
        with pytest.raises(MissingPlanError, match="GPT2LMHeadModel has no tensor-parallel plan"):
            parallelizer.fsdp2_strategy_parallelize(build("gpt2", torch.float32), mesh)

    run_ranks(2, on_rank)


def gradients_under_tp(name: str, apply: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(gradients of one process, gradients under tp), whole tensors by name."""
    batch = pad(samples_of_step(0), 2)
    wanted, model = build(name, torch.float64), build(name, torch.float64)
    apply(model, mesh_1d("tp"))
    found = []
    for each in (wanted, model):
        logits = each(input_ids=batch.input_ids, use_cache=False).logits
        nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()).backward()
        found.append(
            {
                name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).clone()
                for name, p in each.named_parameters(remove_duplicate=False)
                if p.grad is not None
            }
        )
    return found[0], found[1]


def ours_tp(model: nn.Module, mesh: DeviceMesh) -> None:
    plan, anatomy = get_hf_tp_shard_plan(model), read_anatomy(model)
    apply_tensor_parallel(model, mesh, plan, anatomy, sequence_parallel=False, strict=False)


def check_q_norm(rank: int, apply: Any) -> None:
    wanted, got = gradients_under_tp("qwen3", apply)
    for name in [name for name in wanted if "q_norm" in name or "k_norm" in name]:
        error = ((got[name] - wanted[name]).norm() / wanted[name].norm()).item()
        assert error < 1e-6, f"gradient of {name} is off by {error:.2f}"


@both_sides
def test_gradients_of_q_and_k_norms_are_summed(side: str) -> None:
    """TP facts: q_norm/k_norm get partial gradients; ranks drift apart while the loss looks fine."""
    symptom = "norm.weight is off by [01]\\.[1-9]"
    contrast(side, check_q_norm, ours=ours_tp, published=published.parallelize_tp, symptom=symptom)


def check_tied(rank: int, apply: Any) -> None:
    wanted, got = gradients_under_tp("llama_tied", apply)
    name = "model.embed_tokens.weight"
    error = ((got[name] - wanted[name]).norm() / wanted[name].norm()).item()
    assert error < 1e-10, f"gradient of {name} is off by {error:.2f}"


@both_sides
def test_tied_embeddings_stay_tied(side: str) -> None:
    """TP facts: parallelize_module re-registers parameters, so lm_head and embed_tokens come apart."""
    contrast(side, check_tied, ours=ours_tp, published=published.parallelize_tp, symptom="is off by")


def test_sequence_parallel_shards_the_decoder_layers_of_any_model() -> None:
    """Also beside a ModuleList that is longer than they are."""

    def on_rank(rank: int) -> list[int]:
        model = build("llama", torch.float32)
        model.model.probes = nn.ModuleList(nn.Identity() for _ in range(5))
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
        parallelizer.fsdp2_strategy_parallelize(model, mesh, sequence_parallel=True)
        lengths: list[int] = []
        for layer in model.model.layers:
            layer.input_layernorm.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
        model(input_ids=torch.ones(1, 8, dtype=torch.int64), use_cache=False)
        return lengths

    assert run_ranks(2, on_rank) == [[4, 4]] * 2


def check_norm(rank: int, norm: Any) -> None:
    """On (dp 1, tp 2) every norm layer is replicated over tp; torch's norm of the whole gradients is the truth."""
    wanted, _ = gradients_under_tp("llama", ours_tp)
    truth = torch.linalg.vector_norm(torch.stack([grad.norm() for grad in wanted.values()]))
    model = build("llama", torch.float64)
    ours_tp(model, mesh_1d("tp"))
    batch = pad(samples_of_step(0), 2)
    logits = model(input_ids=batch.input_ids, use_cache=False).logits
    nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()).backward()
    found = norm(model.parameters()).double()
    assert abs(found / truth - 1) < 1e-12, f"the norm is {found.item()}, not {truth.item()}"


@both_sides
def test_the_norm_counts_replicas_once(side: str) -> None:
    """TP facts: replicated gradients counted tp times; mixed meshes break clip_grad_norm_."""
    contrast(side, check_norm, ours=gradient_norm, published=published.gradient_norm, symptom="the norm is")


def check_unshard(rank: int, context: Any) -> None:
    model = build("llama", torch.float32)
    parallelizer.shard_with_fsdp2(model, mesh_1d())
    tokens = torch.ones(1, 8, dtype=torch.int64)
    with torch.no_grad(), context(model):
        for _ in range(2):
            model(input_ids=tokens, use_cache=False)
            whole = [not isinstance(p, DTensor) for p in model.parameters()]
            assert all(whole), f"{whole.count(False)} parameters are sharded again after a forward"
    assert all(isinstance(p, DTensor) for p in model.parameters())
    model(input_ids=tokens, use_cache=False)
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, DTensor), "resharding is not back on"


@both_sides
def test_unsharded_means_unsharded_for_every_forward(side: str) -> None:
    """unshard_fsdp2_model: undone by the first forward."""
    ours = parallelizer.unshard_fsdp2_model
    contrast(side, check_unshard, ours=ours, published=published.unshard, symptom="sharded again after a forward")


def test_flattened_axes_are_found_by_name() -> None:
    """SEED 283-289: reads a private table that torch 2.13 no longer has."""

    def on_rank(rank: int) -> tuple[int, ...]:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data_parallel", "cp"))
        mesh._flatten("dp_cp")
        model = parallelizer.fsdp2_strategy_parallelize(build("llama", torch.float32), mesh)
        return tuple(next(model.parameters()).device_mesh.shape)

    assert run_ranks(2, on_rank) == [(2,), (2,)]


def test_nvfsdp_refuses_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """nvfsdp_strategy_parallelize: absent package, and a tp mesh without a plan that silently does nothing."""

    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
        monkeypatch.setattr(megatron, "HAVE_NVFSDP", False)
        with pytest.raises(AssertionError, match="install the extra"):
            parallelizer.nvfsdp_strategy_parallelize(Block(), mesh)
        monkeypatch.setattr(megatron, "HAVE_NVFSDP", True)
        with pytest.raises(ConfigError, match="give a tp_shard_plan"):
            parallelizer.nvfsdp_strategy_parallelize(Block(), mesh)
        with pytest.raises(ConfigError, match="must be one of no_shard"):
            parallelizer.nvfsdp_strategy_parallelize(Block(), mesh, data_parallel_sharding_strategy="params")

    run_ranks(2, on_rank)


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_our_call_binds_to_the_installed_megatron_fsdp(with_optimizer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvfsdp_strategy_parallelize: unit modules None crash, custom axis names are ignored when cp is 1.

    The package needs a GPU to shard; that the call fits the installed version's real signature is checked here.
    """
    package = pytest.importorskip("megatron_fsdp", reason="the optional extra megatron is not installed")

    def on_rank(rank: int) -> dict[str, Any]:
        bound: dict[str, Any] = {}
        for name in ("fully_shard", "fully_shard_model"):
            signature = inspect.signature(getattr(package, name))

            def call(*args: Any, signature: inspect.Signature = signature, **kwargs: Any) -> tuple[Any, Any]:
                bound.update(signature.bind(*args, **kwargs).arguments)
                return kwargs["module"], kwargs.get("optimizer")

            monkeypatch.setattr(package, name, call)
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("my_dp",))
        model = Block()
        optimizer = torch.optim.SGD(model.parameters()) if with_optimizer else None
        parallelizer.nvfsdp_strategy_parallelize(model, mesh, optimizer, dp_mesh_name="my_dp")
        return {"dp": bound["dp_shard_dim"], "units": len(bound["fsdp_unit_modules"])}

    assert run_ranks(1, on_rank) == [{"dp": "my_dp", "units": 1}]


def test_a_mesh_without_the_named_axes_is_told() -> None:
    def on_rank(rank: int) -> None:
        with pytest.raises(ConfigError, match="none of the axes dp_cp, data_parallel"):
            parallelizer.fsdp2_strategy_parallelize(copy.deepcopy(Block()), mesh_1d("mine"))

    run_ranks(1, on_rank)
