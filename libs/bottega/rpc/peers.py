"""Who is at the other end of a call, as far as gRPC says it. Knows no calls."""

from __future__ import annotations

import ipaddress
from urllib.parse import unquote

# Of IPv6 a host has a network of its own rather than an address.
_IPV6_PREFIX = 64


def host_of(peer: str) -> str:
    """The host of a peer as gRPC names it, such as ipv4:10.0.0.1:5000; what is no address of a host is one host."""
    kind, _, rest = unquote(peer).partition(":")
    host = rest.rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return kind
    if isinstance(address, ipaddress.IPv6Address):
        mapped = address.ipv4_mapped
        return str(mapped or ipaddress.ip_network((address, _IPV6_PREFIX), strict=False).network_address)
    return str(address)
