"""The public parallelizer functions, compared with the published behavior of NeMo AutoModel's `parallelizer` module.

Each docstring names the published function and the weakness that the test covers. Tests under `against_published`
also run their check against a re-creation of the published behavior, which must fail.
"""

from __future__ import annotations

import copy
import inspect
import types
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from components.config.schema import ParallelismConfig
from components.distributed import parallelizer
from components.distributed.apply_tp import apply_tensor_parallel
from components.distributed.mesh import init_distributed
from components.distributed.tensor_parallel import ReplicatedParameters
from components.distributed.tp_plan import MissingPlanError, get_hf_tp_shard_plan, load_plan
from components.models import read_anatomy
from components.protocol.errors import ConfigError
from components.training import gradient_norm
from tests.distributed import published_parallelizer as published
from tests.distributed.contrast import against_published
from tests.distributed.parity import SMALL, build, pad, samples_of_step
from tests.harness import run_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Towers(nn.Module):
    """A model with a ModuleList, nested ModuleLists and a ModuleDict of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList([Block(), Block()])
        self.nested = nn.ModuleList([nn.ModuleList([Block()]), nn.ModuleList([Block()])])
        self.by_name = nn.ModuleDict({"a": Block(), "b": Block()})


def mesh_1d(name: str = "data_parallel") -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,))


@against_published(parallelizer.apply_fsdp_sharding_recursively, published.apply_fsdp, symptom="ModuleList|units are")
def test_fsdp_wraps_blocks_inside_nested_lists_and_dicts(rank: int, apply: Any) -> None:
    """apply_fsdp_sharding_recursively: the published version skips nested ModuleLists and ModuleDicts."""
    model = Towers()
    apply(model, mesh_1d(), None)
    units = {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    blocks = {name for name, module in model.named_modules() if isinstance(module, Block)}
    assert units == blocks, f"units are {sorted(units)}"


def test_top_level_module_list_is_sharded_like_a_child_list() -> None:
    def on_rank(rank: int) -> None:
        lists = nn.ModuleList([Block(), nn.ModuleList([Block()])]), nn.ModuleDict({"a": Block(), "b": Block()})
        for blocks in lists:
            parallelizer.apply_fsdp_sharding_recursively(blocks, mesh_1d(), None)
            units = [isinstance(module, FSDPModule) for module in blocks.modules() if isinstance(module, Block)]
            assert units == [True, True]
            assert all(isinstance(parameter, DTensor) for parameter in blocks.parameters())

    run_ranks(2, on_rank)


@against_published(
    parallelizer.apply_fsdp_sharding_recursively, published.apply_fsdp, symptom="gathered after the forward"
)
def test_only_the_last_fsdp_unit_skips_reshard_after_forward(rank: int, apply: Any) -> None:
    """apply_fsdp_sharding_recursively: the published version skips resharding for the last unit of every list."""
    model = nn.Module()
    model.first, model.second = nn.ModuleList([Block(), Block()]), nn.ModuleList([Block(), Block()])
    apply(model, mesh_1d(), None)
    stays = []
    for block in [*model.first, *model.second]:
        block(torch.ones(1, 4))
        stays.append(not isinstance(block.linear.weight, DTensor))
    assert stays == [False, False, False, True], f"gathered after the forward: {stays}"


@against_published(get_hf_tp_shard_plan, published.hf_plan, symptom="Unknown parallel style", world_size=1)
def test_tp_styles_of_transformers_5_are_translated(rank: int, plan_of: Any) -> None:
    """get_hf_tp_shard_plan: published, Llama, Mistral and Qwen3 of transformers 5 raise ValueError."""
    plan = plan_of(build("qwen3", torch.float32))
    assert "model.layers.*.self_attn.q_norm" in plan
    assert plan["lm_head"].output_layouts[0].is_replicate()


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


def test_every_transformers_style_is_translated_or_rejected_by_name() -> None:
    """get_hf_tp_shard_plan: published, an unknown style only logs a line and falls back to a Llama-shaped plan."""
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    assert set(TP_STYLES) <= set(ALL_PARALLEL_STYLES)
    for name in TP_STYLES:
        assert parallelizer.translate_to_torch_parallel_style(name) is not None
    for name in {*ALL_PARALLEL_STYLES, "diagonal"} - set(TP_STYLES):  # styles of expert parallelism
        with pytest.raises(ValueError, match=f"Unknown parallel style: '{name}'"):
            parallelizer.translate_to_torch_parallel_style(name)
    with pytest.raises(AssertionError):
        parallelizer.translate_to_torch_parallel_style(3)  # type: ignore[arg-type]


def test_each_translation_returns_a_new_style_instance() -> None:
    """translate_to_torch_parallel_style: the published version returns shared mutable instances."""
    ours, theirs = parallelizer.translate_to_torch_parallel_style, published.translate
    assert theirs("colwise") is theirs("colwise")
    assert ours("colwise") is not ours("colwise")


def test_import_paths_resolve_nested_attributes_and_report_errors() -> None:
    """import_class_from_path: published, undotted paths fail to unpack and nested attributes are not found."""
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


def test_failed_imports_are_all_reported() -> None:
    """import_classes_from_paths: published, failures are printed and dropped, and None is a TypeError."""
    assert published.import_classes_from_paths(["torch.nn.Lineer"]) == []
    with pytest.raises(ConfigError, match="Lineer") as caught:
        parallelizer.import_classes_from_paths(["torch.nn.Linear", "torch.nn.Lineer", "nowhere.X"])
    assert len(caught.value.problems) == 2
    with pytest.raises(TypeError):
        published.import_classes_from_paths(None)  # type: ignore[arg-type]
    assert parallelizer.import_classes_from_paths(None) == []  # type: ignore[arg-type]


@against_published(parallelizer.fsdp2_strategy_parallelize, published.fsdp2, symptom="no attribute 'model'")
def test_model_without_llama_attributes_is_parallelized(rank: int, parallelize: Any) -> None:
    """fsdp2_strategy_parallelize: published, GPT-2 fails even with tp=1."""
    model = parallelize(build("gpt2", torch.float32), mesh_1d())
    model(input_ids=torch.ones(1, 8, dtype=torch.int64)).logits.sum().backward()


def user_plan(model: nn.Module) -> dict[str, Any]:
    """A user-defined plan function that takes the model; loaded by import path."""
    return {"model.layers.*.mlp.up_proj": "colwise"} if model is not None else {}


def user_plan_without_arguments() -> dict[str, Any]:
    return {"model.layers.*.mlp.down_proj": "rowwise"}


def user_plan_with_two_arguments(model: nn.Module, tp: int) -> dict[str, Any]:
    return {}


EMPTY_PLAN: dict[str, Any] = {}


def test_plan_function_may_take_the_model_or_no_argument() -> None:
    """fsdp2_strategy_parallelize: tp_shard_plan is a dictionary, or a function that returns one."""
    model = build("llama", torch.float32)
    assert list(load_plan(f"{__name__}:user_plan", model)) == ["model.layers.*.mlp.up_proj"]
    assert list(load_plan(f"{__name__}:user_plan_without_arguments", model)) == ["model.layers.*.mlp.down_proj"]
    with pytest.raises(ConfigError, match="user_plan_with_two_arguments.*must take the model, or no argument"):
        load_plan(f"{__name__}:user_plan_with_two_arguments", model)
    with pytest.raises(ConfigError, match="builtins:dict"):
        load_plan("builtins:dict", model)


@pytest.mark.parametrize("plan", [{}, f"{__name__}:EMPTY_PLAN"], ids=["dict", "path"])
def test_empty_plan_replicates_all_parameters_over_tp(plan: Any) -> None:
    """fsdp2_strategy_parallelize: an explicit tp_shard_plan takes precedence, also an empty one."""

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


def test_plan_for_a_single_layer_is_accepted() -> None:
    """get_hf_tp_shard_plan: raises only if the plan would shard nothing."""
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


def test_inner_model_plan_overrides_instance_and_class_plans() -> None:
    """get_hf_tp_shard_plan: later plans win, in the order class, instance, inner model."""
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


class PlainLayer(nn.Module):
    """A decoder layer whose attention has as many heads of one width as its projections have features for."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.self_attn = nn.ModuleDict({f"{name}_proj": nn.Linear(12, 12, bias=False) for name in "qkvo"})
        self.mlp = nn.ModuleDict({"up_proj": nn.Linear(12, 8), "down_proj": nn.Linear(8, 12)})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            self.self_attn[f"{name}_proj"](hidden).unflatten(-1, (-1, self.width)).transpose(1, 2) for name in "qkv"
        )
        heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.self_attn["o_proj"](heads.transpose(1, 2).flatten(2))
        return hidden + self.mlp["down_proj"](self.mlp["up_proj"](hidden).relu())


class PlainDecoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(11, 12)
        self.layers = nn.ModuleList([PlainLayer(width)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layers[0](self.embed_tokens(tokens))


class PlainModel(nn.Module):
    """A model that is not from Hugging Face, with a head over a PlainDecoder."""

    def __init__(self, inner: str, heads: int = 3) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.config = types.SimpleNamespace(num_attention_heads=heads)
        owner: nn.Module = self
        *parents, leaf = inner.split(".")
        for parent in parents:
            owner.add_module(parent, nn.Module())
            owner = owner.get_submodule(parent)
        owner.add_module(leaf, PlainDecoder(12 // heads))
        self.inner, self.lm_head = inner, nn.Linear(12, 11, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.get_submodule(self.inner)(tokens))


UP, DOWN = "layers.*.mlp.up_proj", "layers.*.mlp.down_proj"


@pytest.mark.parametrize("inner", ["model", "language_model", "model.language_model", "backbone"])
def test_plan_of_any_module_is_read_from_class_instance_and_inner_model(inner: str) -> None:
    """get_hf_tp_shard_plan: published, the inner model of a class outside its list must be called `model`."""

    class Planned(PlainModel):
        _tp_plan: ClassVar[Any] = {"lm_head": "rowwise", f"{inner}.{DOWN}": "rowwise"}

    model = Planned(inner)
    assert isinstance(get_hf_tp_shard_plan(model)["lm_head"], RowwiseParallel)
    model._tp_plan = {"lm_head": "colwise_rep"}
    model.get_submodule(inner)._tp_plan = {UP: "colwise"}
    plan = get_hf_tp_shard_plan(model)
    assert {path: type(style) for path, style in plan.items()} == {
        "lm_head": ColwiseParallel,
        f"{inner}.{DOWN}": RowwiseParallel,
        f"{inner}.{UP}": ColwiseParallel,
        f"{inner}.embed_tokens": RowwiseParallel,
    }
    model.config.tie_word_embeddings = True  # although nothing is tied yet
    assert f"{inner}.embed_tokens" not in get_hf_tp_shard_plan(model)
    del model.config.tie_word_embeddings
    wrapped = nn.ModuleDict({"model": model})
    assert set(get_hf_tp_shard_plan(wrapped)) == {f"model.{path}" for path in plan}


def test_plan_of_a_wrapped_hugging_face_model_is_prefixed() -> None:
    """get_hf_tp_shard_plan: the inner model's paths may begin with the name under which a wrapper holds it."""
    model = build("llama", torch.float32)
    plan = get_hf_tp_shard_plan(model)
    assert set(get_hf_tp_shard_plan(nn.ModuleDict({"model": model}))) == {f"model.{path}" for path in plan}


@pytest.mark.parametrize("plan", [None, {}, {"layers.*.mlp.gate": "colwise"}])
def test_any_module_without_a_plan_for_its_parts_is_rejected(plan: Any) -> None:
    """get_hf_tp_shard_plan: raises AssertionError if no plan is found."""
    model = PlainModel("model")
    if plan is not None:
        model._tp_plan = model.model._tp_plan = plan
    with pytest.raises(AssertionError, match="PlainModel has no tensor-parallel plan"):
        get_hf_tp_shard_plan(model)


def test_unknown_styles_of_any_module_are_rejected() -> None:
    """get_hf_tp_shard_plan: published, an unknown name is a ValueError, and what is no name an AssertionError."""
    model = PlainModel("model")
    model._tp_plan = {"lm_head": "diagonal"}
    with pytest.raises(ValueError, match="PlainModel for lm_head: Unknown parallel style: 'diagonal'"):
        get_hf_tp_shard_plan(model)
    model._tp_plan = {"lm_head": 3}
    with pytest.raises(AssertionError, match="must be a string, not 3"):
        get_hf_tp_shard_plan(model)


@pytest.mark.parametrize("head", ["untied", "tied", "tied, planned"])
@pytest.mark.parametrize("heads", [3, 4])
def test_any_module_with_a_plan_trains_under_tp(head: str, heads: int) -> None:
    """fsdp2_strategy_parallelize: 3 heads stay whole over two ranks, although their 12 features are divisible."""

    def on_rank(rank: int) -> None:
        model, expected = (PlainModel("model", heads).double() for _ in range(2))
        for each in (model, expected):
            each.model._tp_plan = {UP: "colwise", DOWN: "rowwise", "layers.*.self_attn.o_proj": "rowwise"}
            each.model._tp_plan |= {f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"}
            if head != "untied":
                each.lm_head.weight = each.model.embed_tokens.weight
            each._tp_plan = {} if head == "tied" else {"lm_head": "colwise_rep"}
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
        parallelizer.fsdp2_strategy_parallelize(model, mesh, mp_policy=MixedPrecisionPolicy())
        assert str(model.get_parameter("model.layers.0.mlp.up_proj.weight").placements[-1]) != "R"
        placement = model.get_parameter("model.layers.0.self_attn.q_proj.weight").placements[-1]
        assert (str(placement) == "R") == (heads == 3)
        assert (str(model.model.embed_tokens.weight.placements[-1]) == "R") == (head == "tied")
        for each in (model, expected):
            logits = each(torch.arange(8)[None])
            nn.functional.cross_entropy(logits[0, :-1], torch.arange(1, 8)).backward()
        for (name, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(
                parameter.grad.full_tensor(),
                other.grad,
                rtol=1e-10,
                atol=1e-12,
                msg=lambda text, name=name: name + text,
            )

    run_ranks(2, on_rank)


def test_attention_that_tp_does_not_divide_is_dropped_from_a_custom_plan(caplog: pytest.LogCaptureFixture) -> None:
    """fsdp2_strategy_parallelize: the entries are removed from the plan, and rank 0 alone logs which ones."""

    def on_rank(rank: int) -> list[str]:
        caplog.clear()
        model, expected = build("llama_uneven_heads", torch.float64), build("llama_uneven_heads", torch.float64)
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
        plan = {f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan |= {"model.layers.*.self_attn.o_proj": RowwiseParallel(), "model.layers.*.mlp.up_proj": ColwiseParallel()}
        plan |= {"model.layers.*.mlp.gate_proj": ColwiseParallel(), "model.layers.*.mlp.down_proj": RowwiseParallel()}
        parallelizer.fsdp2_strategy_parallelize(model, mesh, mp_policy=MixedPrecisionPolicy(), tp_shard_plan=plan)
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
def test_mesh_axis_that_nothing_reduces_over_is_rejected(names: tuple[str, str], axis: str) -> None:
    """fsdp2_strategy_parallelize: ranks of an axis that is neither sharded nor reduced over would drift apart."""

    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        with pytest.raises(ConfigError, match=f"nothing is sharded or summed over {axis},"):
            parallelizer.fsdp2_strategy_parallelize(build("llama", torch.float32), mesh)
        mesh[names]._flatten("dp_cp")
        model = parallelizer.fsdp2_strategy_parallelize(build("llama", torch.float32), mesh)
        assert next(model.parameters()).device_mesh.size() == 4

    run_ranks(4, on_rank)


def test_every_axis_of_the_initialized_mesh_is_usable() -> None:
    """KempnerForge `init_distributed`: all axes of its mesh all-reduce, and FSDP2 over one axis keeps the logits."""
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


@against_published(parallelizer.fsdp2_strategy_parallelize, published.fsdp2, symptom="same dtype")
def test_default_mixed_precision_policy_trains(rank: int, parallelize: Any) -> None:
    """fsdp2_strategy_parallelize: published, blocks return float32, which the next bfloat16 weights reject."""
    model = parallelize(build("llama", torch.float32), mesh_1d())
    logits = model(input_ids=torch.ones(1, 8, dtype=torch.int64)).logits
    assert logits.dtype == torch.float32
    logits.sum().backward()


@against_published(parallelizer.fsdp2_strategy_parallelize, published.fsdp2, symptom="divisible by the TP size")
def test_fewer_kv_heads_than_tp_ranks_are_supported(rank: int, parallelize: Any) -> None:
    """fsdp2_strategy_parallelize: the published version rejects kv_heads < tp instead of replicating."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
    model = parallelize(build("llama_one_kv_head", torch.float32), mesh)
    model(input_ids=torch.ones(1, 8, dtype=torch.int64)).logits.sum().backward()


def test_hybrid_sharding_replicates_and_shards_without_printing(capfd: pytest.CaptureFixture[str]) -> None:
    """fsdp2_strategy_parallelize: the published version rejects HSDP and prints on all ranks."""

    def on_rank(rank: int) -> tuple[str, ...]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = build("llama", torch.float32)
        parallelizer.shard_with_fsdp2(model, mesh)
        return tuple(str(placement) for placement in next(model.parameters()).placements)

    assert run_ranks(4, on_rank) == [("R", "S(0)")] * 4
    assert capfd.readouterr().out == ""


def test_plan_entry_that_matches_no_module_is_rejected() -> None:
    """fsdp2_strategy_parallelize: the published version does not check that plan keys match modules."""

    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
        plan = {"model.layers.*.self_attn.q_prj": "colwise"}
        styles = {path: parallelizer.translate_to_torch_parallel_style(style) for path, style in plan.items()}
        with pytest.raises(ConfigError, match="'model.layers.\\*.self_attn.q_prj' matches no module"):
            parallelizer.fsdp2_strategy_parallelize(build("llama", torch.float32), mesh, tp_shard_plan=styles)
        opt = build("opt", torch.float32, {**SMALL, "model_type": "opt", "word_embed_proj_dim": 48})
        with pytest.raises(MissingPlanError, match="OPTForCausalLM has no tensor-parallel plan"):
            parallelizer.fsdp2_strategy_parallelize(opt, mesh)

    run_ranks(2, on_rank)


def gradients_under_tp(name: str, apply: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return full gradients by name: (one process, under tp)."""
    batch = pad(samples_of_step(0), 2)
    reference, model = build(name, torch.float64), build(name, torch.float64)
    apply(model, mesh_1d("tp"))
    gradients = []
    for each in (reference, model):
        logits = each(input_ids=batch.input_ids, use_cache=False).logits
        nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()).backward()
        gradients.append(
            {
                name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).clone()
                for name, p in each.named_parameters(remove_duplicate=False)
                if p.grad is not None
            }
        )
    return gradients[0], gradients[1]


def ours_tp(model: nn.Module, mesh: DeviceMesh) -> None:
    plan, anatomy = get_hf_tp_shard_plan(model), read_anatomy(model)
    apply_tensor_parallel(model, mesh, plan, anatomy, sequence_parallel=False, strict=False)


@against_published(ours_tp, published.parallelize_tp, symptom="norm.weight is off by [01]\\.[1-9]")
def test_gradients_of_q_and_k_norms_are_all_reduced_over_tp(rank: int, apply: Any) -> None:
    """Published TP: q_norm and k_norm keep partial gradients, so replicas drift apart while the loss looks fine."""
    expected, got = gradients_under_tp("qwen3", apply)
    for name in [name for name in expected if "q_norm" in name or "k_norm" in name]:
        error = ((got[name] - expected[name]).norm() / expected[name].norm()).item()
        assert error < 1e-6, f"gradient of {name} is off by {error:.2f}"


@against_published(ours_tp, published.parallelize_tp, symptom="is off by")
def test_tied_embeddings_stay_tied_under_tp(rank: int, apply: Any) -> None:
    """Published TP: parallelize_module re-registers parameters, which unties lm_head and embed_tokens."""
    expected, got = gradients_under_tp("llama_tied", apply)
    name = "model.embed_tokens.weight"
    error = ((got[name] - expected[name]).norm() / expected[name].norm()).item()
    assert error < 1e-10, f"gradient of {name} is off by {error:.2f}"


def test_sequence_parallel_shards_the_decoder_layers_of_any_model() -> None:
    """The decoder layers are found even if the model holds a longer ModuleList."""

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


@against_published(gradient_norm, published.gradient_norm, symptom="the norm is")
def test_gradient_norm_counts_replicated_parameters_once(rank: int, norm: Any) -> None:
    """Published TP: replicated gradients are counted tp times, and mixed meshes break clip_grad_norm_.

    Compared with torch's norm of the full gradients; under tp 2, the weights of norm layers are replicated.
    """
    expected_gradients, _ = gradients_under_tp("llama", ours_tp)
    expected = torch.linalg.vector_norm(torch.stack([grad.norm() for grad in expected_gradients.values()]))
    model = build("llama", torch.float64)
    ours_tp(model, mesh_1d("tp"))
    batch = pad(samples_of_step(0), 2)
    logits = model(input_ids=batch.input_ids, use_cache=False).logits
    nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()).backward()
    actual = norm(model.parameters()).double()
    assert abs(actual / expected - 1) < 1e-12, f"the norm is {actual.item()}, not {expected.item()}"


@against_published(parallelizer.unshard_fsdp2_model, published.unshard, symptom="sharded again after a forward")
def test_unshard_context_keeps_parameters_gathered_across_forwards(rank: int, context: Any) -> None:
    """unshard_fsdp2_model: published, the first forward reshards the parameters."""
    model = build("llama", torch.float32)
    parallelizer.shard_with_fsdp2(model, mesh_1d())
    tokens = torch.ones(1, 8, dtype=torch.int64)
    with torch.no_grad(), context(model):
        for _ in range(2):
            model(input_ids=tokens, use_cache=False)
            gathered = [not isinstance(p, DTensor) for p in model.parameters()]
            assert all(gathered), f"{gathered.count(False)} parameters are sharded again after a forward"
    assert all(isinstance(p, DTensor) for p in model.parameters())
    model(input_ids=tokens, use_cache=False)
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, DTensor), "resharding is not back on"


def test_flattened_mesh_axis_is_found_by_name() -> None:
    """fsdp2_strategy_parallelize: the published version reads a private torch attribute that torch 2.13 removed."""

    def on_rank(rank: int) -> tuple[int, ...]:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data_parallel", "cp"))
        mesh._flatten("dp_cp")
        model = parallelizer.fsdp2_strategy_parallelize(build("llama", torch.float32), mesh)
        return tuple(next(model.parameters()).device_mesh.shape)

    assert run_ranks(2, on_rank) == [(2,), (2,)]


def test_nvfsdp_rejects_unsupported_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """nvfsdp_strategy_parallelize: published, a tp mesh without a plan is silently ignored."""

    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
        monkeypatch.setattr(parallelizer, "HAVE_NVFSDP", False)
        with pytest.raises(AssertionError, match="install the extra"):
            parallelizer.nvfsdp_strategy_parallelize(Block(), mesh)
        monkeypatch.setattr(parallelizer, "HAVE_NVFSDP", True)
        with pytest.raises(ConfigError, match="give a tp_shard_plan"):
            parallelizer.nvfsdp_strategy_parallelize(Block(), mesh)
        with pytest.raises(ConfigError, match="must be one of no_shard"):
            parallelizer.nvfsdp_strategy_parallelize(Block(), mesh, data_parallel_sharding_strategy="params")

    run_ranks(2, on_rank)


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_nvfsdp_call_matches_signature_of_installed_megatron_fsdp(
    with_optimizer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvfsdp_strategy_parallelize: published, unit modules of None crash, and custom axis names are ignored if cp is 1.

    Sharding with megatron_fsdp needs a GPU, so this test only binds the call to the real signature.
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


def test_mesh_without_a_data_parallel_axis_is_rejected() -> None:
    def on_rank(rank: int) -> None:
        with pytest.raises(ConfigError, match="none of the axes dp_cp, data_parallel"):
            parallelizer.fsdp2_strategy_parallelize(copy.deepcopy(Block()), mesh_1d("mine"))

    run_ranks(1, on_rank)
