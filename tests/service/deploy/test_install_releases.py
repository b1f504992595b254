"""What deploy/install.sh makes a release of, who may read it, and when it goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.stubbed_machine import StubbedMachine


@pytest.fixture
def machine(tmp_path: Path) -> StubbedMachine:
    return StubbedMachine(tmp_path)


def test_services_may_enter_releases_whatever_the_umask(machine: StubbedMachine) -> None:
    machine.install()
    machine.home.chmod(0o750)  # as an install.sh before this left it
    machine.change_checkout("the second")
    machine.install()
    folders = [machine.root, machine.home, *(machine.home / "releases").glob("*"), machine.root / "etc/bottega"]
    assert {oct(folder.stat().st_mode & 0o777) for folder in folders} == {"0o755"}
    assert oct((machine.home / "run").stat().st_mode & 0o777) == "0o755"
