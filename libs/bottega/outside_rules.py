"""Rules for addresses outside the suite that a caller names, such as a webhook.

A caller who names a URL must not reach what only the service can reach: its own host, private networks, the metadata
address of a cloud (server-side request forgery). So an operator lists the hosts that may be called, and even a listed
name is not called at an address inside unless the operator allows that network. `bottega.outside_address` has the HTTP
transport that keeps these rules. This module does not import httpx, which takes half a second and 20 MiB that a service
does not need before it calls the first URL.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import ConfigDict, Field

from bottega.errors import AddressRefused
from bottega.strict import STRICT

if TYPE_CHECKING:
    import httpx

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

ANY_HOST = "*"
"""Entry of `OutsideRules.hosts` that allows every host with public addresses."""
MAX_URL_BYTES = 2048

# Not public, from IANA's registries of special-purpose addresses and of multicast. Python's `is_global` depends on its
# version. 168.63.129.16 is public by its number, but is Azure's metadata server.
_INSIDE_V4 = tuple(
    map(
        ipaddress.IPv4Network,
        (
            "0.0.0.0/8",
            "10.0.0.0/8",
            "100.64.0.0/10",
            "127.0.0.0/8",
            "168.63.129.16/32",
            "169.254.0.0/16",
            "172.16.0.0/12",
            "192.0.0.0/24",
            "192.0.2.0/24",
            "192.88.99.0/24",
            "192.168.0.0/16",
            "198.18.0.0/15",
            "198.51.100.0/24",
            "203.0.113.0/24",
            "224.0.0.0/4",
            "240.0.0.0/4",
        ),
    )
)
# All public IPv6 addresses are in 2000::/3. The exceptions are IETF protocols with Teredo, documentation and 6to4.
_PUBLIC_V6 = ipaddress.IPv6Network("2000::/3")
_INSIDE_V6 = tuple(map(ipaddress.IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# Refused even in a network that the operator allows: nobody means these by a range such as 169.254.0.0/16.
_NEVER = tuple(
    map(
        ipaddress.ip_network,
        (
            "0.0.0.0/8",
            "100.100.100.200/32",
            "168.63.129.16/32",
            "169.254.169.254/32",
            "169.254.170.0/24",
            "224.0.0.0/4",
            "255.255.255.255/32",
            "::/128",
            "fd00:ec2::254/128",
            "fd20:ce::254/128",
            "ff00::/8",
        ),
    )
)

_PRINTABLE = re.compile(r"[!-\[\]-~]+")  # ASCII without spaces and the backslash, which parsers read differently
_AFTER_AUTHORITY = re.compile("[/?#]")
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
# Resolvers read names that end so as IPv4 addresses: 2130706433, 0x7f.1, 0177.0.0.1.
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_NOT_ALLOWED = "the URL's host is not allowed here"
_MAX_NAME_BYTES = 253
_MAX_PORT = 65535
_DEFAULT_PORTS = {"https": 443, "http": 80}


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideRules:
    """The hosts and addresses that a service may call because a caller names them. By default there are none."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    hosts: tuple[str, ...] = ()
    """Hosts that may be called: names, *.NAME for all names below one, addresses, or * for every public host.

    Empty: none, and requests that name a URL are refused.
    """
    networks: tuple[str, ...] = ()
    """Private networks, such as 10.20.0.0/16, in which the listed hosts may have their addresses.

    Without them only public addresses are called. With the host "*" callers can reach every address of these networks,
    because they can make a name that points to it. A URL that has such an address instead of a name is allowed only if
    `hosts` lists the address. Multicast addresses and those of cloud metadata services are never called.
    """
    ports: tuple[Annotated[int, Field(ge=1, le=65535)], ...] = (80, 443)
    """Ports that may be called. Empty: all."""
    plain_http: bool = False
    """Whether http:// is allowed, where anyone on the way can read and change what is sent."""

    def __post_init__(self) -> None:
        for host in self.hosts:
            if host != ANY_HOST and not _is_name(host.removeprefix("*.")) and address_of(host) is None:
                raise ValueError(f"hosts: {host!r} is no host name, *.NAME, address or *")
        _parsed(self.networks)  # raises ValueError

    @property
    def allows_any(self) -> bool:
        """Whether any host may be called."""
        return bool(self.hosts)

    def check(self, url: str) -> httpx.URL:
        """Return the parsed URL. Raise AddressRefused, with a sentence for the caller, if its text breaks a rule.

        Host names are not resolved.
        """
        import httpx

        if len(url) > MAX_URL_BYTES or not _PRINTABLE.fullmatch(url):
            raise AddressRefused(f"a URL has 1 to {MAX_URL_BYTES} printable ASCII characters, no spaces or backslashes")
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL:
            raise AddressRefused("this is no URL") from None
        if "@" in _AFTER_AUTHORITY.split(url.partition("://")[2], maxsplit=1)[0]:  # httpx drops an empty user name
            raise AddressRefused("the URL must not contain a user name or a password")
        self._check_parts(parsed)
        self._check_host(host_in(parsed))
        return parsed

    def check_address(self, text: str) -> None:
        """Raise AddressRefused if an IP address must not be called."""
        address = address_of(text.partition("%")[0])
        if address is None:
            raise AddressRefused("the host has something else than addresses")
        if _is_in(address, _NEVER) or not (_is_public(address) or _is_in(address, _parsed(self.networks))):
            raise AddressRefused("the host's address is not public")

    def _check_parts(self, url: httpx.URL) -> None:
        schemes = ("https", "http") if self.plain_http else ("https",)
        if url.scheme not in schemes:
            raise AddressRefused(f"the URL must begin with {' or '.join(f'{scheme}://' for scheme in schemes)}")
        if url.fragment:
            raise AddressRefused("the URL must not contain a fragment (#)")
        port = _DEFAULT_PORTS[url.scheme] if url.port is None else url.port
        if not 1 <= port <= _MAX_PORT or (self.ports and port not in self.ports):
            allowed = ", ".join(map(str, sorted(self.ports))) or f"1 to {_MAX_PORT}"
            raise AddressRefused(f"port {port} is not allowed; allowed: {allowed}")

    def _check_host(self, host: str) -> None:
        address = address_of(host)
        if address is not None:
            self.check_address(host)
            # A caller who may name any address of a network inside could scan it.
            if address not in map(address_of, self.hosts) and not (ANY_HOST in self.hosts and _is_public(address)):
                raise AddressRefused(_NOT_ALLOWED)
        elif not _is_name(host):
            raise AddressRefused("the URL's host is neither a name nor an address in its usual form")
        elif not any(_matches(host, pattern) for pattern in self.hosts):
            raise AddressRefused(_NOT_ALLOWED)


