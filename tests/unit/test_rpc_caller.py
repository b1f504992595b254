"""Which host a call comes from: one name for each, whatever address or port it has taken."""

from __future__ import annotations

import pytest

from bottega.rpc.caller import caller_host


@pytest.mark.parametrize(
    "peer",
    [
        "ipv4:127.0.0.1:40000",
        "ipv4:127.9.9.9:1",
        "ipv6:%5B::1%5D:40000",
        "ipv6:[::ffff:127.0.0.1]:7",
        "unix:",
        "unix:/x:1",
    ],
)
def test_this_machine_is_one_caller_by_whatever_way_it_comes(peer: str) -> None:
    assert caller_host(peer) == "loopback"


def test_a_host_is_one_caller_with_all_its_ports() -> None:
    assert caller_host("ipv4:192.0.2.7:40000") == caller_host("ipv4:192.0.2.7:40001") == "192.0.2.7"
    assert caller_host("ipv6:%5B::ffff:192.0.2.7%5D:1") == "192.0.2.7"
    assert caller_host("ipv4:192.0.2.8:1") != caller_host("ipv4:192.0.2.7:1")


def test_the_addresses_that_one_host_of_ipv6_has_are_one_caller() -> None:
    assert caller_host("ipv6:%5B2001:db8::1%5D:1") == caller_host("ipv6:[2001:db8::ffff:2]:2")
    assert caller_host("ipv6:[2001:db8:0:1::1]:1") != caller_host("ipv6:[2001:db8::1]:1")
    assert caller_host("ipv6:%5Bfe80::1%25eth0%5D:1") == caller_host("ipv6:[fe80::2%eth1]:1")


@pytest.mark.parametrize("peer", ["", "ipv4:", "ipv4:nonsense:1", "vsock:1:2"])
def test_those_that_cannot_be_told_are_one_caller(peer: str) -> None:
    assert caller_host(peer) == "unknown"
