"""An authenticated way to the store of the ranks, for ranks on other nodes.

A TCPStore asks nobody who they are: whoever reaches its port can list, read, change and delete every key. So it listens
on the loopback interface of rank 0's node only. Beside it rank 0 runs a gate, on an address that other nodes reach. A
connection is led on to the store only after both ends have proved that they know a secret, which rank 0 handed over in
a file that only the user can read. Every other rank runs a door: a loopback port that its own process alone may use,
which leads to the gate. Torch's client then talks to the door as if it were the store.

Imports no torch. Gate and door are an event loop in a thread; they end with their process.
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
"""How long a connection may take to prove itself."""
_NONCE, _PROOF, _CHUNK = 32, 32, 2**16

Reader: TypeAlias = asyncio.StreamReader
Writer: TypeAlias = asyncio.StreamWriter


def open_gate(address: str, store_port: int, secret: bytes) -> int:
    """Lead connections to a free port of `address` on to the store at the loopback interface; return that port.

    Raises OSError where `address` is not one of this machine.
    """

    async def let_in(reader: Reader, writer: Writer) -> None:
        await asyncio.wait_for(_admit(reader, writer, secret), HANDSHAKE_SECONDS)
        await _join(reader, writer, *await asyncio.open_connection(LOOPBACK, store_port))

    return _serve(address, let_in)


def open_door(address: str, gate_port: int, secret: bytes) -> int:
    """Return a loopback port that leads this process, and no other, through the gate at `address`."""

    async def lead(reader: Reader, writer: Writer) -> None:
        if not _is_of_this_process(writer.get_extra_info("peername")[1], writer.get_extra_info("sockname")[1]):
            return
        there = await asyncio.open_connection(address, gate_port)
        try:
            await asyncio.wait_for(_ask(*there, secret), HANDSHAKE_SECONDS)
        except BaseException:
            there[1].close()
            raise
        await _join(reader, writer, *there)

    return _serve(LOOPBACK, lead)


def _serve(address: str, handle: Callable[[Reader, Writer], Awaitable[None]]) -> int:
    """Start a server on a free port of `address` in a thread of its own, and return the port."""

    async def serve_one(reader: Reader, writer: Writer) -> None:
        with suppress(OSError, EOFError, PermissionError, asyncio.TimeoutError):  # its peer went, or proved nothing
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


async def _admit(reader: Reader, writer: Writer, secret: bytes) -> None:
    """The gate's part of the handshake. Raises PermissionError for a peer that does not know the secret."""
    ours = secrets.token_bytes(_NONCE)
    writer.write(ours)
    theirs, proof = await reader.readexactly(_NONCE), await reader.readexactly(_PROOF)
    if not hmac.compare_digest(proof, _prove(secret, b"door", ours + theirs)):
        raise PermissionError("wrong secret")
    writer.write(_prove(secret, b"gate", ours + theirs))
    await writer.drain()


async def _ask(reader: Reader, writer: Writer, secret: bytes) -> None:
    """The door's part. Raises PermissionError where something else has taken the gate's port."""
    theirs, ours = await reader.readexactly(_NONCE), secrets.token_bytes(_NONCE)
    writer.write(ours + _prove(secret, b"door", theirs + ours))
    await writer.drain()
    if not hmac.compare_digest(await reader.readexactly(_PROOF), _prove(secret, b"gate", theirs + ours)):
        raise PermissionError("wrong secret")


def _prove(secret: bytes, side: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, side + nonces, "sha256")


async def _join(reader: Reader, writer: Writer, other_reader: Reader, other_writer: Writer) -> None:
    """Move bytes both ways until either side ends."""
    for each in (writer, other_writer):
        each.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    pumps = [asyncio.ensure_future(_pump(reader, other_writer)), asyncio.ensure_future(_pump(other_reader, writer))]
    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
    for pump in pumps:
        pump.cancel()
    writer.close()
    other_writer.close()


async def _pump(reader: Reader, writer: Writer) -> None:
    with suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()


def _is_of_this_process(port: int, door: int) -> bool:
    """Whether the loopback connection from `port` to `door` was opened by this very process."""
    ends, sockets = (f"{port:04X}", f"{door:04X}"), set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):  # torch's sockets are of IPv6, for IPv4 addresses too
        with suppress(OSError), open(table) as file:
            for fields in map(str.split, file):
                if tuple(end.rpartition(":")[2] for end in fields[1:3]) == ends:
                    sockets.add(f"socket:[{fields[9]}]")
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}") in sockets:
                return True
    return False
