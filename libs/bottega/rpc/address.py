"""Addresses as the configuration writes them: host:port, and where links listen."""

from __future__ import annotations

from pathlib import Path

from bottega.errors import ConfigError
from bottega.transport import Endpoints, TcpEndpoint


def split(address: str) -> tuple[str, int]:
    """Host and port of "host:port". Raises ConfigError when it is none."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ConfigError(f"{address!r} is no address: host:port is wanted, for example 127.0.0.1:8470")
    return host, int(port)


def link_endpoints(listen: str | None, socket: str | Path | None) -> Endpoints:
    """Where links listen: at host:port, and at the path of a unix socket. Raises ConfigError."""
    return Endpoints(tcp=split(listen) if listen else None, unix_path=Path(socket) if socket else None)


def tcp_endpoint(address: str) -> TcpEndpoint | None:
    """What others are told of host:port; None for "". Raises ConfigError."""
    if not address:
        return None
    host, port = split(address)
    return TcpEndpoint(host=host, port=port)
