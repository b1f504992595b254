"""The host of a caller, as gRPC writes it, as one name."""

from __future__ import annotations

import pytest

from bottega.rpc.peers import host_of


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.7:53124", "10.0.0.7"),
        ("ipv6:%5B2001:db8:1:2:3::7%5D:53124", "2001:db8:1:2::/64"),
        ("ipv6:[2001:db8:1:2:ffff::1]:1", "2001:db8:1:2::/64"),
        ("ipv6:%5Bfe80::1%25eth0%5D:1", "fe80::/64"),
        ("ipv6:%5B::ffff:10.0.0.7%5D:1", "10.0.0.7"),
        ("ipv6:%5B::1%5D:1", "::/64"),
        ("unix:", "unix"),
        ("unix:/run/x.sock", "unix"),
        ("", ""),
    ],
)
def test_a_host_has_one_name_whatever_port_or_address_of_its_network_it_calls_from(peer: str, host: str) -> None:
    assert host_of(peer) == host
