"""Speed of a GPU, its node and its network, read from a file of conf/gpu."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from components.project import PROJECT
from components.protocol.errors import ConfigError
from components.protocol.safe_json import read_regular
from components.protocol.safe_yaml import load_yaml

PROJECT_CONF = PROJECT / "conf"
CPU_NAME = "cpu"
"""Devices whose name begins with this are CPUs."""


class NodeLinks(StrEnum):
    """Links between the GPUs of a node. switch: any GPU reaches any other at full bandwidth; direct: each pair of GPUs
    has its own share of the links, so that a group of n of the G GPUs uses (n - 1) / (G - 1) of them."""

    switch = "switch"
    direct = "direct"


@dataclass(frozen=True, slots=True)
class Hardware:
    """Peak figures from data sheets, and the shares of them that programs reach. One matmul, one copy and one
    collective per mesh axis suffice to measure the shares. Read it with `read_hardware`."""

    name: str
    """Name of the file, without .yaml."""
    memory_bytes: float
    """Memory of a GPU that programs can allocate."""
    bf16_flops: float
    """Dense bfloat16 peak in FLOP/s, without sparsity."""
    fp8_flops: float | None
    """Dense 8-bit floating-point peak in FLOP/s; None: not supported."""
    fp32_flops: float
    """float32 peak in FLOP/s, without TF32."""
    memory_bandwidth: float
    """Bytes/s."""
    gpus_per_node: int
    node_bandwidth: float
    """Bytes/s that a GPU can send to the others of its node, all links together."""
    node_links: NodeLinks
    network_bandwidth: float
    """Bytes/s that a GPU can send to other nodes: those of the node's network adapters / GPUs."""
    node_latency: float
    """Seconds of a collective within a node, per doubling of the ranks."""
    network_latency: float
    """Seconds of a collective across nodes, per doubling of the nodes."""
    host_bandwidth: float
    """Bytes/s of copies between a GPU and pinned host memory, one direction."""
    host_memory_bandwidth: float
    """Bytes/s of the node's host memory / GPUs."""
    launch_seconds: float
    """Seconds that the host needs to launch one kernel."""
    matmul_share: float
    """Share of the peak that a large bfloat16 matmul reaches."""
    matmul_tile: float
    """Dim of the tiles of matmul kernels: matmuls with dims that are not much larger are slower."""
    float8_share: float
    """Share of fp8_flops that a large float8 matmul reaches."""
    attention_share: float
    """Share of bf16_flops that torch's flash attention reaches, forward and backward together."""
    copy_share: float
    """Share of memory_bandwidth that a large copy reaches (bytes read + bytes written)."""
    node_share: float
    """Share of node_bandwidth that large collectives reach."""
    network_share: float
    """Share of network_bandwidth that large collectives reach."""

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU, and not a CPU."""
        return not self.name.startswith(CPU_NAME)

    @property
    def gpu_memory(self) -> float | None:
        """Bytes of memory of a GPU; None for a CPU."""
        return self.memory_bytes if self.is_gpu else None

    @property
    def device_type(self) -> str:
        """`cuda` or `cpu`."""
        return "cuda" if self.is_gpu else "cpu"

    @property
    def copy_bandwidth(self) -> float:
        """Bytes/s that elementwise operations reach."""
        return self.memory_bandwidth * self.copy_share

    def matmul_flops(self, item_bytes: int) -> float:
        """Return the FLOP/s of a large matmul of operands with `item_bytes` per element: 1 (float8), 2, 4 or 8."""
        if item_bytes == 1:
            return self.bf16_flops * self.matmul_share if self.fp8_flops is None else self.fp8_flops * self.float8_share
        return self.peak_flops(item_bytes) * self.matmul_share

    def peak_flops(self, item_bytes: int) -> float:
        """Return the peak FLOP/s of operands with 2, 4 or 8 bytes per element."""
        return self.bf16_flops if item_bytes == 2 else self.fp32_flops * 4 / item_bytes


_SHARES = tuple(each.name for each in fields(Hardware) if each.name.endswith("_share"))


def read_hardware(path: Path) -> Hardware:
    """Read a file of conf/gpu.

    Raises ConfigError, with all problems of the file, if it cannot be read, has unknown or missing keys, or values out
    of range.
    """
    values = _read_mapping(path)
    names = [each.name for each in fields(Hardware) if each.name != "name"]
    problems = [f"{path}: unknown key {key}; the keys are {', '.join(names)}" for key in values if key not in names]
    problems += [f"{path}: {name} is missing; add it" for name in names if name not in values]
    problems += [f"{path}: {problem}" for name in names if name in values for problem in _problem(name, values[name])]
    if problems:
        raise ConfigError(problems)
    values |= {"node_links": NodeLinks(values["node_links"]), "gpus_per_node": int(values["gpus_per_node"])}
    return Hardware(name=path.stem, **values)


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        values = load_yaml(read_regular(path).decode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; name an existing file of conf/gpu") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold keys and values, as the files of conf/gpu do")
    return {str(key): value for key, value in values.items()}


def _problem(name: str, value: Any) -> list[str]:
    """Return the rule that a value violates, as a list of at most one problem."""
    if name == "node_links":
        return [] if value in list(NodeLinks) else [f"{name}={value}: must be {' or '.join(NodeLinks)}"]
    if name == "fp8_flops" and value is None:
        return []
    if not isinstance(value, int | float) or isinstance(value, bool):
        return [f"{name}={value}: must be a number"]
    if not (value > 0 and math.isfinite(value)):
        return [f"{name}={value}: must be greater than 0 and finite"]
    if name == "gpus_per_node" and value != int(value):
        return [f"{name}={value}: must be a whole number"]
    if name in _SHARES and value > 1:
        return [f"{name}={value}: is a share and must be at most 1"]
    return []


def device_files(name: str, folders: Iterable[Path] = ()) -> list[Path]:
    """Return the files of a device in search order: ./conf/local/gpu, ./conf/gpu, `folders`, and those of the project.

    Files with the same content as the first are left out.
    """
    files = [file for folder in _folders(folders) if (file := folder / f"{name}.yaml").is_file()]
    return files[:1] + [file for file in files[1:] if file.read_bytes() != files[0].read_bytes()]


def _folders(more: Iterable[Path]) -> list[Path]:
    conf = Path.cwd() / "conf"
    own = [conf / "local" / "gpu", conf / "gpu", *more, PROJECT_CONF / "local" / "gpu", PROJECT_CONF / "gpu"]
    return list(dict.fromkeys(own))


def find_hardware(name: str, folders: Iterable[Path] = ()) -> Hardware:
    """Return the device of that name, from the first of `device_files`.

    Raises ConfigError, with the names of all devices, if there is none.
    """
    if files := device_files(name, folders):
        return read_hardware(files[0])
    searched = _folders(folders)
    names = sorted({file.stem for folder in searched for file in folder.glob("*.yaml")})
    raise ConfigError(
        f"cluster.gpu={name}: no such device; choose {', '.join(names)}, or add conf/local/gpu/{name}.yaml"
    )
