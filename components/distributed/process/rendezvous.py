"""Rendezvous of the ranks: the address of rank 0, and authenticated access to the TCPStore that it serves.

A TCPStore has no authentication: any client that reaches its port can list, read, change and delete every key. The
store therefore listens only on the loopback interface of rank 0's node. Rank 0 also runs a gateway on an address that
other nodes can reach. The gateway forwards a connection to the store only after a mutual handshake (HMAC-SHA256 with
fresh nonces) with a secret that rank 0 writes to a file which only the user can read. Every other rank runs a proxy on
a loopback port, which accepts connections of its own process only and forwards them to the gateway. torch's client
connects to this port as if it were the store. Gateway and proxy each run an event loop in a daemon thread.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import hmac
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import torch.distributed as dist

from components.distributed.process.environment import (
    RankEnvironmentError,
    RankVariables,
    Source,
    read_integer,
    require_integer,
)
from components.distributed.process.store_sync import MissingRanks, StoreSync
from components.protocol.processes import STORE_FD, STORE_FILE, node_name
from components.protocol.run_files import PRIVATE, atomic_write_json
from components.protocol.safe_parsing import parse_json

_FIRST_PORT, _PORTS = 10000, 20000  # below Linux's range of ephemeral ports
LOOPBACK = "127.0.0.1"
_HANDSHAKE_SECONDS = 10.0
"""Timeout of the handshake of one connection."""
_NONCE, _PROOF, _CHUNK = 32, 32, 2**16
Reader: TypeAlias = asyncio.StreamReader
Writer: TypeAlias = asyncio.StreamWriter


class RendezvousError(RuntimeError):
    """Failure of the ranks to reach the store in time; the message names the missing ranks and the address."""


def _master_address(variables: RankVariables, environ: Mapping[str, str]) -> tuple[str, int]:
    """Return host and port of rank 0's store, the same on every rank.

    MASTER_ADDR and MASTER_PORT if they are set. Otherwise, in a Slurm step, the first node of the step and a port
    derived from the ids of the job and the step.

    Raises:
        RankEnvironmentError: Neither source has an address, or Slurm's node list cannot be expanded.
    """
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    in_step = variables.source is Source.srun
    missing = [name for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", port)) if not value]
    if missing and not in_step:
        raise RankEnvironmentError(
            f"{' and '.join(missing)} not set: the {variables.world_size} ranks need the address of rank 0; "
            "start with torchrun, or set both to the same values on all ranks"
        )
    host = host or _first_host_of_step(environ)
    number = require_integer(environ, "MASTER_PORT", f"MASTER_ADDR={host}") if port else _port_of_step(environ)
    if not 0 < number < 2**16:
        raise RankEnvironmentError(f"MASTER_PORT={number}: must lie between 1 and 65535")
    return host, number


def rendezvous_host(variables: RankVariables) -> str:
    """Return the host of the rendezvous: a loopback address if all ranks run on this machine, else another name."""
    if not _uses_store_file():
        return _master_address(variables, os.environ)[0]
    return LOOPBACK if _is_one_node() else os.environ.get("MASTER_ADDR", "")


def is_loopback(host: str) -> bool:
    """Return whether `host` is the loopback interface."""
    return host in ("localhost", "::1") or host.startswith("127.")


def open_store(variables: RankVariables, timeout: timedelta) -> dist.Store:
    """Return the store of all ranks under a key prefix of this attempt, without waiting for the other ranks.

    Raises:
        RankEnvironmentError: The address of rank 0 is not set.
        RendezvousError: The store cannot be served or reached within `timeout`.
    """
    if _uses_store_file():
        return _with_attempt_prefix(_open_store_by_file(variables, timeout), timeout)
    host, port = _master_address(variables, os.environ)
    try:
        store = _open_store_at(host, port, variables.rank, variables.world_size, timeout)
    except (dist.DistError, RuntimeError) as error:
        act = "serve" if variables.rank == 0 and not agent_serves_store() else "reach"
        raise RendezvousError(
            f"rank {variables.rank} of {variables.world_size} could not {act} the store at {host}:{port} "
            f"within {timeout.total_seconds():g} s: MASTER_ADDR and MASTER_PORT must name a free port on the "
            f"host of rank 0, the same on all ranks ({error})"
        ) from error
    return _with_attempt_prefix(store, timeout)


def _with_attempt_prefix(store: dist.Store, timeout: timedelta) -> dist.Store:
    store.set_timeout(timeout)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"meshbook/{attempt}", store)


def gather_at_start(variables: RankVariables, store: dist.Store, value: str, timeout: timedelta) -> list[str]:
    """Wait until every rank has reached the store, and return the value of each one, in rank order.

    Raises:
        RendezvousError: Some ranks did not arrive within `timeout`; the message lists them.
    """
    sync = StoreSync.enter(store, "start", variables.rank, variables.world_size)
    try:
        return sync.gather(value, timeout)
    except MissingRanks as error:
        raise RendezvousError(
            f"starting {variables.world_size} ranks: {error}; look for their first error, "
            "and check that MASTER_ADDR and MASTER_PORT are the same on all ranks"
        ) from error


@functools.cache
def _open_stores() -> dict[tuple[str, int], dist.Store]:
    """Return the stores that this process serves or has joined; rank 0 must serve its store until it exits."""
    return {}


def _uses_store_file() -> bool:
    return bool(os.environ.get(STORE_FILE))


def _is_one_node() -> bool:
    """Return whether all ranks are on this node, as torchrun's agent or Slurm says."""
    by_slurm = os.environ.get("SLURM_NNODES", os.environ.get("SLURM_JOB_NUM_NODES"))
    return "1" in (os.environ.get("GROUP_WORLD_SIZE"), by_slurm)


