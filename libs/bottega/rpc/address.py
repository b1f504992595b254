"""Addresses as the configuration writes them: host:port."""

from __future__ import annotations

import ipaddress

from bottega.errors import ConfigError


def split(address: str) -> tuple[str, int]:
    """Host and port of "host:port". Raises ConfigError when it is none."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ConfigError(f"{address!r} is no address: host:port is wanted, for example 127.0.0.1:8470")
    return host, int(port)


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach "host:port". A name counts as reachable, "localhost" aside."""
    host = split(address)[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
