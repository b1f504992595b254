"""Packet filters that drop connection attempts of chosen hosts to a port, or data of a connection.

They are classic BPF programs on sockets, which need no special rights. They drop packets before this process sees them.
A connection inherits the filter of the socket that listens.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import itertools
import logging
import math
import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

# From <asm-generic/socket.h>; Python's socket module does not have them.
_ATTACH_FILTER, _DETACH_FILTER = 26, 27
# From <linux/bpf_common.h>: load a byte, load a word, load the packet's length, mask, shift right, subtract the index
# register, copy to it, compare, return.
_LOAD_BYTE, _LOAD_WORD, _LOAD_LENGTH, _AND, _SHIFT, _SUBTRACT_INDEX = 0x30, 0x20, 0x80, 0x54, 0x74, 0x1C
_TO_INDEX, _JUMP_EQUAL, _JUMP_GREATER, _RETURN = 0x07, 0x15, 0x25, 0x06
# Offset of the network header. Filters of TCP sockets see the packet from the TCP header on.
_NETWORK = 0xFFF00000
_IPV4_SOURCE, _IPV6_SOURCE = 12, 8
_PASS, _DROP = 0xFFFFFFFF, 0
# Place in the TCP header of its own length, which is in the upper half of this byte, in words of 4 bytes.
_HEADER_LENGTH = 12
# A packet with more data than this is bulk data. It is below the size of full packets, also in tunnels, and above that
# of a client's first calls, unless their messages or its certificates are large.
_BULK_BYTES = 1200
# Each host takes some instructions for every packet that opens a connection.
_MAX_HOSTS = 64

_OPEN_FILES = Path("/proc/self/fd")

_log = logging.getLogger(__name__)

Instruction = tuple[int, int, int, int]
"""Operation, jump distance if a comparison holds, jump distance if it does not, operand."""


def open_sockets(port: int) -> Iterator[socket.socket]:
    """Yield the TCP sockets of this process on a local port. Another thread may close them meanwhile.

    It takes some microseconds for each open file. psutil reads the machine's table of connections, which takes
    milliseconds.
    """
    with os.scandir(_OPEN_FILES) as entries:
        descriptors = [int(entry.name) for entry in entries]
    for descriptor in descriptors:
        try:
            # With a family given, Python does not ask the system for it. That of IPv6 has room for addresses of both.
            opened = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=descriptor)
        except OSError:  # no socket, or closed by now
            continue
        try:
            with contextlib.suppress(OSError):
                if _is_on_port(opened.getsockname(), port) and _is_tcp(opened):
                    yield opened
        finally:
            opened.detach()  # it belongs to gRPC


def _is_on_port(address: Any, port: int) -> bool:
    """Return whether a socket's address is one of IPv4 or IPv6 with this port. Other families have other forms."""
    return isinstance(address, tuple) and isinstance(address[0], str) and address[1] == port


def _is_tcp(opened: socket.socket) -> bool:
    return opened.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_STREAM


def mute(connection: socket.socket) -> bool:
    """Drop everything that the peer of an open connection sends from now on. Return whether the system can do that.

    To the peer, the connection seems to stall.
    """
    try:
        _attach(connection, ((_RETURN, 0, 0, _DROP),))
    except OSError:
        return False
    return True


def let_through(connection: socket.socket) -> None:
    """Receive again everything that the peer of an open connection sends."""
    with contextlib.suppress(OSError):
        _attach(connection, ())


