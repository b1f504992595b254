"""Where what outlives a process is kept, by the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from bottega.state_folder import state_folder


def test_the_state_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("BOTTEGA_STATE", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert state_folder() == tmp_path / ".local" / "state" / "bottega"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_folder() == tmp_path / "bottega"
    monkeypatch.setenv("BOTTEGA_STATE", "/somewhere/else")
    assert state_folder() == Path("/somewhere/else")
