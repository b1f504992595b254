"""Hosts that a port takes no connections from, by the system's own filter."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from collections.abc import Iterator

import pytest

from bottega.rpc import source_filter
from bottega.rpc.inbound_connections import connections, let_through
from bottega.rpc.source_filter import Instruction, SourceFilter, program
from tests.fakes.fake_time import FakeTime
from tests.support.waiting import wait_until

BANNED, OTHER = "127.0.0.2", "127.0.0.3"


@pytest.fixture(params=["127.0.0.1", "::"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    """Of IPv4, and of both families."""
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.create_server((request.param, 0), family=family, dualstack_ipv6=family is socket.AF_INET6) as server:
        yield server.getsockname()[1]


def _connects(port: int, source: str) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=0.2, source_address=(source, 0)):
            return True
    except TimeoutError:
        return False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    clock = FakeTime()
    monkeypatch.setattr(source_filter, "time", clock)
    return clock


def test_a_banned_host_cannot_connect_until_its_time_is_over_and_others_can(port: int, clock: FakeTime) -> None:
    banned = SourceFilter(port, banned_s=10.0, probation_s=60.0)
    assert _connects(port, BANNED)
    assert banned.ban(BANNED)
    clock.now += 9
    banned.lift()
    assert not _connects(port, BANNED)
    assert _connects(port, OTHER)
    clock.now += 2
    banned.lift()
    assert _connects(port, BANNED)


def test_a_host_whose_ban_is_over_is_not_banned_again_for_some_time(port: int, clock: FakeTime) -> None:
    banned = SourceFilter(port, banned_s=0.0, probation_s=60.0)
    assert banned.ban(BANNED)
    assert banned.is_due()
    banned.lift()
    assert not banned.is_due()
    assert not banned.ban(BANNED)
    assert banned.ban(OTHER)
    assert _connects(port, BANNED)
    clock.now += 61
    assert banned.ban(BANNED)
    assert not _connects(port, BANNED)


def test_bulk_data_of_a_host_on_probation_is_dropped_until_it_is_let_through(clock: FakeTime) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, contextlib.ExitStack() as stack:
        banned = SourceFilter(listening.getsockname()[1], banned_s=0.0, probation_s=60.0)
        assert banned.ban(BANNED)
        assert not banned.lift()

        def connection(source: str) -> tuple[socket.socket, socket.socket]:
            client = socket.create_connection(listening.getsockname(), source_address=(source, 0))
            served = stack.enter_context(listening.accept()[0])
            served.setblocking(False)
            return stack.enter_context(client), served

        (client, served), (other, others) = connection(BANNED), connection(OTHER)
        for sender, size_bytes in ((client, 1_000), (client, 5_000), (other, 5_000)):
            sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sender.sendall(bytes(size_bytes))
        assert (_received_bytes(served), _received_bytes(others)) == (1_000, 5_000)
        (held,) = [inbound for inbound in connections(listening.getsockname()[1]) if inbound.dropped_packets]
        assert held.host == BANNED
        let_through(held)
        wait_until(lambda: _received_bytes(served) == 6_000, "the client to send it again")
        assert not banned.is_due()
        clock.now += 61
        assert banned.lift() == {BANNED}
        client, served = connection(BANNED)
        client.sendall(bytes(5_000))
        assert _received_bytes(served) == 5_000


def _received_bytes(served: socket.socket) -> int:
    """Return how many bytes of a connection have arrived. On loopback they arrive while they are sent."""
    with contextlib.suppress(BlockingIOError):
        return len(served.recv(1 << 20, socket.MSG_PEEK))
    return 0


def test_hosts_are_bounded_and_what_is_none_is_not_banned(port: int) -> None:
    banned = SourceFilter(port, banned_s=60.0, probation_s=60.0)
    assert not banned.ban("")
    assert all(banned.ban(f"10.0.0.{number}") for number in range(64))
    assert not banned.ban("10.0.1.0")
    assert banned.ban("10.0.0.3")


def test_where_the_system_takes_no_further_host_no_host_stays_banned(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    banned = SourceFilter(port, banned_s=0.0, probation_s=60.0)
    assert banned.ban(OTHER)
    banned.lift()
    assert banned.ban(BANNED)

    def refuse(banned: object, watched: object) -> tuple[Instruction, ...]:
        raise OSError(errno.ENOMEM, "the filter is too large")

    monkeypatch.setattr(source_filter, "program", refuse)
    assert not banned.ban("10.0.0.1")
    assert _connects(port, BANNED)
    assert banned.lift() == {OTHER}, "its connections still have a filter"


def _drops(instructions: tuple[Instruction, ...], address: str) -> bool:
    """What the filter says of a packet, by the rules of classic BPF."""
    packed = ipaddress.ip_address(address).packed
    header = b"\x45" + bytes(11) + packed if len(packed) == 4 else b"\x60" + bytes(7) + packed
    place = value = 0
    while True:
        operation, if_true, if_false, operand = instructions[place]
        place += 1
        at = operand - 0xFFF00000
        if operation == 0x30:
            value = header[at]
        elif operation == 0x20:
            value = int.from_bytes(header[at : at + 4], "big")
        elif operation == 0x54:
            value &= operand
        elif operation == 0x15:
            place += if_true if value == operand else if_false
        else:
            return operand == 0


def test_of_ipv6_a_host_is_a_network_of_64_bits() -> None:
    instructions = program([BANNED, "2001:db8:0:7::", "10.1.2.3"])
    for address in (BANNED, "10.1.2.3", "2001:db8:0:7::1", "2001:db8:0:7:1:2:3:4"):
        assert _drops(instructions, address), address
    for address in (OTHER, "10.1.2.4", "2001:db8:0:8::1", "2001:db9:0:7::1", "::1"):
        assert not _drops(instructions, address), address
