"""The scripts of deploy/, which write what stands there."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
RunScript = Callable[[str, Path], None]


@pytest.fixture
def run_script(monkeypatch: pytest.MonkeyPatch) -> RunScript:
    """Run a script of deploy/, which writes to a path."""

    def run(name: str, target: Path) -> None:
        monkeypatch.setattr(sys, "argv", [name, str(target)])
        monkeypatch.syspath_prepend(DEPLOY)
        runpy.run_path(str(DEPLOY / name), run_name="__main__")

    return run
