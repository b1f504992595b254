"""Addresses in configurations: host:port."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from pydantic import AfterValidator

from bottega.errors import ConfigError


def split(address: str) -> tuple[str, int]:
    """Return host and port of "host:port". Raises ConfigError for other texts."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ConfigError(f"{address!r} is no address: host:port is wanted, for example 127.0.0.1:8470")
    return host, int(port)


def is_loopback(address: str) -> bool:
    """Return whether only this machine can reach "host:port". Names other than "localhost" count as reachable."""
    host = split(address)[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _checked(address: str) -> str:
    """Return a valid address. Raise ValueError otherwise, which pydantic reports with the key."""
    try:
        split(address)
    except ConfigError as error:
        raise ValueError(error.message) from None
    return address


Address = Annotated[str, AfterValidator(_checked)]
"""An address in a configuration."""

OptionalAddress = Annotated[str, AfterValidator(lambda address: _checked(address) if address else "")]
"""An address in a configuration, or an empty text for none."""
