"""Device files of conf/local/gpu from measurements, `scripts/plan.py --measure`: the source of each value, and writing
without overwriting."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from components.launch.machine import RANK_BYTES, RANKS_PER_CORE, usable_cores, visible_gpus
from components.package import COMPONENTS, PROJECT
from components.planning.formulas.hardware import CPU_NAME, PROJECT_CONF, Hardware, read_hardware
from components.protocol.errors import ConfigError
from components.protocol.processes import usable_memory
from components.terminal import print_text
from scripts._doctor.check import run_command

FOLDER = (PROJECT_CONF if COMPONENTS.parent == PROJECT else Path("conf")) / "local" / "gpu"
"""conf/local/gpu of the checkout; of the current folder if Meshbook was installed from a wheel."""
SECONDS = 200.0
"""Time limit of the measuring process."""
MOST_RANKS = 8
"""Most processes that share a CPU while it is measured."""
NAME = re.compile(r"[a-z0-9][a-z0-9_]*")
GUESSES = {
    "matmul_tile": (128.0, "guess: tiles of 128 x 128"),
    "node_bandwidth": (20.0e9, "guess: PCIe between the GPUs"),
    "node_latency": (1.0e-5, "guess"),
    "node_share": (0.7, "guess"),
    "network_bandwidth": (12.5e9, "guess: a 100 Gbit/s adapter per GPU; one machine cannot measure it"),
    "network_latency": (1.5e-5, "guess; one machine cannot measure it"),
    "network_share": (0.75, "guess; one machine cannot measure it"),
    "host_memory_bandwidth": (40.0e9, "guess: the node's host memory / GPUs"),
}
"""Values for a GPU without a file in conf/gpu, and where they come from."""


class DeviceValue(NamedTuple):
    """Value of a key, and how it was measured or where else it comes from."""

    value: float | str | None
    source: str

    @property
    def text(self) -> str:
        """The value as YAML reads it as a number: with a dot and a signed exponent."""
        if self.value is None:
            return "null"
        if isinstance(self.value, float):
            mantissa, _, exponent = f"{self.value:.4g}".partition("e")
            if not exponent and not 0.001 <= self.value < 10_000:
                mantissa, _, exponent = f"{self.value:.3e}".partition("e")
            mantissa += "" if "." in mantissa else ".0"
            return f"{mantissa}e{int(exponent):+03d}" if exponent else mantissa
        return str(self.value)


class KnownDevice(NamedTuple):
    """File of conf/gpu for the measured device, with the comments of its values."""

    hardware: Hardware
    comments: dict[str, str]

    def value(self, key: str) -> DeviceValue:
        """Return a value of the file, which names it as the source."""
        value = getattr(self.hardware, key)
        source = f"not measured, copied from conf/gpu/{self.hardware.name}.yaml: {self.comments.get(key, '')}"
        return DeviceValue(str(value) if key == "node_links" else value, source)


def write_measured_device(name: str | None, *, force: bool = False, folder: Path = FOLDER) -> int:
    """Measure this machine's device, write its file and print it. Returns the exit status, 1 if measuring failed.

    Raises ConfigError for a name that is not allowed, or a file that exists unless `force` is set; before measuring.
    """
    gpus = visible_gpus(os.environ)
    name = name or default_name(_gpu_name() if gpus else "")
    file = check_file(name, folder, on_gpu=gpus > 0, force=force)
    ranks = gpus or min(max(usable_cores(), 2), MOST_RANKS)
    print_text(f"measuring {gpus} GPUs" if gpus else f"measuring the CPU with {ranks} processes", "...", flush=True)
    path = os.pathsep.join([str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])])
    script = str(Path(__file__).with_name("measure.py"))
    began = time.monotonic()
    ended = run_command(sys.executable, script, str(ranks), seconds=SECONDS, env={**os.environ, "PYTHONPATH": path})
    if ended.status != 0:
        print_text(f"the device cannot be measured: {ended.error_line}", file=sys.stderr)
        return 1
    figures = json.loads(last_line_of(ended.output))
    text = file_text(figures, find_known_device(figures))
    write_file(file, text, force=force)
    read_hardware(file)
    print_text(text, f"measured in {time.monotonic() - began:.0f} s: {file}", sep="\n")
    print_text(f"cluster.gpu={name} selects it, for scripts/plan.py and for runs")
    return 0


def last_line_of(output: str) -> str:
    """Return the last line in full; `last_line` shortens it."""
    return output.strip().splitlines()[-1]


def check_file(name: str, folder: Path, *, on_gpu: bool, force: bool) -> Path:
    """Return the path of a device file.

    Raises ConfigError if the name is not allowed, is that of the other kind of device, or the file exists.
    """
    if not NAME.fullmatch(name):
        raise ConfigError(f"--measure {name}: must consist of lower-case letters, digits and underscores")
    if name.startswith(CPU_NAME) == on_gpu:
        rule = f"must not begin with {CPU_NAME}" if on_gpu else f"must begin with {CPU_NAME}"
        raise ConfigError(
            f"--measure {name}: the measured device is a {'GPU' if on_gpu else 'CPU'}, so its name {rule}"
        )
    if (PROJECT_CONF / "gpu" / f"{name}.yaml").exists():
        raise ConfigError(f"--measure {name}: conf/gpu/{name}.yaml is a file of the project; choose another name")
    file = folder / f"{name}.yaml"
    if file.exists() and not force:
        raise ConfigError(f"--measure {name}: {file} exists; add --force to replace it, or choose another name")
    return file


def write_file(file: Path, text: str, *, force: bool) -> None:
    """Write a device file completely or not at all. Raises ConfigError if it exists and `force` is not set."""
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text)
        try:
            if force:
                unfinished.replace(file)
            else:
                os.link(unfinished, file)  # fails if a file was created during the measurement
        finally:
            unfinished.unlink(missing_ok=True)
    except FileExistsError as error:
        raise ConfigError(f"{file}: exists; add --force to replace it, or choose another name") from error
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from error


def default_name(gpu: str) -> str:
    """Return the name for a GPU as its driver calls it, such as `h100_measured`; for '', that of a CPU."""
    if not gpu:
        return f"{CPU_NAME}_measured"
    known = {file.stem.split("_")[0] for file in (PROJECT_CONF / "gpu").glob("*.yaml")}
    words = re.findall(r"[a-z0-9]+", gpu.lower())
    found = next((word for word in words if word in known), None)
    plain = "_".join(word for word in words if word not in ("nvidia", "geforce", "tesla"))
    return f"{found or plain or 'gpu'}_measured"


def find_known_device(figures: dict[str, Any]) -> KnownDevice | None:
    """Return the file of conf/gpu with the measured device's name and the nearest memory; None if there is none."""
    if figures["device"] == "cpu":
        return _read_known(PROJECT_CONF / "gpu" / f"{CPU_NAME}.yaml")
    words = re.findall(r"[a-z0-9]+", figures["name"].lower())
    known = [_read_known(file) for file in sorted((PROJECT_CONF / "gpu").glob("*.yaml"))]
    known = [each for each in known if each.hardware.name.split("_")[0] in words]
    return min(known, key=lambda each: abs(each.hardware.memory_bytes - figures["memory"]), default=None)