def _open_store_by_file(variables: RankVariables, timeout: timedelta) -> dist.Store:
    """Return the store that rank 0 serves on its loopback interface behind a gateway."""
    file, rank, world_size = Path(os.environ[STORE_FILE]), variables.rank, variables.world_size
    key = (str(file), 0)
    if key in _open_stores():
        return _open_stores()[key]
    connect = functools.partial(dist.TCPStore, LOOPBACK, world_size=world_size, timeout=timeout, use_libuv=True)
    if rank == 0:
        listener = _listen(LOOPBACK, 0)
        with socket.socket(fileno=os.dup(listener)) as bound:
            port = bound.getsockname()[1]
        store = connect(port=port, is_master=True, wait_for_workers=False, master_listen_fd=listener)
        address, gateway, secret = _open_gateway(port)
        atomic_write_json(file, {"address": address, "port": gateway, "secret": secret.hex()}, PRIVATE)
        atexit.register(file.unlink, missing_ok=True)
    else:
        at = _await_file(file, variables, timeout)
        proxy = _open_local_proxy(at["address"], at["port"], bytes.fromhex(at["secret"]))
        try:
            store = connect(port=proxy, is_master=False, wait_for_workers=False)
        except (dist.DistError, RuntimeError) as error:
            raise RendezvousError(
                f"rank {rank} of {world_size} could not reach the store of rank 0 through {at['address']}:{at['port']} "
                f"(from {file}) within {timeout.total_seconds():g} s: rank 0 must be running, and its node reachable "
                f"from this one at that port ({error})"
            ) from error
    _open_stores()[key] = store
    atexit.register(_leave_store, store, rank, world_size)
    return store


def _open_gateway(store_port: int) -> tuple[str, int, bytes]:
    """Open the gateway to the store on an address that other nodes can reach; return address, port and secret."""
    secret, tried = secrets.token_bytes(32), []
    for address in [LOOPBACK] if _is_one_node() else _node_addresses():
        try:
            return address, open_gateway(address, store_port, secret), secret
        except OSError as error:
            tried.append(f"{address}: {error}")
    node, tries = node_name(os.environ), "; ".join(tried) or "none"
    raise RendezvousError(
        f"rank 0 on {node} has no address that other nodes can reach (tried {tries}): "
        f"on that node, {node} must resolve to a network address, not only to the loopback interface"
    )


def _node_addresses() -> list[str]:
    """Return the addresses of this node's name, then the address that srun was started from, without loopback ones."""
    addresses: list[str] = []
    with contextlib.suppress(OSError):
        addresses += [
            str(info[4][0])
            for info in socket.getaddrinfo(node_name(os.environ), None, socket.AF_INET, socket.SOCK_STREAM)
        ]
    addresses += [os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "")]
    return [address for address in dict.fromkeys(addresses) if address and not is_loopback(address)]


