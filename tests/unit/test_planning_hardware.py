"""Files of conf/gpu: all of them load, and mistakes in one are reported with the file, the key and the rule."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.planning.formulas.hardware import Hardware, NodeLinks, read_hardware
from components.protocol.errors import ConfigError

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
        (None, "cannot be read"),
        ("- 1\n", "must hold keys and values"),
        ("a: [", "is not valid YAML"),
        ("", "must hold"),
    ],
)
def test_a_file_that_is_no_mapping_is_a_config_error(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "mine.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_hardware(file)
