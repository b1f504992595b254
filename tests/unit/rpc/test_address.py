"""Which host a call comes from: one name for each, whatever port it has taken."""

from __future__ import annotations

import pytest

from bottega.rpc.address import Peer, host_of, peer_of


def test_the_addresses_that_one_host_of_ipv6_has_are_one_host() -> None:
    assert host_of("ipv6:%5B2001:db8::1%5D:1") == host_of("ipv6:[2001:db8::ffff:2]:2") == "2001:db8::"
    assert host_of("ipv6:[2001:db8:0:1::1]:1") != host_of("ipv6:[2001:db8::1]:1")


@pytest.mark.parametrize(
    ("written", "connection", "host"),
    [
        ("ipv4:10.0.0.7:53124", "10.0.0.7 53124", "10.0.0.7"),
        ("ipv6:[2001:db8:1:2:3:4:5:6]:1", "2001:db8:1:2:3:4:5:6 1", "2001:db8:1:2::"),
        ("ipv6:%5B::ffff:10.0.0.7%5D:53124", "10.0.0.7 53124", "10.0.0.7"),
        ("ipv6:%5Bfe80::1%25eth0%5D:5", "fe80::1%eth0 5", "fe80::"),
        ("unix:/run/x.sock", "unix:/run/x.sock", "unix"),
        ("", "", ""),
        ("ipv4:nonsense:1", "nonsense 1", "ipv4"),
        ("vsock:1:2", "vsock:1:2", "vsock"),
    ],
)
def test_a_caller_is_its_host_and_its_end_of_the_connection(written: str, connection: str, host: str) -> None:
    assert peer_of(written) == Peer(connection=connection, host=host)
