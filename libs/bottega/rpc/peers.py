"""The caller of a call: its host and its end of the connection, as gRPC and the system write them."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import unquote

# Of IPv6 a host has a network of its own rather than an address.
_IPV6_PREFIX = 64
# How a socket of both families writes IPv4.
_IPV4_MAPPED = "::ffff:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Who calls. connection: the caller's end of it, see `endpoint`. host: the address without the port."""

    connection: str
    host: str


def peer_of(peer: str) -> Peer:
    """peer: as gRPC writes it, such as ipv4:10.0.0.7:53124 or ipv6:%5B2001:db8::7%5D:53124."""
    kind, _, rest = unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return Peer(connection=peer, host=kind)
    address, _, port = rest.rpartition(":")
    address = address.strip("[]")
    return Peer(connection=endpoint(address, port), host=host_of_address(address) or kind)


def host_of(peer: str) -> str:
    """The host of a peer as gRPC writes it; what is no address of a host is one host.

    For bounds of what one caller may take up. Each address of loopback is a host of its own.
    """
    return peer_of(peer).host


def endpoint(address: str, port: int | str) -> str:
    """One end of a connection, the same however the system and gRPC write the address."""
    return f"{address.removeprefix(_IPV4_MAPPED)} {port}"


def host_of_address(address: str) -> str:
    """The host that an IP address is of; empty where it is none."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0].removeprefix(_IPV4_MAPPED))
    except ValueError:
        return ""
    if isinstance(ip, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((ip, _IPV6_PREFIX), strict=False).network_address)
    return str(ip)