def host_in(url: httpx.URL) -> str:
    """Return the host of a URL, as it is compared and resolved."""
    return url.raw_host.decode("ascii").removesuffix(".")


@functools.lru_cache(maxsize=256)
def _parsed(networks: tuple[str, ...]) -> tuple[Network, ...]:
    return tuple(map(ipaddress.ip_network, networks))


def address_of(host: str) -> Address | None:
    """Return the IP address that a host is in its usual form, or None."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_name(host: str) -> bool:
    labels = host.split(".")
    if len(host) > _MAX_NAME_BYTES or not all(_LABEL.fullmatch(label) for label in labels):
        return False
    return not _NUMBER.fullmatch(labels[-1])


def _matches(host: str, pattern: str) -> bool:
    return pattern in (ANY_HOST, host) or (pattern.startswith("*.") and host.endswith(pattern[1:]))


def _forms(address: Address) -> Iterator[Address]:
    """Yield the address, and the IPv4 address that it stands for, if any."""
    yield address
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            yield address.ipv4_mapped
        elif address in _NAT64:
            yield ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)


def _is_in(address: Address, networks: Sequence[Network]) -> bool:
    return any(form in network for form in _forms(address) for network in networks)


def _is_public(address: Address) -> bool:
    *_, innermost = _forms(address)
    if isinstance(innermost, ipaddress.IPv4Address):
        return not _is_in(innermost, _INSIDE_V4)
    return innermost in _PUBLIC_V6 and not _is_in(innermost, _INSIDE_V6)