class SourceFilter:
    """The hosts that may not connect to a port for some time. Only one thread at a time may use it.

    A host whose ban has ended is on probation: for some time it cannot be banned again. So another caller behind the
    same address, who is not known yet, can connect between two bans, however long a flood lasts. Bulk data of
    connections that are opened during the probation is dropped until `let_through`, so that the calls of a flood do
    not all come at once. A client's first calls are no bulk data, and the client sends again what was dropped.

    Args:
        port: A port on which this process listens.
        banned_s: Seconds of a ban.
        probation_s: Seconds of the probation after a ban.
    """

    def __init__(self, port: int, *, banned_s: float, probation_s: float) -> None:
        self._port = port
        self._banned_s = banned_s
        self._probation_s = probation_s
        self._banned_until: dict[str, float] = {}  # by host, as in peers.host_of_address
        self._probation_until: dict[str, float] = {}
        self._works = True

    def ban(self, host: str) -> bool:
        """Ban a host from now on. Return False if it is on probation, or if the system cannot ban it."""
        if not (self._works and host) or self._probation_until.get(host, 0.0) > time.monotonic():
            return False
        if host not in self._banned_until and len(self._banned_until) >= _MAX_HOSTS:
            return False
        self._probation_until.pop(host, None)
        self._banned_until[host] = time.monotonic() + self._banned_s
        return self._apply()

    def on_probation(self) -> frozenset[str]:
        """Return the hosts that were admitted a short time ago."""
        now = time.monotonic()
        return frozenset(host for host, until in self._probation_until.items() if until > now)

    def has(self, host: str) -> bool:
        """Return whether a host is banned now."""
        return host in self._banned_until

    def hosts(self) -> frozenset[str]:
        """Return the hosts that are banned now."""
        return frozenset(self._banned_until)

    def is_due(self) -> bool:
        """Return whether `lift` has something to do."""
        now = time.monotonic()
        return any(until <= now for until in (*self._banned_until.values(), *self._probation_until.values()))

    def lift(self) -> frozenset[str]:
        """Admit the hosts whose ban has ended, and return those whose probation has ended.

        Connections that these hosts opened during the probation still have its filter.
        """
        now = time.monotonic()
        admitted = [host for host, until in self._banned_until.items() if until <= now]
        for host in admitted:
            del self._banned_until[host]
            self._probation_until[host] = now + self._probation_s
        trusted = frozenset(host for host, until in self._probation_until.items() if until <= now)
        for host in trusted:
            del self._probation_until[host]
        if admitted or trusted:
            self._apply()
        return trusted

    def trust(self, host: str) -> None:
        """End the probation of a host with the next call of `lift`."""
        if host in self._probation_until:
            self._probation_until[host] = -math.inf

    def _apply(self) -> bool:
        try:
            for listening in listening_sockets(self._port):
                _attach(listening, program(self._banned_until, self._watched()))
        except OSError as error:
            self._works = False
            self._banned_until.clear()
            self._probation_until = dict.fromkeys(self._probation_until, -math.inf)
            _log.warning("the filter that blocks flooding hosts cannot be installed", extra={"why": str(error)})
            self._detach()
        return self._works

    def _watched(self) -> Iterator[str]:
        """Yield the hosts on probation for which the filter has room."""
        return itertools.islice(self._probation_until, _MAX_HOSTS - len(self._banned_until))

    def _detach(self) -> None:
        """Remove an earlier filter, because its hosts would stay banned."""
        with contextlib.suppress(OSError):
            for listening in listening_sockets(self._port):
                _attach(listening, ())


def program(banned: Iterable[str], watched: Iterable[str] = ()) -> tuple[Instruction, ...]:
    """Return a filter; empty if there are no hosts. An IPv6 host is a network of 64 bits.

    Args:
        banned: Hosts of which it drops all packets.
        watched: Hosts of which it drops bulk data.
    """
    hosts = (*(_of_host(host, _ALL) for host in banned), *(_of_host(host, _BULK) for host in watched))
    if not hosts:
        return ()
    return (*(instruction for instructions in hosts for instruction in instructions), (_RETURN, 0, 0, _PASS))


_ALL: tuple[Instruction, ...] = ((_RETURN, 0, 0, _DROP),)
_BULK: tuple[Instruction, ...] = (
    (_LOAD_BYTE, 0, 0, _HEADER_LENGTH),
    (_AND, 0, 0, 0xF0),
    (_SHIFT, 0, 0, 2),
    (_TO_INDEX, 0, 0, 0),
    (_LOAD_LENGTH, 0, 0, 0),  # of header and data
    (_SUBTRACT_INDEX, 0, 0, 0),
    (_JUMP_GREATER, 0, 1, _BULK_BYTES),
    (_RETURN, 0, 0, _DROP),
    (_RETURN, 0, 0, _PASS),
)


def _of_host(host: str, decision: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """Return the instructions that decide about packets of a host, and go on behind their end with others."""
    address = ipaddress.ip_address(host)
    packed = address.packed
    if address.version == 4:
        version, source, words = 0x40, _IPV4_SOURCE, [packed]
    else:
        version, source, words = 0x60, _IPV6_SOURCE, [packed[:4], packed[4:8]]
    compared: list[tuple[Instruction, int]] = [((_LOAD_BYTE, 0, 0, _NETWORK), -1), ((_AND, 0, 0, 0xF0), version)]
    for place, word in enumerate(words):
        compared.append(((_LOAD_WORD, 0, 0, _NETWORK + source + 4 * place), int.from_bytes(word, "big")))
    size = sum(1 if expected < 0 else 2 for _, expected in compared) + len(decision)
    instructions: list[Instruction] = []
    for load, expected in compared:
        instructions.append(load)
        if expected >= 0:
            instructions.append((_JUMP_EQUAL, 0, size - len(instructions) - 1, expected))
    return (*instructions, *decision)


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("jump_true", ctypes.c_uint8),
        ("jump_false", ctypes.c_uint8),
        ("operand", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(_Instruction)))


def _attach(filtered: socket.socket, instructions: tuple[Instruction, ...]) -> None:
    """Attach a filter to a socket, or remove the filter if there are no instructions."""
    if not instructions:
        with contextlib.suppress(FileNotFoundError):
            filtered.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
        return
    array = (_Instruction * len(instructions))(*(_Instruction(*instruction) for instruction in instructions))
    built = _Program(length=len(instructions), instructions=array)
    filtered.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, bytes(built))


def listening_sockets(port: int) -> Iterator[socket.socket]:
    """Yield a duplicate of each socket of this process that listens on a port."""
    for opened in open_sockets(port):
        if opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            # socket.dup would make gRPC's socket a blocking one.
            with socket.socket(fileno=os.dup(opened.fileno())) as duplicate:
                yield duplicate
