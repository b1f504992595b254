"""Which host a call comes from, for bounds of what one caller may take up. It knows no calls."""

from __future__ import annotations

import ipaddress
from urllib.parse import unquote

# Of IPv6 a host commonly has all the addresses of a /64.
_PREFIX_BITS = 64
_HERE = "loopback"


def caller_host(peer: str) -> str:
    """The host of a gRPC peer, as `ServicerContext.peer()` names it: all that come from one have one name.

    This machine is "loopback", by whatever address it comes; what cannot be told is one host, too.
    """
    kind, _, rest = unquote(peer).partition(":")
    if kind == "unix":
        return _HERE
    try:
        address = ipaddress.ip_address(rest.rpartition(":")[0].strip("[]").partition("%")[0])
    except ValueError:
        return "unknown"
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    if address.is_loopback:
        return _HERE
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((address, _PREFIX_BITS), strict=False))
    return str(address)