def _read_known(file: Path) -> KnownDevice:
    lines = (re.match(r"(\w+):.*?#\s*(.*)", line) for line in file.read_text().splitlines())
    return KnownDevice(read_hardware(file), {line[1]: line[2] for line in lines if line})


def file_text(figures: dict[str, Any], known: KnownDevice | None) -> str:
    """Return the YAML of a measured device, a comment behind each value."""
    values = gpu_values(figures, known) if figures["device"] == "cuda" else cpu_values(figures, known)
    what = figures["name"] if figures["device"] == "cuda" else f"CPU with {usable_cores()} cores"
    lines = [f"# {what}, measured by scripts/plan.py --measure on {time.strftime('%Y-%m-%d')}."]
    for field in fields(Hardware):
        if field.name != "name":
            value = values[field.name]
            lines.append(f"{field.name + ': ' + value.text:<33} # {value.source.strip().rstrip(':')}")
    return "\n".join(lines) + "\n"


def cpu_values(figures: dict[str, Any], known: KnownDevice | None) -> dict[str, DeviceValue]:
    """Return the values of a CPU: rates of one process while as many as cores run, peaks of one process alone."""
    ranks, cores = figures["ranks"], usable_cores()
    rate = {key[: -len("_shared")]: value for key, value in figures.items() if key.endswith("_shared")}
    share = _share(rate["fp32"], figures["fp32_alone"])
    peak = rate["fp32"] / share
    copied = _share(rate["copy"], figures["copy_alone"])
    bandwidth = rate["copy"] / copied
    gather, reduce = figures["gather_bandwidth"], figures["reduce_bandwidth"]
    fastest = max(gather, reduce)
    together = f"one of {ranks} processes that run at once, {figures['threads']} thread(s) each"
    memory = usable_memory() / ranks - RANK_BYTES
    the_host = "the device is the host: as memory_bandwidth"
    return {
        "memory_bytes": DeviceValue(memory, f"usable memory of the host / {ranks} processes, less that of torch"),
        "bf16_flops": DeviceValue(rate["bf16"] / share, f"measured: bfloat16 matmul, {together}, / matmul_share"),
        "fp8_flops": DeviceValue(None, "not supported"),
        "fp32_flops": DeviceValue(peak, "measured: fastest float32 matmul of one process alone"),
        "memory_bandwidth": DeviceValue(bandwidth, "measured: fastest large copy of one process alone, read + written"),
        "gpus_per_node": DeviceValue(RANKS_PER_CORE * cores, f"the most local ranks, {RANKS_PER_CORE} per core"),
        "node_bandwidth": DeviceValue(
            fastest, f"measured: faster of large all-gather, all-reduce; gloo, {ranks} ranks"
        ),
        "node_links": DeviceValue("switch", "shared memory of the machine"),
        "node_latency": DeviceValue(figures["latency"], f"measured: small DTensor collective, gloo, {ranks} ranks"),
        "host_bandwidth": DeviceValue(bandwidth, the_host),
        "host_memory_bandwidth": DeviceValue(bandwidth, the_host),
        "launch_seconds": DeviceValue(
            rate["operator"], f"measured: operator on tiny tensors, forward and backward, {together}"
        ),
        "matmul_share": DeviceValue(share, f"measured: float32 matmul, {together}, / fp32_flops"),
        "float8_share": DeviceValue(share, "unused: fp8_flops is null"),
        "attention_share": DeviceValue(_share(rate["attention"], peak), f"measured: causal, float32, {together}"),
        "copy_share": DeviceValue(copied, f"measured: large copy, {together}, / memory_bandwidth"),
        "node_share": DeviceValue(
            _share(2 / (1 / gather + 1 / reduce), fastest), "measured: mean of all-gather and all-reduce"
        ),
        **_not_measured(known, ("matmul_tile", "network_bandwidth", "network_latency", "network_share")),
    }


