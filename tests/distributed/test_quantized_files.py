"""Shards of models from quantized files on every mesh, bit for bit those of the decoded files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from components import distributed, models
from components.config.mesh_rules import layout_of
from components.config.schema import ParallelismConfig
from components.config.schema.model import Attention, DType, ModelConfig
from components.config.schema.run import PeftConfig, PeftMethod
from components.models.weights.shards import local_part
from components.models.weights.weight_sources import SafetensorsTensors
from tests.harness import run_ranks
from tests.quantized import quantized_folders

MESHES = {
    "fp8 blocks": ["dp_shard4", "dp_shard2_tp2", "pp2_ep2", "dp_shard2_cp2"],
    "fp8 and fp4": ["ep2_tp2", "dp_replicate2_dp_shard2"],
    "mxfp4": ["dp_shard4", "dp_shard2_ep2", "pp2_ep2"],
    "nvfp4": ["dp_shard2_tp2", "pp2_ep2"],
    "nvfp4 modelopt": ["dp_shard4", "dp_shard2_tp2"],
    "int4": ["dp_shard4", "dp_shard2_tp2", "pp2_tp2", "pp2_dp_shard2"],
}
QUANTIZED_AGAIN = ("int4", "nvfp4 modelopt")
QLORA = PeftConfig(method=PeftMethod.qlora, rank=4)


def shards(folder: Path, mesh_name: str, peft: PeftConfig) -> nn.Module:
    """Build a model on a mesh, and load this rank's shards from a folder."""
    attention = Attention.eager if "gpt_oss" in (folder / "config.json").read_text() else Attention.sdpa
    cfg = ModelConfig(path=str(folder), dtype=DType.bfloat16, attention=attention)
    parallelism = layout_of(mesh_name, ParallelismConfig())
    assert parallelism is not None
    mesh = distributed.build_mesh(parallelism, "cpu")
    model = models.build_on_meta(cfg)
    anatomy = models.read_anatomy(model)
    models.add_adapters(model, peft)
    distributed.parallelize(model, mesh, parallelism, torch.bfloat16, anatomy)
    models.materialize(model, "cpu")
    models.fill_weights(model, cfg, seed=3)
    return model


@pytest.mark.parametrize("name", MESHES)
def test_shards_equal_those_of_decoded_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, plain = quantized_folders(tmp_path, name)
    read, read_codes = SafetensorsTensors.read, []

    def counted_read(self: SafetensorsTensors, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        values = read(self, name, index)
        if name.endswith(("_packed", "_blocks")):
            read_codes.append(values.numel())
        return values

    monkeypatch.setattr(SafetensorsTensors, "read", counted_read)
    stored = load_file(folder / "model.safetensors")
    all_codes = sum(each.numel() for key, each in stored.items() if key.endswith(("_packed", "_blocks")))

    def body(rank: int) -> None:
        for mesh_name in MESHES[name]:
            for peft in (PeftConfig(), QLORA) if name in QUANTIZED_AGAIN and "tp" not in mesh_name else (PeftConfig(),):
                read_codes.clear()
                model, expected = (shards(each, mesh_name, peft) for each in (folder, plain))
                names = dict(expected.named_parameters())
                assert dict(model.named_parameters()).keys() == names.keys()
                for key, parameter in names.items():
                    ours, theirs = local_part(model.get_parameter(key)), local_part(parameter)
                    assert torch.equal(ours, theirs), (mesh_name, key)
                assert peft is not QLORA or any(each.dtype == torch.uint8 for each in names.values())
                if mesh_name == "dp_shard4" and "nvfp4" not in name:  # experts of nvfp4 files are merged from all
                    assert sum(read_codes) == all_codes / 4, "a rank reads the codes of its shards only"

    run_ranks(4, body)
