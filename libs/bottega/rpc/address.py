"""Addresses as the configuration writes them: host:port."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from pydantic import AfterValidator

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


def _checked(address: str) -> str:
    """As pydantic wants it: what is wrong is a ValueError, which it reports with the key."""
    try:
        split(address)
    except ConfigError as error:
        raise ValueError(error.message) from None
    return address


# Of a key of a configuration: a text that `split` takes.
Address = Annotated[str, AfterValidator(_checked)]

# The same, where empty is none.
OptionalAddress = Annotated[str, AfterValidator(lambda address: _checked(address) if address else "")]
