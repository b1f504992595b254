"""Ports of loopback for services whose addresses others have to know before they start."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

# Where Linux says from which range it gives ports to those who ask for any, and to connections: "first last".
_GIVEN_TO_ANY = Path("/proc/sys/net/ipv4/ip_local_port_range")
# What stands below belongs to well-known services.
_FIRST = 10_000
_TRIES = 100


def free_ports(count: int) -> list[int]:
    """So many ports of loopback on which nobody listens now, neighbours where possible, the first one chosen at random.

    They are outside the range from which the system serves who asks for any port, so that none of them goes to somebody
    else before its service listens there. Where that range leaves no room, they are any that the system gives.
    """
    last = _first_given_to_any() - count
    for _ in range(_TRIES if last >= _FIRST else 0):
        first = random.randint(_FIRST, last)
        ports = list(range(first, first + count))
        with suppress(OSError):
            check_free(ports)
            return ports
    return _given(count)


def check_free(ports: Sequence[int]) -> None:
    """Raises OSError where somebody listens on one of these ports of loopback."""
    with ExitStack() as held:
        for port in ports:
            held.enter_context(socket.create_server(("127.0.0.1", port)))


def _first_given_to_any() -> int:
    try:
        return int(_GIVEN_TO_ANY.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def _given(count: int) -> list[int]:
    with ExitStack() as held:
        found = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in found]
