"""Addresses of services, lists of them, and parsing of the peer addresses that gRPC and the system report.

A list of addresses is one text with commas between them, as in BOTTEGA_ADDRESS, so that a list can be wherever one
address can be.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from bottega.errors import ConfigError

# An IPv6 host is a network, not an address.
_IPV6_PREFIX = 64
_ANY_HOSTS = frozenset({"0.0.0.0", "[::]"})
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


def is_any_host(address: str) -> bool:
    """Return whether "host:port" listens on all addresses of this machine, so that it is no address to call."""
    return split(address)[0] in _ANY_HOSTS


def split_list(addresses: str) -> tuple[str, ...]:
    """Return the addresses in a list, which is one text with commas between them; empty for an empty text."""
    return tuple(address.strip() for address in addresses.split(",")) if addresses else ()


def join_list(addresses: str | Sequence[str]) -> str:
    """Return the list of addresses of services to call as one text.

    Args:
        addresses: One address, a text with commas between several, or a sequence of addresses.

    Raises:
        ConfigError: There is no address, one is not host:port, or one is there twice.
    """
    found = split_list(addresses if isinstance(addresses, str) else ",".join(addresses))
    if not found:
        raise ConfigError("the list of addresses is empty; give at least one host:port")
    for address in found:
        host, port = split(address)
        if port == 0:
            raise ConfigError(f"{address!r} has port 0, at which nothing listens")
        if len(found) > 1 and "/" in host:
            raise ConfigError(f"{address!r} has a scheme; in a list of addresses each is only host:port")
    ends = [_with_ip(address).lower() for address in found]
    if twice := [address for address, end in zip(found, ends, strict=True) if ends.count(end) > 1]:
        raise ConfigError(f"{twice[-1]} is in the list of addresses twice")
    return ",".join(found)


def is_name(address: str) -> bool:
    """Return whether gRPC asks DNS for the host of "host:port", or of a dns: URI. localhost counts as an IP address."""
    if address.startswith("dns:"):
        return True
    try:
        host, _ = split(address)
        ipaddress.ip_address(host.strip("[]"))
    except ConfigError:
        return False
    except ValueError:
        return host != "localhost" and not set(host) & set(":/[]")
    return False


def grpc_target(addresses: str) -> str:
    """Return gRPC's target for an address, or for a list of addresses that one channel calls.

    Raises ConfigError for names in a list, because gRPC resolves one name only, and for IPv4 beside IPv6.
    """
    found = split_list(addresses)
    if len(found) == 1:
        return addresses
    ends = [split(_with_ip(address)) for address in found]
    try:
        versions = {ipaddress.ip_address(host.strip("[]")).version for host, _ in ends}
    except ValueError:
        rule = "a list has IP addresses only; instead of several names give one that resolves to all gateways"
        raise ConfigError(f"{', '.join(filter(is_name, found))}: {rule}") from None
    if len(versions) > 1:
        raise ConfigError("the list mixes addresses of IPv4 and IPv6; give addresses of one kind")
    return f"ipv{versions.pop()}:" + ",".join(f"{host}:{port}" for host, port in ends)


async def resolve(name: str) -> list[str]:
    """Return "IP:port" for each address that DNS has for the host of "name:port". Raises OSError.

    A machine may have an address of IPv4 and one of IPv6, so only addresses of one kind are different gateways.
    """
    host, port = split(name)
    try:
        answers = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"{host} is no name in DNS") from error
    ips = sorted({(family, str(end[0])) for family, _, _, _, end in answers})
    least = min((family for family, _ in ips), default=socket.AF_INET)
    return [f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}" for family, ip in ips if family == least]


async def resolve_list(listed: Sequence[str]) -> Sequence[str]:
    """Return a list of addresses in which DNS names that have several addresses are replaced by these."""
    found = dict[str, None]()
    for address in listed:
        ends: list[str] = []
        if is_name(address):
            with contextlib.suppress(OSError):  # the name itself is kept, and a call to it says why it fails
                ends = await resolve(address)
        found |= dict.fromkeys(ends if len(ends) > 1 else [address])
    return list(found)


def _with_ip(address: str) -> str:
    return address.replace("localhost:", "127.0.0.1:")


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
