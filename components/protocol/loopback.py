"""Ports of the loopback interface, for the store of ranks that run on this machine."""

from __future__ import annotations

import socket


def reserve_loopback_port() -> socket.socket:
    """Bind a free port of the loopback interface, so that no other process takes it before rank 0 serves the store.

    The socket does not listen, so rank 0 may listen on it or, while this process keeps it open, bind the port again.
    """
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved
