"""What deploy/install.sh makes a release of, who may read it, and when it goes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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


@contextmanager
def started_from(release: Path) -> Iterator[int]:
    """As a service is: the release's Python is in its command."""
    with subprocess.Popen([release / "bin/python", "60"], executable="/bin/sleep") as process:
        try:
            yield process.pid
        finally:
            process.kill()


@contextmanager
def mapping_of(release: Path) -> Iterator[int]:
    """Its command says nothing of the release, but a library of it is loaded."""
    library = release / "lib.so"
    library.write_bytes(bytes(4096))
    code = (
        "import mmap, sys; path = sys.stdin.readline().strip(); file = open(path, 'rb')\n"
        "mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ); print('mapped', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{library}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "mapped\n"
        yield process.pid


@pytest.mark.parametrize("running", [started_from, mapping_of])
def test_a_release_stays_while_a_process_runs_in_it(
    machine: StubbedMachine, running: Callable[[Path], AbstractContextManager[int]]
) -> None:
    machine.install()
    first = machine.current
    with running(machine.home / "releases" / first) as pid:
        for line in ("the second", "the third"):
            machine.change_checkout(line)
            said = machine.install("--keep", "1")
        assert f"release {first} is kept: processes still run in it ({pid})\n" in said
        assert first in machine.releases
        assert len(machine.releases) == 3
    said = machine.install("--keep", "1")
    assert f"removing release {first}" in said
    assert len(machine.releases) == 2, "the current one and the one before it"


def test_below_a_root_folder_no_systemd_is_needed(machine: StubbedMachine, tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for folder in reversed(machine.path.split(os.pathsep)):
        for program in Path(folder).glob("*"):
            if not program.name.startswith("systemd-"):
                (programs / program.name).unlink(missing_ok=True)
                (programs / program.name).symlink_to(program)
    machine.path = str(programs)
    assert "release 1.0-" in machine.install()
    assert not (machine.root / "etc/group").exists()
    assert machine.run("rollback").returncode == 1, "there is nothing to go back to"
    machine.change_checkout("the second")
    machine.install()
    assert machine.run("rollback").returncode == 0
