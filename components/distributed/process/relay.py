"""Authenticated access to the rendezvous store from other nodes: a gateway on rank 0, a local proxy on the other ranks.

A TCPStore has no authentication: any client that reaches its port can list, read, change and delete every key. The
store therefore listens only on the loopback interface of rank 0's node. Rank 0 also runs a gateway on an address that
other nodes can reach. The gateway forwards a connection to the store only after a mutual handshake (HMAC-SHA256 with
fresh nonces) with a secret that rank 0 writes to a file which only the user can read. Every other rank runs a proxy on
a loopback port, which accepts connections of its own process only and forwards them to the gateway. torch's client
connects to this port as if it were the store.

Imports no torch. Gateway and proxy each run an event loop in a daemon thread.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeAlias

LOOPBACK = "127.0.0.1"
HANDSHAKE_SECONDS = 10.0
"""Timeout of the handshake of one connection."""
_NONCE, _PROOF, _CHUNK = 32, 32, 2**16

Reader: TypeAlias = asyncio.StreamReader
Writer: TypeAlias = asyncio.StreamWriter


def open_gateway(address: str, store_port: int, secret: bytes) -> int:
    """Serve the store on the loopback interface to authenticated clients at `address`; return the gateway's port.

    Raises OSError if `address` is not an address of this machine.
    """

    async def accept(reader: Reader, writer: Writer) -> None:
        await asyncio.wait_for(_authenticate_client(reader, writer, secret), HANDSHAKE_SECONDS)
        await _relay(reader, writer, *await asyncio.open_connection(LOOPBACK, store_port))

    return _serve(address, accept)


def open_local_proxy(address: str, gateway_port: int, secret: bytes) -> int:
    """Forward connections of this process, and no other, to the gateway at `address`; return the loopback port."""

    async def forward(reader: Reader, writer: Writer) -> None:
        if not _is_from_this_process(writer.get_extra_info("peername")[1], writer.get_extra_info("sockname")[1]):
            return
        gateway = await asyncio.open_connection(address, gateway_port)
        try:
            await asyncio.wait_for(_authenticate_to_gateway(*gateway, secret), HANDSHAKE_SECONDS)
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
