"""Which network interface NCCL and gloo use between nodes."""

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
    """Detect the first UP InfiniBand interface with an IP address (seed page 003, KempnerForge).

    InfiniBand interfaces come first, then Ethernet interfaces of RDMA devices (RoCE). The answer is this
    node's: others may differ, each node sets its own. None where there is none or `ip` cannot say; the log
    tells which.
    """
    command = shutil.which("ip")
    if command is None:
        logger.debug("no InfiniBand interface looked for: the command `ip` is not on PATH")
        return None
    try:
        shown = subprocess.run([command, "-br", "addr"], capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("no InfiniBand interface looked for: `ip -br addr` failed: %s", error)
        return None
    return first_rdma_interface(shown, {path.name for path in RDMA_DEVICES.glob("*/device/net/*")})


def first_rdma_interface(brief_addresses: str, rdma_names: Collection[str]) -> str | None:
    """Return the first interface in the output of `ip -br addr` that is up, has an address and reaches RDMA.

    Args:
        rdma_names: Interfaces of RDMA devices, whatever they are called.
    """
    up = []
    for line in brief_addresses.splitlines():
        name, state, *addresses = line.split() or ("", "")
        if state == "UP" and addresses:
            up.append(name.split("@")[0])  # ib0.8001@ib0: a child interface, listed with its parent
    infiniband = [name for name in up if name.startswith("ib")]
    return next(iter([*infiniband, *(name for name in up if name in rdma_names)]), None)


def _set_nccl_env() -> None:
    """Set NCCL and Gloo network environment variables (seed page 003, KempnerForge); what is set stays.

    Where an RDMA interface exists, both bind to it and NCCL may use RDMA and GPUDirect; elsewhere NCCL
    keeps its own choice. NCCL_SOCKET_IFNAME has a syntax of its own (^lo, =ib0, eth, a list), which gloo
    does not know: gloo takes it over only where it is the name of an interface of this node.
    """
    asked = os.environ.get("NCCL_SOCKET_IFNAME")
    detected = _detect_ib_interface()
    interface = asked or detected
    if interface:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        if interface in {name for _, name in socket.if_nameindex()}:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        elif "GLOO_SOCKET_IFNAME" not in os.environ:
            logger.info("NCCL_SOCKET_IFNAME=%s names no single interface: gloo chooses for itself", interface)
    if detected:
        os.environ.setdefault("NCCL_IB_DISABLE", "0")
        os.environ.setdefault("NCCL_NET_GDR_LEVEL", "2")
    if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0":
        logger.warning("TORCH_NCCL_ASYNC_ERROR_HANDLING=0: timeouts end nothing, a stuck collective hangs for ever")
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
