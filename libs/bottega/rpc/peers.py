"""Whose calls they are: the host of a caller, of what gRPC says of its connection. Knows no calls."""

from __future__ import annotations

import ipaddress
from urllib.parse import unquote

# One household or machine has so many bits of IPv6 addresses, RFC 6177 and RFC 4291: it may call from any of them.
_IPV6_HOST_BITS = 64


def host_of(peer: str) -> str:
    """The caller's host: an IPv4 address or an IPv6 network. peer: such as ipv4:10.0.0.7:53124, ipv6:%5B::1%5D:53124.

    What is neither is itself.
    """
    kind, _, rest = unquote(peer).partition(":")
    address = rest.rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return kind
    if isinstance(ip, ipaddress.IPv6Address):
        return str(ip.ipv4_mapped or ipaddress.ip_network((ip, _IPV6_HOST_BITS), strict=False))
    return str(ip)
