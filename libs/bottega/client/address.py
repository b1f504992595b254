"""Where the gateway is, unless somebody says otherwise."""

from __future__ import annotations

import os

ADDRESS_VARIABLE = "BOTTEGA_ADDRESS"
DEFAULT_PORT = 8470


def default_address() -> str:
    """host:port from the environment, else the gateway's own default on this machine."""
    return os.environ.get(ADDRESS_VARIABLE) or f"127.0.0.1:{DEFAULT_PORT}"
