"""Speed of a GPU, its node and its network, read from a file of conf/gpu, and the time of computation on it.

Computation is that of a decoder layer and of the LM head: matmuls, attention and memory-bound operations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from components.config.schema.model import Float8, LossMethod, Qat
from components.config.schema.parallelism import ActivationCheckpointing, ContextAttention
from components.config.shape import local_heads, ulysses_divides
from components.package import PROJECT
from components.planning.formulas.architecture import LinearHeads, Sharding
from components.planning.formulas.families import LayerKind, LinearKind
from components.planning.formulas.layer_memory import recurrence_bytes
from components.planning.formulas.workload import MESHBOOK, Implementation, Workload
from components.protocol.errors import ConfigError
from components.protocol.safe_parsing import load_yaml, read_regular

PROJECT_CONF = PROJECT / "conf"
CPU_NAME = "cpu"
"""Devices whose name begins with this are CPUs."""
ATTENTION_BACKWARD = 2.5
"""FLOPs of flash attention's backward relative to its forward: five matmuls instead of two (Dao 2023)."""
_EAGER_ROTARY = {False: 5.0, True: 1.9}
"""fused -> bytes that the rotary embedding moves without a compiler, relative to one kernel: two products, a negation,
a concatenation and a sum, or a product and two sums in place."""
_EAGER_MLP = {False: 1.8, True: 1.0}
"""fused -> bytes that the activation moves without a compiler, relative to one kernel each way. For norms and
residuals: Implementation.eager_hidden."""
_FUSED_HIDDEN = 6.0
"""The same with fused norms. By the sizes of all tensors it would be 1.3; torchtitan's layers with fused norms took as
long as 6 (row 1 of scripts/benchmark/published_points.csv)."""
_GROUPED_MATMUL = 0.8
"""Speed of the experts' grouped matmuls relative to one matmul with as many tokens: unequal groups. Estimate."""
_FLOAT8_CAST_BYTES = 8
"""Bytes moved to cast an element of a linear layer's input or output gradient: maximum, cast and transposed cast."""
_DEQUANTIZE_BYTES = {True: 3, False: 22}
"""in one kernel -> bytes moved to unpack an NF4 value: packed value and scale read, bfloat16 written; else the index
and the table lookup are tensors of their own."""
_FAKE_QUANTIZE_BYTES = {True: 10, False: 80}
"""compiled -> bytes moved to fake-quantize a weight: read twice and written, in float32; else counted from torchao's
operators (92 with those of the matmul)."""
_LOGIT_BYTES = {LossMethod.logits: 30, LossMethod.chunked: 40, LossMethod.liger: 8}
"""Bytes moved per logit in forward and backward: logits written in bfloat16, cast to float32, log-softmax and its
gradient in float32, cast back. Chunks also update the weight's gradient; Liger's kernel overwrites the logits."""
_UNSKIPPED_ATTENTION = 2.0
"""Slowdown of attention with an explicit mask (cp_attention=all_gather on a CPU or in float32): masked blocks are
computed, not skipped."""


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


_SHARES = tuple(field.name for field in fields(Hardware) if field.name.endswith("_share"))


def read_hardware(path: Path) -> Hardware:
    """Read a file of conf/gpu.

    Raises ConfigError, with all problems of the file, if it cannot be read, has unknown or missing keys, or values out
    of range.
    """
    values = _read_mapping(path)
    names = [field.name for field in fields(Hardware) if field.name != "name"]
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


class LayerWork(NamedTuple):
    """Seconds of one kind of operation in one decoder layer, for one micro-batch of a rank."""

    name: str
    forward: float
    backward: float
    """Without recomputation."""
    recomputed: float
    """Recomputed part of the forward."""
    detail: str
    """Formula of the forward's time."""
    source: str
    weights: float = 0.0
    """Part of the backward that computes weight gradients."""


@dataclass(frozen=True, slots=True)
class Matmul:
    """Matmul (tokens, inner) x (inner, outputs), `count` times."""

    tokens: float
    inner: int
    outputs: int
    count: int = 1
    is_expert: bool = False
    is_row_parallel: bool = False
    """Whether tp shards its inner dim, so that its input is not gathered."""
    is_last: bool = False
    """Whether it is the layer's last: the backward does not need its output."""

    @property
    def flops(self) -> float:
        """FLOPs of one pass."""
        return 2.0 * self.tokens * self.inner * self.outputs * self.count

    def slowdown(self, tile: float) -> float:
        """Return the time relative to that of a large matmul with the same FLOPs.

        A kernel computes the product in tiles of `tile` x `tile`, each over all of the inner dim. Tiles at the border
        are partly empty, and filling and draining a tile's pipeline takes as long as `tile` more of the inner dim.
        """
        return (1 + tile / self.tokens) * (1 + tile / self.inner) * (1 + tile / self.outputs)


