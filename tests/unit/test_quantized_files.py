"""Quantized safetensors files: decoded bit for bit, in slices, and their damages named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from components.config.model_files import check_weights, locate
from components.config.schema.model import Attention, DType, ModelConfig
from components.models import build_on_meta
from components.models.weights.quantized_files import open_safetensors
from components.protocol.errors import ConfigError
from tests.quantized import FORMATS, Made, fp8_blocks, fp8_tensor, quantized_folders
from tests.tiny_models import filled, reference

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def folder_of(tmp_path: Path, stored: dict[str, torch.Tensor], description: dict[str, Any]) -> Path:
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": description}))
    return tmp_path


def named(made: Made, name: str = "x.weight") -> dict[str, torch.Tensor]:
    module = name.rpartition(".")[0]
    return {(module if key.startswith(".") else name) + key: each for key, each in made.stored.items()}


@pytest.mark.parametrize("name", FORMATS)
def test_models_equal_those_of_decoded_files(name: str, tmp_path: Path) -> None:
    folder, plain = quantized_folders(tmp_path, name)
    assert check_weights(str(folder)) == []
    attention = Attention.eager if name == "mxfp4" else Attention.sdpa
    for dtype in (DType.bfloat16, DType.float32):
        model = filled(ModelConfig(path=str(folder), dtype=dtype, attention=attention))
        assert not hasattr(model.config, "quantization_config")
        expected = reference(plain, getattr(torch, dtype)).state_dict()
        state = model.state_dict()
        assert state.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(state[key], value), (key, dtype)


@pytest.mark.parametrize("name", FORMATS)
def test_slices_equal_parts_of_the_whole(name: str, tmp_path: Path) -> None:
    """Slices begin and end inside blocks, groups and bytes."""
    folder, plain = quantized_folders(tmp_path, name)
    stored = open_safetensors(locate(str(folder)), None)
    expected = load_file(plain / "model.safetensors")
    assert stored.shapes() == {key: tuple(each.shape) for key, each in expected.items()}
    assert stored.not_floats() == {}
    for key, whole in expected.items():
        assert torch.equal(stored.read(key, ()), whole), key
        assert stored.on_meta(key).dtype == torch.bfloat16
        for start, stop in ((0, 1), (5, 18), (7, 7)):
            index = tuple(slice(start if dim else start // 2, min(stop, size)) for dim, size in enumerate(whole.shape))
            assert torch.equal(stored.read(key, index), whole[index]), (key, index)


def test_matrices_are_decoded_in_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = fp8_blocks(600, 320, (128, 128))
    folder = folder_of(tmp_path, named(made), FP8)
    monkeypatch.setattr("components.models.weights.quantized_files._DECODED_AT_ONCE", 320 * 100)
    decoded = open_safetensors(locate(str(folder)), None).read("x.weight", (slice(50, 590), slice(3, 320)))
    assert torch.equal(decoded, made.exact.float().bfloat16()[50:590, 3:])


def test_even_blocks_equal_those_of_transformers(tmp_path: Path) -> None:
    """transformers 5.23 raises for ragged blocks, or takes another size for theirs: (192, 256) as blocks of 96 rows."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    theirs, made = Fp8Dequantize(None), fp8_blocks(256, 384, (128, 128))
    stored = open_safetensors(locate(str(folder_of(tmp_path, named(made), FP8))), None)
    pair = made.stored[""], made.stored["_scale_inv"]
    assert torch.equal(stored.read("x.weight", ()), theirs._dequantize_one(*pair, torch.bfloat16))
    ragged = fp8_blocks(576, 320, (128, 128)).stored
    with pytest.raises(ValueError, match="not divisible"):
        theirs._dequantize_one(ragged[""], ragged["_scale_inv"], torch.bfloat16)

    folder, plain = quantized_folders(tmp_path / "experts", "mxfp4")
    files, key = load_file(folder / "model.safetensors"), "model.layers.0.mlp.experts.gate_up_proj"
    expected = convert_moe_packed_tensors(files[f"{key}_blocks"], files[f"{key}_scales"])
    assert torch.equal(load_file(plain / "model.safetensors")[key], expected)


@pytest.mark.parametrize("name", [name for name, each in FORMATS.items() if each[1]["quant_method"][0] == "c"])
def test_values_equal_those_of_the_compressed_tensors_library(name: str, tmp_path: Path) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    _, description, draw = FORMATS[name]
    group = description["config_groups"]["group_0"]
    scheme = QuantizationScheme(**group, format=description["format"])
    torch.manual_seed(0)
    made = draw(64, 96)
    local = {f"weight{suffix}": each for suffix, each in made.stored.items() if not suffix.startswith(".")}
    compressor = BaseCompressor.get_value_from_registry(description["format"])
    theirs = compressor.decompress({key: each.clone() for key, each in local.items()}, scheme)["weight"]
    stored = open_safetensors(locate(str(folder_of(tmp_path, named(made), description))), None)
    # Theirs rounds scales to the dtype of weights in some formats.
    assert torch.allclose(stored.read("x.weight", ()).double(), theirs.double(), rtol=2**-7, atol=0)


