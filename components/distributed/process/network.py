"""Network interfaces and settings of NCCL and gloo between nodes."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
from collections.abc import Collection
from pathlib import Path

logger = logging.getLogger(__name__)

RDMA_DEVICES = Path("/sys/class/infiniband")


def _detect_ib_interface() -> str | None:
    """Detect the first UP InfiniBand interface with an IP address (KempnerForge, distributed/setup.py).

    InfiniBand interfaces come first, then Ethernet interfaces of RDMA devices (RoCE). The result is this node's; other
    nodes may differ, and each sets its own. None, with a log record, if there is none or `ip` fails.
    """
    command = shutil.which("ip")
    if command is None:
        logger.debug("InfiniBand detection skipped: the command `ip` is not on PATH")
        return None
    try:
        output = subprocess.run([command, "-br", "addr"], capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("InfiniBand detection skipped: `ip -br addr` failed: %s", error)
        return None
    return first_rdma_interface(output, {path.name for path in RDMA_DEVICES.glob("*/device/net/*")})


def first_rdma_interface(brief_addresses: str, rdma_names: Collection[str]) -> str | None:
    """Return the first RDMA interface in the output of `ip -br addr` that is up and has an address.

    Args:
        rdma_names: Names of the interfaces of RDMA devices, which need not begin with `ib`.
    """
    up = []
    for line in brief_addresses.splitlines():
        name, state, *addresses = line.split() or ("", "")
        if state == "UP" and addresses:
            up.append(name.split("@")[0])  # a child interface is listed with its parent: ib0.8001@ib0
    infiniband = [name for name in up if name.startswith("ib")]
    return next(iter([*infiniband, *(name for name in up if name in rdma_names)]), None)


def _set_nccl_env() -> None:
    """Set NCCL's and gloo's network variables that are unset (KempnerForge, distributed/setup.py).

    If there is an RDMA interface, both bind to it and NCCL may use RDMA and GPUDirect; otherwise NCCL chooses.
    NCCL_SOCKET_IFNAME allows patterns (^lo, =ib0, eth, a list) that gloo does not support, so gloo gets its value only
    if it is the name of an interface of this node.
    """
    configured = os.environ.get("NCCL_SOCKET_IFNAME")
    detected = _detect_ib_interface()
    interface = configured or detected
    if interface:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        if interface in {name for _, name in socket.if_nameindex()}:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        elif "GLOO_SOCKET_IFNAME" not in os.environ:
            logger.info("NCCL_SOCKET_IFNAME=%s is not the name of one interface; gloo chooses its interface", interface)
    if detected:
        os.environ.setdefault("NCCL_IB_DISABLE", "0")
        os.environ.setdefault("NCCL_NET_GDR_LEVEL", "2")
    if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0":
        logger.warning(
            "TORCH_NCCL_ASYNC_ERROR_HANDLING=0 disables NCCL's timeouts: a stuck collective hangs forever; unset it"
        )
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
