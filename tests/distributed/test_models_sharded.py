"""Loading, initialization and errors of an export on gloo ranks, compared with transformers in one process."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _world
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from components import distributed
from components.config.mesh_rules import NO_TP_PLAN
from components.config.schema.model import ModelConfig, WeightInit
from components.config.schema.parallelism import ParallelismConfig
from components.models import (
    build_on_meta,
    count_parameters,
    decoder_layers,
    export_model,
    fill_weights,
    load_tokenizer,
    materialize,
)
from components.models.weights.shards import _describe
from components.models.weights.weight_sources import SafetensorsTensors
from components.protocol.errors import ConfigError
from components.training.step_cost import record_traffic
from tests.distributed.parity import HYBRID_MODELS
from tests.distributed.test_pipeline import start
from tests.harness import run_ranks
from tests.tiny_models import DENSE, FAMILIES, logits, reference, tiny_folder

TP_PLAN = {
    **{f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}


def shard(model: PreTrainedModel, layout: str) -> None:
    """Shard a model with plain torch: `fsdp4`, `hsdp2x2`, `tp2` or `fsdp2_tp2`."""
    if layout.startswith("fsdp") and "tp" not in layout:
        fsdp(model, init_device_mesh("cpu", (int(layout[4:]),), mesh_dim_names=("fsdp",)))
    elif layout == "hsdp2x2":
        fsdp(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "fsdp")))
    elif layout == "tp2":
        tensor_parallel(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        tensor_parallel(model, mesh["tp"])
        fsdp(model, mesh["fsdp"])


def fsdp(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def tensor_parallel(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    parallelize_module(model, mesh, TP_PLAN)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight


def sharded(cfg: ModelConfig, layout: str) -> PreTrainedModel:
    model = build_on_meta(cfg)
    shard(model, layout)
    materialize(model, "cpu")
    fill_weights(model, cfg, seed=5)
    return model.eval()


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def assert_equal_parameters(model: nn.Module, expected: nn.Module) -> None:
    names = dict(expected.named_parameters())
    assert dict(model.named_parameters()).keys() == names.keys()
    for name, value in names.items():
        assert torch.equal(full(model.get_parameter(name)), value), name
    for name, value in expected.named_buffers():
        assert torch.equal(model.get_buffer(name), value), name


def test_every_family_loads_into_fsdp_shards_bitwise(tmp_path: Path) -> None:
    folders = {family: tiny_folder(tmp_path / family, family) for family in FAMILIES}

    def body(rank: int) -> None:
        for folder in folders.values():
            expected = reference(folder)
            model = sharded(ModelConfig(path=str(folder)), "fsdp4")
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
            assert_equal_parameters(model, expected)
            assert torch.equal(logits(model), logits(expected))

    run_ranks(4, body)


@pytest.mark.parametrize(("world", "layout"), [(2, "tp2"), (4, "fsdp2_tp2"), (4, "hsdp2x2"), (4, "fsdp4")])
def test_llama_families_load_into_every_layout_and_ranks_read_their_shards_only(
    world: int, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tiny_folder(tmp_path / family, family) for family in ("llama", "llama3", "mistral")]
    read, read_sizes = SafetensorsTensors.read, []

    def counted_read(self: SafetensorsTensors, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        values = read(self, name, index)
        read_sizes.append(values.numel())
        return values

    monkeypatch.setattr(SafetensorsTensors, "read", counted_read)

    def body(rank: int) -> None:
        for folder in folders:
            expected = reference(folder)
            read_sizes.clear()
            model = sharded(ModelConfig(path=str(folder)), layout)
            assert sum(read_sizes) == count_parameters(model).local_bytes // 4
            tied = expected.lm_head.weight is expected.model.embed_tokens.weight
            assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
            assert_equal_parameters(model, expected)
            torch.testing.assert_close(logits(model), logits(expected), rtol=1e-4, atol=1e-4)

    run_ranks(world, body)


def test_hybrid_models_load_on_tp_from_files(tmp_path: Path) -> None:
    """As in a run, which chooses the rows of each rank's heads on the meta device, before there are weights."""
    families = [family for family in HYBRID_MODELS if family not in NO_TP_PLAN]
    folders = {family: tiny_folder(tmp_path / family, family) for family in families}
    config = ParallelismConfig(strategy="fsdp2", dp_shard=1, tp=2)

    def body(rank: int) -> None:
        mesh = distributed.build_mesh(config, "cpu")
        for family, folder in folders.items():
            expected, cfg = reference(folder), ModelConfig(path=str(folder))
            model = build_on_meta(cfg)
            distributed.parallelize(model, mesh, config, torch.float32)
            materialize(model, "cpu")
            fill_weights(model, cfg, seed=5)
            assert_equal_parameters(model, expected)
            torch.testing.assert_close(logits(model.eval()), logits(expected), rtol=1e-3, atol=1e-3, msg=family)

    run_ranks(2, body)