def test_modelopt_files_without_a_description_in_config_json(tmp_path: Path) -> None:
    folder, plain = quantized_folders(tmp_path, "nvfp4 modelopt")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    model = filled(ModelConfig(path=str(folder), dtype=DType.bfloat16))
    expected = reference(plain, torch.bfloat16).state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())
    for text, message in (
        ('{"quantization": {"quant_algo": "W4A8_AWQ"}}', r"\(modelopt W4A8_AWQ\)"),
        ("[]", "does not"),
    ):
        (folder / "hf_quant_config.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            open_safetensors(locate(str(folder)), None)


def change(stored: dict[str, torch.Tensor], problem: str) -> dict[str, torch.Tensor]:
    match problem:
        case "lacks its scales":
            del stored["x.weight_scale_inv"]
        case "scales of another shape":
            stored["x.weight_scale_inv"] = torch.rand(5, 4)
        case "one scale too few":
            stored["x.weight_scale_inv"] = torch.rand(4, 3)
    return stored


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (
            "lacks its scales",
            "model.safetensors: x.weight is quantized (F8_E4M3), but the files lack its scales, x.weight_scale_inv; "
            "download the model again",
        ),
        (
            "scales of another shape",
            "x.weight_scale_inv is (5, 4), which does not fit x.weight, (576, 320), in blocks of 128 x 128; correct "
            "weight_block_size in config.json, or download the model again",
        ),
        ("one scale too few", "x.weight_scale_inv is (4, 3), which does not fit x.weight, (576, 320), in blocks of"),
    ],
)
def test_damaged_scales_are_named(problem: str, message: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, change(named(fp8_blocks(576, 320, (128, 128))), problem), FP8)
    with pytest.raises(ConfigError) as error:
        open_safetensors(locate(str(folder)), None)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "lost"), [("nvfp4 modelopt", "_scale_2"), ("nvfp4", "weight_global_scale"), ("mxfp4", "_scales")]
)
def test_a_missing_scale_of_codes_of_four_bits_is_named(name: str, lost: str, tmp_path: Path) -> None:
    folder, _ = quantized_folders(tmp_path, name)
    files = load_file(folder / "model.safetensors")
    gone = min(key for key in files if key.endswith(lost))
    save_file({key: each for key, each in files.items() if key != gone}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=f"lack its scales, {re.escape(gone)}; download"):
        open_safetensors(locate(str(folder)), None)


def test_other_scales_of_bytes_are_rejected(tmp_path: Path) -> None:
    """Integers of 4 bits have scales in other dtypes; a transposed grid has as many values."""
    stored = named(FORMATS["nvfp4 modelopt"][2](32, 64))
    wrong = {**stored, "x.weight_scale": stored["x.weight_scale"].float()}
    with pytest.raises(ConfigError, match="x.weight has scales of dtype F32, a format that is not read"):
        open_safetensors(locate(str(folder_of(tmp_path, wrong, {"quant_method": "modelopt"}))), None)
    wrong = {**stored, "x.weight_scale": stored["x.weight_scale"].T.contiguous()}
    with pytest.raises(ConfigError, match=r"x.weight_scale is \(4, 32\), which does not fit x.weight"):
        open_safetensors(locate(str(folder_of(tmp_path, wrong, {"quant_method": "modelopt"}))), None)


def test_scale_that_is_not_finite_is_named(tmp_path: Path) -> None:
    folder, _ = quantized_folders(tmp_path, "mxfp8")
    files = load_file(folder / "model.safetensors")
    files["model.layers.1.mlp.up_proj.weight_scale"][3, 0] = 255  # NaN in the standard
    save_file(files, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds NaN"):
        filled(ModelConfig(path=str(folder)))


REFUSED = [
    ({"quant_method": "gptq", "bits": 4}, "gptq"),
    ({"quant_method": "awq"}, "awq"),
    ({"bits": 4}, "an unnamed method"),
    ({"quant_method": "compressed-tensors", "format": [1], "sparsity_config": 2}, "compressed-tensors [1]"),
    ([1], "[1]"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "modelopt W4A8_AWQ"),
    ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "compressed-tensors marlin-24"),
    (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "symmetric": False}}},
        },
        "compressed-tensors with zero points",
    ),
    (
        {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"R1": {}}}},
        "compressed-tensors with transforms of activations",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("description", "name"), REFUSED, ids=lambda each: each if isinstance(each, str) else "")
def test_unknown_formats_are_refused_by_name(description: Any, name: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, named(fp8_tensor(16, 16)), description)
    expected = (
        f"model.path={folder}: its weights are quantized in a format that is not read ({name}); give the same model in "
        "bfloat16, or quantized by compressed-tensors, fbgemm_fp8, fp8, modelopt, mxfp4, mxfp8"
    )
    assert check_weights(str(folder)) == [expected]
    if isinstance(description, dict):  # transformers cannot read the config otherwise
        with pytest.raises(ConfigError) as error:
            build_on_meta(ModelConfig(path=str(folder)))
        assert str(error.value) == expected
