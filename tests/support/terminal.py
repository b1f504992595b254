"""The `bottega` command as in a terminal, run in the test's own process."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from click.testing import CliRunner, Result

from bottega.client.cli import main

if TYPE_CHECKING:
    from tests.support.running_gateway import Running

NO_UNICODE = "a\udcff"  # what a byte of a command line that is no UTF-8 becomes


def run(*arguments: object, address: str = "", fleet: str = "") -> Result:
    """address: of the gateway. fleet: where it lists its fleet, if elsewhere: the scripted one serves both there."""
    said = [*map(str, arguments), *(["--address", address] if address else [])]
    return CliRunner().invoke(main, said, env={"BOTTEGA_FLEET": fleet or address or None})


async def run_at(gateway: Running, *arguments: object) -> Result:
    """With a gateway of this event loop: in a thread beside it."""
    return await asyncio.to_thread(run, *arguments, address=gateway.address, fleet=gateway.fleet_address)