def gpu_values(figures: dict[str, Any], known: KnownDevice | None) -> dict[str, DeviceValue]:
    """Return the values of a GPU: shares of the peaks of its data sheet if conf/gpu has it, else of measured peaks."""
    rate = {key[: -len("_shared")]: value for key, value in figures.items() if key.endswith("_shared")}

    def peak(key: str, measured: float) -> DeviceValue:
        return known.value(key) if known else DeviceValue(measured, "measured, since conf/gpu has no file of this GPU")

    bf16, memory = peak("bf16_flops", rate["bf16"]), peak("memory_bandwidth", rate["copy"])
    share = _share(rate["bf16"], _number(bf16))
    values = {
        "memory_bytes": DeviceValue(float(figures["memory"]), "as CUDA reports it"),
        "bf16_flops": bf16,
        "fp8_flops": DeviceValue(None, "not supported"),
        "fp32_flops": DeviceValue(rate["fp32"] / share, "measured: float32 matmul without TF32, / matmul_share"),
        "memory_bandwidth": memory,
        "gpus_per_node": DeviceValue(figures["ranks"], "visible GPUs"),
        "node_links": known.value("node_links") if known else DeviceValue("switch", "guess"),
        "host_bandwidth": DeviceValue(rate["host_copy"], "measured: pinned host memory to the GPU, all GPUs at once"),
        "launch_seconds": DeviceValue(rate["operator"], "measured: host time of an operator, forward and backward"),
        "matmul_share": DeviceValue(share, "measured: large bfloat16 matmul / bf16_flops"),
        "float8_share": DeviceValue(share, "unused: fp8_flops is null"),
        "attention_share": DeviceValue(
            _share(rate["attention"], _number(bf16)), "measured: torch's causal attention, head dim 128, / bf16_flops"
        ),
        "copy_share": DeviceValue(_share(rate["copy"], _number(memory)), "measured: large copy / memory_bandwidth"),
        **_not_measured(known, tuple(GUESSES)),
    }
    if "fp8" in rate:
        values["fp8_flops"] = peak("fp8_flops", rate["fp8"])
        if values["fp8_flops"].value is not None:
            measured = _share(rate["fp8"], _number(values["fp8_flops"]))
            values["float8_share"] = DeviceValue(
                measured, "measured: large float8 matmul, one scale per tensor, / fp8_flops"
            )
    if "latency" in figures:
        gather, reduce = figures["gather_bandwidth"], figures["reduce_bandwidth"]
        mean = 2 / (1 / gather + 1 / reduce)
        values["node_bandwidth"] = peak("node_bandwidth", max(gather, reduce))
        values["node_share"] = DeviceValue(
            _share(mean, _number(values["node_bandwidth"])), "measured: mean of large all-gather and all-reduce"
        )
        values["node_latency"] = DeviceValue(figures["latency"], "measured: small all-gather, per doubling of the GPUs")
    return values


def _not_measured(known: KnownDevice | None, keys: Iterable[str]) -> dict[str, DeviceValue]:
    return {key: known.value(key) if known else DeviceValue(*GUESSES[key]) for key in keys}


def _share(measured: float, peak: float) -> float:
    """Return measured / peak, at most 1: a peak that was measured too can be the slower one."""
    return min(1.0, measured / peak)


def _number(value: DeviceValue) -> float:
    return float(str(value.value))


def _gpu_name() -> str:
    """Return the name of the first GPU, or `gpu` if the driver's tool does not report it."""
    named = run_command("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return named.output.strip().splitlines()[0] if named.status == 0 and named.output.strip() else "gpu"
