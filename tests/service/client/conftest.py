"""Gateways, one that follows a script and a real one, and a working folder, for tests of the SDK and the command."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from bottega.client import AsyncClient
from tests.fakes.scripted_gateway import ScriptedGateway, serving
from tests.support.running_gateway import Running, running_gateway


@pytest.fixture
def gateway() -> ScriptedGateway:
    return ScriptedGateway()


@pytest.fixture
def address(gateway: ScriptedGateway) -> Iterator[str]:
    with serving(gateway) as address:
        yield address


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder and a state folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BOTTEGA_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.delenv("BOTTEGA_ADDRESS", raising=False)
    return tmp_path


@pytest.fixture
async def house(own_folder: Path) -> AsyncIterator[Running]:
    """A real gateway in this event loop, without services."""
    async with running_gateway() as made:
        yield made


@pytest.fixture
async def client(house: Running) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(house.address, fleet_address=house.fleet_address) as made:
        yield made