def _await_file(file: Path, variables: RankVariables, timeout: timedelta) -> dict[str, Any]:
    """Return rank 0's gateway (address, port, secret) from `file`. Raises RendezvousError after `timeout`."""
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        with contextlib.suppress(FileNotFoundError), file.open() as opened:
            if os.fstat(opened.fileno()).st_uid == os.getuid():  # another user's file could redirect the ranks
                try:
                    return parse_json(opened.read())
                except ValueError as error:
                    raise RendezvousError(f"{file}: is damaged ({error}); start the run again") from error
        if time.monotonic() > deadline:
            raise RendezvousError(
                f"rank {variables.rank} of {variables.world_size}: rank 0 did not write its store's address to "
                f"{file} within {timeout.total_seconds():g} s; look for the first error of rank 0"
            )
        time.sleep(0.05)


def _open_store_at(host: str, port: int, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    key = (host, port)
    if key not in _open_stores():
        _open_stores()[key] = _connect(host, port, rank, world_size, timeout)
        atexit.register(_leave_store, _open_stores()[key], rank, world_size)
    return _open_stores()[key]


def keep_store(store: dist.Store, rank: int, world_size: int) -> None:
    """Keep the store of a process group started by other code until all its ranks have left it.

    Otherwise it would end with rank 0's process group, while other ranks may still read its last keys. A store that
    this process opened itself is already kept.
    """
    if not _open_stores():
        _open_stores()["of the process group", 0] = store
        atexit.register(_leave_store, store, rank, world_size)


def _leave_store(store: dist.Store, rank: int, world_size: int) -> None:
    """Leave the store at exit; the process that serves it first waits for the other ranks to leave."""
    sync = StoreSync(dist.PrefixStore("left", store), rank, world_size)
    with contextlib.suppress(dist.DistError):  # the store is gone already
        sync.acknowledge()
        # sys.last_value is set after an uncaught exception: then exit without waiting for the others.
        if rank == 0 and not agent_serves_store() and getattr(sys, "last_value", None) is None:
            sync.await_acknowledgements(world_size)


def _connect(host: str, port: int, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    connect = functools.partial(
        dist.TCPStore, host, port, world_size, timeout=timeout, wait_for_workers=False, use_libuv=True
    )
    if rank != 0 or agent_serves_store():
        return connect(is_master=False)
    descriptor = read_integer(STORE_FD)
    if descriptor is None and is_loopback(host):
        descriptor = _listen(host, port)  # by default a TCPStore listens on every interface
    elif descriptor is None and not os.environ.get("MASTER_ADDR") and (addresses := _node_addresses()):
        descriptor = _listen(addresses[0], port)  # in a Slurm step, whose ranks resolve this node's name
    if descriptor is not None:
        return connect(is_master=True, master_listen_fd=descriptor)
    return connect(is_master=True, multi_tenant=True)


def agent_serves_store() -> bool:
    """Return whether torchrun's agent serves the store at MASTER_ADDR, so that every rank is a client."""
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return by_agent and STORE_FD not in os.environ and not _uses_store_file()


def _listen(host: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise RuntimeError(f"port {port} is taken: {error}") from error
        listener.listen(2048)
        return listener.detach()


def _first_host_of_step(environ: Mapping[str, str]) -> str:
    if (environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES")) == "1":
        return LOOPBACK
    name = "SLURM_STEP_NODELIST" if environ.get("SLURM_STEP_NODELIST") else "SLURM_JOB_NODELIST"
    nodes = environ.get(name, "")
    if nodes and "[" not in nodes:
        return nodes.split(",")[0]
    scontrol = shutil.which("scontrol", path=environ.get("PATH"))
    if not nodes or scontrol is None:
        reason = f"{name}={nodes} needs scontrol, which is not on PATH" if nodes else f"{name} is not set"
        raise RankEnvironmentError(f"MASTER_ADDR is not set and {reason}; set MASTER_ADDR to the host of rank 0")
    shown = subprocess.run([scontrol, "show", "hostnames", nodes], capture_output=True, text=True, check=False)
    hosts = shown.stdout.split()
    if shown.returncode or not hosts:
        raise RankEnvironmentError(
            f"MASTER_ADDR is not set and `scontrol show hostnames {nodes}` failed with status "
            f"{shown.returncode}: {shown.stderr.strip() or 'no host named'}; "
            "set MASTER_ADDR to the host of rank 0"
        )
    return hosts[0]


def _port_of_step(environ: Mapping[str, str]) -> int:
    """Return a port that all ranks of the step derive alike, and that differs between jobs and steps."""
    job = require_integer(environ, "SLURM_JOB_ID", "SLURM_STEP_NUM_TASKS")
    step = require_integer(environ, "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS")
    return _FIRST_PORT + (job + 7919 * step) % _PORTS


def open_gateway(address: str, store_port: int, secret: bytes) -> int:
    """Serve the store on the loopback interface to authenticated clients at `address`; return the gateway's port.

    Raises OSError if `address` is not an address of this machine.
    """

    async def accept(reader: Reader, writer: Writer) -> None:
        await asyncio.wait_for(_authenticate_client(reader, writer, secret), _HANDSHAKE_SECONDS)
        await _relay(reader, writer, *await asyncio.open_connection(LOOPBACK, store_port))

    return _serve(address, accept)


def _open_local_proxy(address: str, gateway_port: int, secret: bytes) -> int:
    """Forward connections of this process, and no other, to the gateway at `address`; return the loopback port."""

    async def forward(reader: Reader, writer: Writer) -> None:
        if not _is_from_this_process(writer.get_extra_info("peername")[1], writer.get_extra_info("sockname")[1]):
            return
        gateway = await asyncio.open_connection(address, gateway_port)
        try:
            await asyncio.wait_for(_authenticate_to_gateway(*gateway, secret), _HANDSHAKE_SECONDS)
        except BaseException:
            gateway[1].close()
            raise
        await _relay(reader, writer, *gateway)

    return _serve(LOOPBACK, forward)


def _serve(address: str, handle: Callable[[Reader, Writer], Awaitable[None]]) -> int:
    """Start a server thread on a free port of `address`, and return the port."""

    async def serve_one(reader: Reader, writer: Writer) -> None:
        with suppress(OSError, EOFError, PermissionError, asyncio.TimeoutError):  # peer gone or unauthenticated
            await handle(reader, writer)
        writer.close()

    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
    except OSError:
        listener.close()
        raise
    loop = asyncio.new_event_loop()
    loop.run_until_complete(asyncio.start_server(serve_one, sock=listener, backlog=2048))
    threading.Thread(target=loop.run_forever, name="store relay", daemon=True).start()
    return listener.getsockname()[1]


async def _authenticate_client(reader: Reader, writer: Writer, secret: bytes) -> None:
    """Do the gateway's half of the handshake. Raises PermissionError if the client does not have the secret."""
    own_nonce = secrets.token_bytes(_NONCE)
    writer.write(own_nonce)
    peer_nonce, proof = await reader.readexactly(_NONCE), await reader.readexactly(_PROOF)
    if not hmac.compare_digest(proof, _prove(secret, b"proxy", own_nonce + peer_nonce)):
        raise PermissionError("wrong secret")
    writer.write(_prove(secret, b"gateway", own_nonce + peer_nonce))
    await writer.drain()


async def _authenticate_to_gateway(reader: Reader, writer: Writer, secret: bytes) -> None:
    """Do the proxy's half of the handshake. Raises PermissionError if the server on the port is not the gateway."""
    peer_nonce, own_nonce = await reader.readexactly(_NONCE), secrets.token_bytes(_NONCE)
    writer.write(own_nonce + _prove(secret, b"proxy", peer_nonce + own_nonce))
    await writer.drain()
    if not hmac.compare_digest(await reader.readexactly(_PROOF), _prove(secret, b"gateway", peer_nonce + own_nonce)):
        raise PermissionError("wrong secret")


def _prove(secret: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, role + nonces, "sha256")


async def _relay(reader: Reader, writer: Writer, other_reader: Reader, other_writer: Writer) -> None:
    """Copy bytes in both directions until either connection closes."""
    for each in (writer, other_writer):
        each.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    copies = [asyncio.ensure_future(_copy(reader, other_writer)), asyncio.ensure_future(_copy(other_reader, writer))]
    await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    for copy in copies:
        copy.cancel()
    writer.close()
    other_writer.close()


async def _copy(reader: Reader, writer: Writer) -> None:
    with suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()


def _is_from_this_process(port: int, proxy_port: int) -> bool:
    """Return whether this process opened the loopback connection from `port` to `proxy_port`.

    /proc/self/net lists every connection with the inode of its socket; the inodes among this process's own descriptors
    are those it opened.
    """
    ends, sockets = (f"{port:04X}", f"{proxy_port:04X}"), set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):  # torch opens IPv6 sockets for IPv4 addresses too
        with suppress(OSError), open(table) as file:
            for fields in map(str.split, file):
                if tuple(end.rpartition(":")[2] for end in fields[1:3]) == ends:
                    sockets.add(f"socket:[{fields[9]}]")
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}") in sockets:
                return True
    return False
