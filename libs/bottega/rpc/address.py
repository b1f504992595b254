"""Addresses in configurations, and parsing of the peer addresses that gRPC and the system report."""

from __future__ import annotations

import functools
import ipaddress
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import unquote

from pydantic import AfterValidator

from bottega.errors import ConfigError

# An IPv6 host is a network, not an address.
_IPV6_PREFIX = 64
# Prefix of IPv4 addresses on a socket of both families.
_IPV4_MAPPED = "::ffff:"


def split(address: str) -> tuple[str, int]:
    """Split "host:port". Raises ConfigError for other texts."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ConfigError(f"{address!r} is not an address; give host:port, for example 127.0.0.1:8470")
    return host, int(port)


def is_loopback(address: str) -> bool:
    """Return whether "host:port" can be reached only from this machine. Of all names, only "localhost" counts so."""
    host = split(address)[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _checked(address: str) -> str:
    """Return the address if it is valid. Else raise ValueError, which pydantic reports with the key."""
    try:
        split(address)
    except ConfigError as error:
        raise ValueError(error.message) from None
    return address


Address = Annotated[str, AfterValidator(_checked)]
"""An address in a configuration, "host:port"."""

OptionalAddress = Annotated[str, AfterValidator(lambda address: _checked(address) if address else "")]
"""An address in a configuration, or "" for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The client that makes a call: its connection and its host."""

    connection: str
    """The client's end of the connection; see `endpoint`."""
    host: str
    """The IP address without the port. An IPv6 network of 64 bits counts as one host."""


def peer_of(peer: str) -> Peer:
    """Parse gRPC's text for a peer, such as ipv4:10.0.0.7:53124 or ipv6:%5B2001:db8::7%5D:53124."""
    kind, _, rest = unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return Peer(connection=peer, host=kind)
    address, _, port = rest.rpartition(":")
    address = address.strip("[]")
    return Peer(connection=endpoint(address, port), host=host_of_address(address) or kind)


def host_of(peer: str) -> str:
    """Return the host in gRPC's text for a peer. Limits per client count by host.

    Each loopback address is a host. All peers without an IP address count as one host.
    """
    return peer_of(peer).host


def endpoint(address: str, port: int | str) -> str:
    """Return a canonical name for one end of a connection, however the system or gRPC writes the address."""
    return f"{address.removeprefix(_IPV4_MAPPED)} {port}"


@functools.lru_cache(maxsize=1024)  # every call of a flood asks for it
def host_of_address(address: str) -> str:
    """Return the host of an IP address; "" if the text is not an IP address."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0].removeprefix(_IPV4_MAPPED))
    except ValueError:
        return ""
    if isinstance(ip, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((ip, _IPV6_PREFIX), strict=False).network_address)
    return str(ip)
