"""Which host a call comes from: one name for each, whatever port it has taken."""

from __future__ import annotations

import pytest

from bottega.rpc.peers import host_of


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.1:5000", "10.0.0.1"),
        ("ipv4:10.0.0.1:5001", "10.0.0.1"),
        ("ipv6:%5B::1%5D:5000", "::"),
        ("ipv6:%5B::ffff:10.0.0.1%5D:5", "10.0.0.1"),
        ("ipv6:%5Bfe80::1%25eth0%5D:5", "fe80::"),
        ("unix:/run/x", "unix"),
        ("unix:", "unix"),
        ("", ""),
        ("ipv4:nonsense:1", "ipv4"),
        ("vsock:1:2", "vsock"),
    ],
)
def test_a_host_has_one_name_for_all_its_ports(peer: str, host: str) -> None:
    assert host_of(peer) == host


def test_the_addresses_that_one_host_of_ipv6_has_are_one_host() -> None:
    assert host_of("ipv6:%5B2001:db8::1%5D:1") == host_of("ipv6:[2001:db8::ffff:2]:2") == "2001:db8::"
    assert host_of("ipv6:[2001:db8:0:1::1]:1") != host_of("ipv6:[2001:db8::1]:1")
