"""Hosts whose connections to a port the system drops before anybody sees them.

A listening socket may have a filter of packets (classic BPF, which needs no rights over a socket of one's own): what
asks for a new connection and comes from one of these hosts is dropped. Open connections stay as they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import logging
import os
import socket
import time
from collections.abc import Iterable, Iterator

import psutil

# Of <asm-generic/socket.h>; Python's socket module does not have them.
_ATTACH_FILTER, _DETACH_FILTER = 26, 27
# Of <linux/bpf_common.h>: load a byte or a word, mask it, compare it, return.
_LOAD_BYTE, _LOAD_WORD, _AND, _JUMP_EQUAL, _RETURN = 0x30, 0x20, 0x54, 0x15, 0x06
# Where the network's header begins, of which filters of TCP sockets see the rest.
_NETWORK = 0xFFF00000
_IPV4_SOURCE, _IPV6_SOURCE = 12, 8
_PASS, _DROP = 0xFFFFFFFF, 0
# Of hosts at once: each is some instructions for every packet that asks for a connection.
_MOST_HOSTS = 64

_log = logging.getLogger(__name__)

Instruction = tuple[int, int, int, int]
"""Operation, instructions to skip where a comparison holds and where it does not, operand."""


class SourceFilter:
    """Hosts from which a port takes no connections for some time. One thread at a time calls it.

    Args:
        port: Of this process, which listens on it.
        banned_s: For which a host is kept out.
    """

    def __init__(self, port: int, *, banned_s: float) -> None:
        self._port = port
        self._banned_s = banned_s
        self._until: dict[str, float] = {}  # by host, as peers.host_of_address has it
        self._works = True

    def ban(self, host: str) -> bool:
        """Keep a host out from now on. Return False where the system cannot."""
        if not (self._works and host) or (host not in self._until and len(self._until) >= _MOST_HOSTS):
            return False
        self._until[host] = time.monotonic() + self._banned_s
        return self._apply()

    def has(self, host: str) -> bool:
        """Return whether a host is kept out now."""
        return host in self._until

    def lift(self) -> None:
        """Let hosts in whose time is over."""
        now = time.monotonic()
        over = [host for host, until in self._until.items() if until <= now]
        for host in over:
            del self._until[host]
        if over:
            self._apply()

    def _apply(self) -> bool:
        try:
            for listening in _listening(self._port):
                _attach(listening, program(self._until) if self._until else ())
        except (OSError, psutil.Error) as error:
            self._works = False
            self._until.clear()
            _log.warning("hosts that flood cannot be kept out here", extra={"why": str(error)})
            self._detach()
        return self._works

    def _detach(self) -> None:
        """Remove the filter, which may be an earlier one: otherwise its hosts would be kept out for ever."""
        with contextlib.suppress(OSError, psutil.Error):
            for listening in _listening(self._port):
                _attach(listening, ())


def program(hosts: Iterable[str]) -> tuple[Instruction, ...]:
    """Return the filter that drops what comes from these hosts: of IPv6 a host is a network of 64 bits."""
    return (*(instruction for host in hosts for instruction in _drop(host)), (_RETURN, 0, 0, _PASS))


def _drop(host: str) -> tuple[Instruction, ...]:
    address = ipaddress.ip_address(host)
    packed = address.packed
    if address.version == 4:
        version, source, words = 0x40, _IPV4_SOURCE, [packed]
    else:
        version, source, words = 0x60, _IPV6_SOURCE, [packed[:4], packed[4:8]]
    compared: list[tuple[Instruction, int]] = [((_LOAD_BYTE, 0, 0, _NETWORK), -1), ((_AND, 0, 0, 0xF0), version)]
    for place, word in enumerate(words):
        compared.append(((_LOAD_WORD, 0, 0, _NETWORK + source + 4 * place), int.from_bytes(word, "big")))
    instructions: list[Instruction] = []
    for load, expected in compared:
        instructions.append(load)
        if expected >= 0:
            instructions.append((_JUMP_EQUAL, 0, 0, expected))
    instructions.append((_RETURN, 0, 0, _DROP))
    size = len(instructions)
    return tuple(
        (operation, 0, size - place - 1, operand) if operation == _JUMP_EQUAL else (operation, 0, 0, operand)
        for place, (operation, _, _, operand) in enumerate(instructions)
    )


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("jump_true", ctypes.c_uint8),
        ("jump_false", ctypes.c_uint8),
        ("operand", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(_Instruction)))


def _attach(listening: socket.socket, instructions: tuple[Instruction, ...]) -> None:
    """No instructions remove a filter."""
    if not instructions:
        with contextlib.suppress(FileNotFoundError):
            listening.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
        return
    array = (_Instruction * len(instructions))(*(_Instruction(*each) for each in instructions))
    built = _Program(length=len(instructions), instructions=array)
    listening.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, bytes(built))


@contextlib.contextmanager
def _own(descriptor: int) -> Iterator[socket.socket]:
    with socket.socket(fileno=os.dup(descriptor)) as ours:
        yield ours


def _listening(port: int) -> Iterator[socket.socket]:
    """Yield a descriptor of our own for each socket of this process that listens on a port."""
    for each in psutil.Process().net_connections("tcp"):
        if each.status == psutil.CONN_LISTEN and each.laddr.port == port and each.fd >= 0:
            with _own(each.fd) as ours:
                yield ours
