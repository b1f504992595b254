"""Default addresses of the gateway and its listener for services."""

from __future__ import annotations

import os

from bottega.client.instance import StateFolder
from bottega.state_folder import state_folder

ADDRESS_VARIABLE = "BOTTEGA_ADDRESS"
FLEET_VARIABLE = "BOTTEGA_FLEET"
DEFAULT_PORT = 8470
DEFAULT_FLEET_PORT = 8472


def default_address() -> str:
    """Return the default host:port of the gateway.

    It is $BOTTEGA_ADDRESS, else that of the suite that runs from the state folder, else the default port on this
    machine.
    """
    if chosen := os.environ.get(ADDRESS_VARIABLE):
        return chosen
    running = StateFolder(state_folder()).running()
    return running.address if running else f"127.0.0.1:{DEFAULT_PORT}"


def default_fleet_address(address: str) -> str:
    """Return the default host:port of the listener for services of the gateway at `address`.

    It is $BOTTEGA_FLEET, else that of the suite that runs from the state folder, else the default port on the gateway's
    machine.
    """
    if chosen := os.environ.get(FLEET_VARIABLE):
        return chosen
    record = StateFolder(state_folder()).running()
    if record is not None and _as_number(record.address) == _as_number(address):
        return record.fleet_address
    host, colon, _ = address.rpartition(":")
    return f"{host if colon else address}:{DEFAULT_FLEET_PORT}"


def _as_number(address: str) -> str:
    return address.replace("localhost:", "127.0.0.1:")
