"""Crowds of callers for tests and chaos: idle connections, streams that wait, requests that never end."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from bottega.process import open_files

# How HTTP/2 begins: what every client says first, and settings that are none.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_CONNECT_S = 10.0


@contextlib.contextmanager
def connections(
    address: str, count: int, *, source: str = "127.0.0.1", says: bytes = _PREFACE
) -> Iterator[list[socket.socket]]:
    """So many connections that say so much and no more; a service may end them. source: the caller's address."""
    open_files.raise_limit()  # this process needs as many
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(count):
            each = socket.create_connection((host, int(port)), timeout=_CONNECT_S, source_address=(source, 0))
            opened.append(stack.enter_context(each))
            with contextlib.suppress(OSError):  # it was let in and sent away at once
                each.sendall(says)
        yield opened


def alive(opened: list[socket.socket]) -> int:
    """How many of them the service has not ended."""
    return sum(_is_alive(each) for each in opened)


def _is_alive(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
