"""A gateway that follows a script, and a working folder, for tests of the SDK and of the command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.scripted_gateway import ScriptedGateway, serving


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