def test_random_weights_are_identical_on_every_mesh() -> None:
    def body(rank: int, layout: str | None) -> None:
        for family in DENSE if layout in ("fsdp2", "fsdp4") else ["llama", "llama3"]:
            cfg = ModelConfig(path=None, init=WeightInit.random, tokenizer="bytes", config=FAMILIES[family])
            single = build_on_meta(cfg)
            materialize(single, "cpu")
            fill_weights(single, cfg, seed=5)
            assert_equal_parameters(sharded(cfg, layout), single)

    for world, layout in ((1, "fsdp1"), (2, "fsdp2"), (2, "tp2"), (4, "fsdp4"), (4, "fsdp2_tp2")):
        run_ranks(world, body, layout)


def test_missing_tensor_on_disk_is_reported_on_every_rank(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "llama")
    cfg = ModelConfig(path=str(folder), config={"num_hidden_layers": 3})

    def body(rank: int) -> str:
        with pytest.raises(ConfigError) as caught:
            sharded(cfg, "fsdp2")
        return str(caught.value)

    messages = run_ranks(2, body)
    assert messages[0] == messages[1]
    assert "lack tensors of LlamaForCausalLM: model.layers.2.self_attn.q_proj.weight" in messages[0]


def test_export_opens_no_communicator_per_pair_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shard is one batched send through the default group. NCCL opens a communicator for an unbatched one."""
    folder = tiny_folder(tmp_path / "saved", "llama")
    batch_isend_irecv, batches = dist.batch_isend_irecv, []

    def counted(operations: list[dist.P2POp]) -> list[dist.Work]:
        batches.append([each.group for each in operations])
        return batch_isend_irecv(operations)

    def body(rank: int) -> tuple[int, dict[tuple[tuple[int, ...], str], int], int]:
        cfg = ModelConfig(path=str(folder), tokenizer="bytes")
        model = sharded(cfg, "fsdp4")
        groups = len(_world.pg_map)
        monkeypatch.setattr(dist, "batch_isend_irecv", counted)
        with record_traffic() as traffic:
            export_model(model, load_tokenizer(cfg), tmp_path / "export")
        assert len(_world.pg_map) == groups
        assert all(len(groups) == 1 for groups in batches)
        sent = {key: volume.calls for key, volume in traffic.volumes.items() if key[1] in ("send", "recv")}
        return len(batches), sent, len(list(model.parameters()))

    reports = run_ranks(4, body)
    everyone = (0, 1, 2, 3)
    parameters = reports[0][2]
    assert reports[0][1] == {(everyone, "recv"): 3 * parameters}
    assert all(sent == {(everyone, "send"): parameters} for _, sent, _ in reports[1:])
    assert [count for count, _, _ in reports] == [3 * parameters, parameters, parameters, parameters]


@pytest.mark.parametrize(("backend", "device"), [("cpu:gloo,cuda:nccl", "cpu"), ("gloo", "cpu"), ("nccl", "cuda")])
def test_shards_of_a_gpu_travel_through_gloo_if_it_is_there(
    backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    assert _describe(torch.empty(2, 3, device="meta"), "weight").device == device


@pytest.mark.parametrize("of", ["folder", "tensor"])
def test_export_write_error_is_raised_on_every_rank(tmp_path: Path, of: str) -> None:
    """After an error in the middle the writer still receives the tensors that the other ranks send."""
    folder = tiny_folder(tmp_path / "saved", "llama")
    (tmp_path / "file").touch()
    target = tmp_path / ("file/export" if of == "folder" else "export")

    def body(rank: int) -> str:
        cfg = ModelConfig(path=str(folder), tokenizer="bytes")
        model = sharded(cfg, "fsdp2")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == 0 and of == "tensor":
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
        with pytest.raises(OSError, match="could not be written") as caught:
            export_model(model, load_tokenizer(cfg), target)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        return str(caught.value)

    first, second = run_ranks(2, body)
    assert first == second
    assert not list(tmp_path.glob("export*"))


def partial_sum(mesh: DeviceMesh) -> torch.Tensor:
    return DTensor.from_local(torch.ones(32), mesh, [Partial()] * mesh.ndim, run_check=False)


def unsharded(_: DeviceMesh) -> torch.Tensor:
    return torch.ones(32)


@pytest.mark.parametrize(
    ("layout", "wrong", "message"),
    [
        ("pp2", partial_sum, "model.norm.weight: holds a partial sum"),
        ("fsdp2", unsharded, "model.norm.weight: the ranks hold 48 of the 32 values of (32,)"),
    ],
)
def test_export_error_of_one_rank_is_raised_on_every_rank(
    layout: str, wrong: Callable[[DeviceMesh], torch.Tensor], message: str, tmp_path: Path
) -> None:
    cfg = ModelConfig(path=str(tiny_folder(tmp_path / "saved", "llama3")), tokenizer="bytes")

    def body(rank: int) -> str:
        model = start(cfg, {"pp": 2}).model if layout == "pp2" else sharded(cfg, layout)
        if rank == 1:  # the last stage
            norm = model.model.norm
            norm.weight = nn.Parameter(wrong(norm.weight.device_mesh))
        with pytest.raises(NotImplementedError) as caught:
            export_model(model, load_tokenizer(cfg), tmp_path / "export")
        return str(caught.value)

    first, second = run_ranks(2, body)
    assert first == second
    assert message in first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]


MEASURE_PEAKS = """
import json, sys
import torch, torch.distributed as dist, safetensors
from transformers.conversion_mapping import get_model_conversion_mapping
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _world
from torch.distributed.fsdp import fully_shard
from components.config.schema.model import ModelConfig
from components.models import build_on_meta, decoder_layers, load_weights, materialize
from components.training.step_cost import record_traffic
from components.models.weights.shards import _describe
from components.models.weights.weight_sources import SafetensorsTensors
from tests.harness import run_ranks

cfg = ModelConfig(path=sys.argv[1])
get_model_conversion_mapping(build_on_meta(cfg))  # run the one-time setup of loading before measuring

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

def body(rank):
    mesh = init_device_mesh("cpu", (4,))
    model = build_on_meta(cfg)
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    open("/proc/self/clear_refs", "w").write("5")  # reset the peak
    before = status("VmRSS")
    materialize(model, "cpu")
    load_weights(model, cfg)
    return {"peak": status("VmHWM") - before, "kept": status("VmRSS") - before}

print(json.dumps(run_ranks(4, body)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_of_loading_is_close_to_the_shard_size(tmp_path: Path) -> None:
    """Measure the resident memory of 4 ranks, forked from a fresh process, while they load a model of 200 MB."""
    config = LlamaConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=2048, num_hidden_layers=10, num_attention_heads=8
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size > 190e6
    command = [sys.executable, "-c", MEASURE_PEAKS, str(tmp_path)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert completed.returncode == 0, completed.stderr
    for rank in json.loads(completed.stdout):
        assert 0.24 * size < rank["kept"]  # the measurement includes the shard itself
        assert rank["peak"] < 0.6 * size, completed.stdout