def _layer_matmuls(workload: Workload, kind: LayerKind, implementation: Implementation) -> Iterator[Matmul]:
    """Yield the matmuls of a decoder layer, for a micro-batch of a rank."""
    architecture, mesh = workload.architecture, workload.mesh
    tokens = workload.local_tokens
    for weight in architecture.layer_weights(kind, mesh.tp, mesh.ep):
        if not weight.is_matrix:
            continue
        last = weight.name.endswith(" down")
        if weight.sharding is not Sharding.experts:
            row_parallel = weight.sharding is Sharding.columns
            rows = round(weight.rows * weight.used)
            yield Matmul(tokens, weight.width, rows, is_row_parallel=row_parallel, is_last=last)
            continue
        imbalance = implementation.expert_imbalance if mesh.ep > 1 else 1.0  # without ep each rank has all experts
        routed = tokens * architecture.experts_per_token * imbalance / weight.rows
        inner = weight.width // architecture.hidden if last else architecture.hidden
        yield Matmul(routed, inner, weight.width // inner, weight.rows, is_expert=True)


def _matmul_works(
    workload: Workload, kind: LayerKind, hardware: Hardware, implementation: Implementation
) -> Iterator[LayerWork]:
    """Yield the matmuls of the dense matrices and of the experts, the casts of float8 and those of 4-bit weights."""
    policy = workload.parallelism.activation_checkpointing
    passes = 1.0 if workload.peft.adapts else 2.0  # frozen weights get no gradient
    dense_bytes = workload.compute_bytes if workload.float8 is Float8.none else 1
    matmuls = tuple(_layer_matmuls(workload, kind, implementation))
    # Nothing in the backward reads the output of a layer's last matmul. Eager recomputation stops before it.
    skips_last = not workload.compiled or implementation.compiles_recomputation
    for is_expert, name in ((False, "matmuls"), (True, "expert matmuls")):
        group = [matmul for matmul in matmuls if matmul.is_expert is is_expert]
        if not group:
            continue
        item_bytes = workload.compute_bytes if is_expert else dense_bytes
        rate = hardware.matmul_flops(item_bytes) * (_GROUPED_MATMUL if is_expert else 1.0)
        flops = sum(each.flops for each in group)
        tile = hardware.matmul_tile
        forward = sum(each.flops * each.slowdown(tile) for each in group) / rate
        again = sum(each.flops * each.slowdown(tile) for each in group if not (each.is_last and skips_last)) / rate
        yield LayerWork(
            name,
            forward,
            passes * forward,
            recomputed_share(policy, implementation.selective_matmuls) * again,
            f"{flops:.4g} FLOP x {forward * rate / flops:.3f} (tiles) / {rate:.3g} FLOP/s",
            f"{hardware.name}: {'float8' if item_bytes == 1 else 'matmul'}_share",
            (passes - 1) * forward,
        )
    if workload.float8 is not Float8.none:
        shards = workload.mesh.tp if implementation.float8_gathers else 1
        dense = [matmul for matmul in matmuls if not matmul.is_expert]
        values = sum(
            each.tokens * (each.inner / (1 if each.is_row_parallel else shards) + each.outputs) for each in dense
        )
        yield _traffic("float8 casts", values * _FLOAT8_CAST_BYTES / 3, 2.0, 1.0, workload, hardware)
    if workload.peft.quantizes:
        values = sum(matmul.inner * matmul.outputs * matmul.count for matmul in matmuls if not matmul.is_expert)
        moved = values * _DEQUANTIZE_BYTES[workload.compiled or hardware.is_gpu]
        yield _traffic("dequantization", moved, 1.0, 1.0, workload, hardware)
    if workload.qat is not Qat.none:
        values = sum(matmul.inner * matmul.outputs * matmul.count for matmul in matmuls if not matmul.is_expert)
        moved = values * _FAKE_QUANTIZE_BYTES[workload.compiled]
        yield _traffic("fake quantization", moved, 1.0, 0.2, workload, hardware)


def _attention_work(
    workload: Workload, kind: LayerKind, hardware: Hardware, implementation: Implementation
) -> LayerWork:
    """Return the attention of a layer."""
    architecture, mesh, policy = workload.architecture, workload.mesh, workload.parallelism.activation_checkpointing
    heads, _ = local_heads(*architecture.heads_of(kind)[:2], mesh.tp)
    pairs = architecture.attended_pairs(workload.seq_len, windowed=kind.is_windowed) * workload.micro_batch / mesh.cp
    width = sum(architecture.score_widths(kind))
    flops = 2.0 * heads * width * pairs
    share = hardware.attention_share * implementation.attention_speed
    rate = hardware.peak_flops(workload.compute_bytes) * share
    backward, note = ATTENTION_BACKWARD, ""
    if mesh.cp > 1 and implementation.ring_attention:
        rate, note = rate * implementation.ring_attention, f" x {implementation.ring_attention} (ring)"
    elif mesh.cp > 1 and not uses_ulysses(workload, kind) and not (hardware.is_gpu and workload.compute_bytes == 2):
        # Without torch's variable-length kernel, all_gather uses masks and recomputes its attention in the backward,
        # some heads at a time, whatever the policy of the layer.
        rate, note = rate / _UNSKIPPED_ATTENTION, f" / {_UNSKIPPED_ATTENTION:g} (masked blocks)"
        backward += 1.0
    forward = flops / rate
    return LayerWork(
        "attention",
        forward,
        backward * forward,
        recomputed_share(policy, 0.0) * forward,
        f"2 x {heads} heads x {width} x {pairs:.4g} pairs / ({share:.3g} x peak{note})",
        f"{hardware.name}: attention_share",
    )


def _linear_work(workload: Workload, heads: LinearHeads, hardware: Hardware) -> LayerWork:
    """Return the recurrence of linear attention or Mamba-2, in chunks of tokens.

    Not compared with published times: matmuls as fast as those of attention, and without kernels, what is saved for the
    backward written and read once.
    """
    local, chunk = heads.local(workload.mesh.tp), heads.chunk
    keys, values = local.key_width, local.value_width
    if workload.architecture.family.linear is LinearKind.mamba2:
        per_token = local.values * (2.0 * chunk * (keys + values) + 4 * keys * values)
    else:
        per_token = local.values * (5.0 * chunk * keys + 3 * chunk * values + 6 * keys * values)
    flops, rate = workload.local_tokens * per_token, hardware.attention_share * hardware.peak_flops(4)
    rate = hardware.attention_share * hardware.peak_flops(workload.compute_bytes) if workload.kernels else rate
    moved = 0.0 if workload.kernels else 2 * workload.local_tokens * recurrence_bytes(workload, local)[0]
    forward = flops / rate + moved / hardware.copy_bandwidth
    return LayerWork(
        "linear attention and Mamba-2",
        forward,
        2 * forward,
        recomputed_share(workload.parallelism.activation_checkpointing, 1.0) * forward,
        f"{flops:.4g} FLOP / {rate:.3g} FLOP/s + {moved:.4g} B / {hardware.copy_bandwidth:.3g} B/s",
        f"{hardware.name}: attention_share, copy_share",
    )


def uses_ulysses(workload: Workload, kind: LayerKind) -> bool:
    """Return whether attention over cp exchanges heads (ulysses) instead of gathering keys and values."""
    chosen = workload.parallelism.cp_attention
    if chosen is not ContextAttention.auto:
        return chosen is ContextAttention.ulysses
    architecture, mesh = workload.architecture, workload.mesh
    return ulysses_divides(*local_heads(*architecture.heads_of(kind)[:2], mesh.tp), mesh.cp)


def _elementwise_works(
    workload: Workload, kind: LayerKind, hardware: Hardware, implementation: Implementation
) -> Iterator[LayerWork]:
    """Yield the memory-bound operations of a layer: norms, residuals, rotary embedding, activation; adapters."""
    architecture, mesh = workload.architecture, workload.mesh
    all_heads, all_kv_heads, width = architecture.heads_of(kind)
    heads, kv_heads = local_heads(all_heads, all_kv_heads, mesh.tp)
    hidden = architecture.hidden * architecture.norms_of(kind) / 2 / workload.sequence_shards
    rotated = (heads + kv_heads) * width * kind.attends
    experts = architecture.experts_per_token if kind.has_experts else 0
    mlp = (architecture.mlp * kind.has_mlp + architecture.expert_mlp * experts) / mesh.tp
    mlp += architecture.shared_mlp * kind.has_experts / mesh.tp
    routed = experts * architecture.hidden / mesh.tp
    # Forward: two norms read and write, two residuals read twice and write: 9; rotary embedding 2; gate, up -> act 3.
    eager = (1.0, 1.0, 1.0)
    if not workload.compiled:
        norms = min(implementation.eager_hidden, _FUSED_HIDDEN) if workload.fused else implementation.eager_hidden
        mlp_fused = workload.fused and not kind.has_experts
        eager = (norms, _EAGER_ROTARY[workload.fused], _EAGER_MLP[mlp_fused])
    values = 9 * hidden * eager[0] + 2 * rotated * eager[1] + 3 * mlp * eager[2] + 4 * routed
    if kind.is_linear and architecture.linear is not None:  # the convolution and its SiLU; the gated norm
        local = architecture.linear.local(mesh.tp)
        values += 4 * local.convolved + 4 * local.values * local.value_width
    traffic = workload.local_tokens * values * workload.compute_bytes
    yield _traffic("elementwise", traffic, 5 / 3, 1.0, workload, hardware)
    if workload.peft.adapts:
        widths = sum(matmul.inner + matmul.outputs for matmul in _layer_matmuls(workload, kind, MESHBOOK))
        passes, backward = implementation.adapter_passes
        traffic = workload.local_tokens * passes * widths * workload.compute_bytes
        yield _traffic("adapters", traffic, backward / passes, 1.0, workload, hardware)


def head_work(workload: Workload, hardware: Hardware, implementation: Implementation) -> LayerWork:
    """Return the LM head and loss of the last stage, for a micro-batch."""
    architecture = workload.architecture
    outputs = workload.labels or -(-architecture.vocab // (workload.mesh.tp if implementation.shards_head else 1))
    matmul = Matmul(workload.local_tokens, architecture.hidden, outputs)
    rate = hardware.matmul_flops(workload.compute_bytes)
    product = matmul.flops * matmul.slowdown(hardware.matmul_tile) / rate
    weights = product * workload.peft.trains_ends
    method = LossMethod.chunked if workload.loss is LossMethod.auto else workload.loss
    losses = architecture.vocab if implementation.gathers_logits else outputs
    traffic = workload.local_tokens * losses * _LOGIT_BYTES[method] * workload.compute_bytes / 2
    copies = traffic / hardware.copy_bandwidth
    return LayerWork(
        "LM head and loss",
        product + copies / 3,
        product + weights + copies * 2 / 3,
        0.0,
        f"{matmul.flops:.4g} FLOP / {rate:.3g} FLOP/s + {traffic / 3:.4g} B / {hardware.copy_bandwidth:.3g} B/s",
        f"{hardware.name}: matmul_share, copy_share",
        weights,
    )


def layer_works(
    workload: Workload, kind: LayerKind, hardware: Hardware, implementation: Implementation
) -> list[LayerWork]:
    """Return all computation of a decoder layer, for a micro-batch of a rank."""
    works = [*_matmul_works(workload, kind, hardware, implementation)]
    if kind.attends:
        works.append(_attention_work(workload, kind, hardware, implementation))
    if kind.is_linear and workload.architecture.linear is not None:
        works.append(_linear_work(workload, workload.architecture.linear, hardware))
    return [*works, *_elementwise_works(workload, kind, hardware, implementation)]


def _traffic(
    name: str, traffic: float, backward: float, recomputed: float, workload: Workload, hardware: Hardware
) -> LayerWork:
    """Return an operation that moves `traffic` bytes in the forward and `backward` times as many in the backward."""
    forward = traffic / hardware.copy_bandwidth
    policy = workload.parallelism.activation_checkpointing
    again = recomputed_share(policy, recomputed) * forward
    detail = f"{traffic:.4g} B / {hardware.copy_bandwidth:.3g} B/s"
    return LayerWork(name, forward, backward * forward, again, detail, f"{hardware.name}: copy_share")


def recomputed_share(policy: ActivationCheckpointing, selective: float) -> float:
    """Return the share of the forward that a policy recomputes; auto counts as none until it is resolved."""
    if policy is ActivationCheckpointing.full:
        return 1.0
    if policy is ActivationCheckpointing.alternate:
        return 0.5
    return selective if policy is ActivationCheckpointing.selective else 0.0
