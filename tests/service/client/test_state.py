"""Who may look into a state folder, who holds it, and what is said where it cannot be used."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bottega.client.instance import AlreadyHeld, InstanceRecord, StateFolder
from bottega.client.suite.service_log import ServiceLog
from bottega.state_folder import make_private, owner_of
from bottega.storage import folders
from tests.support.services import Services, gateway_config
from tests.support.terminal import run

NOBODY = 65534
two_users = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    """As most distributions have it, and as it is afterwards."""
    before = os.umask(0o022)
    yield
    assert os.umask(before) == 0o022, "what is held gives the umask back"


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A folder that every user can come to, unlike pytest's own."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = Path(folder)
        path.chmod(0o755)
        yield path


def test_what_a_suite_keeps_is_its_owners_alone(tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "above" / "state")
    with state.hold():
        log = ServiceLog(state.logs, "gateway")
        log.write("a prompt")
        log.close()
        state.write(InstanceRecord(pid=1, address="", fleet_address="", ready=False, children=()))
        (state.config / "gateway.yaml").write_text("{}")
        assert {mode(path) for path in (state.root.parent, state.root, state.logs, state.config)} == {0o700}
        files = [path for path in state.root.rglob("*") if path.is_file()]
        assert len(files) == 4
        assert {mode(path) for path in files} == {0o600}
        assert state.others() == ""


def test_a_folder_that_holds_other_things_is_left_as_it_is_but_for_the_suites_part(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "thesis.tex").touch()
    state = StateFolder(tmp_path)
    with state.hold():
        assert (mode(tmp_path), mode(state.logs), mode(state.root / "suite.lock")) == (0o755, 0o700, 0o600)


def test_only_one_instance_holds_a_state_folder_and_which_is_known(tmp_path: Path) -> None:
    state = StateFolder(tmp_path)
    assert not state.is_held()
    assert state.holders() == ()
    with state.hold():
        assert state.is_held()
        assert state.holders() in ((os.getpid(),), ()), "not every file system tells"
        with pytest.raises(AlreadyHeld) as held, state.hold():
            pass
        assert held.value.holders == state.holders()
    assert not state.is_held()


# The first run, as root, imports all that the second one needs: the other user may not read this installation.
AS_NOBODY = f"""
import json, os, sys
from click.testing import CliRunner
from bottega.client.cli import main
warm, runs = sys.argv[1], json.loads(sys.argv[2])
def run(arguments, folder):
    result = CliRunner().invoke(main, arguments, env={{"BOTTEGA_STATE": folder, "BOTTEGA_ADDRESS": "127.0.0.1:1"}})
    return [result.exit_code, result.stdout, result.stderr]
for arguments in {{tuple(arguments): None for _, arguments in runs}}:
    run(arguments, warm)
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
print(json.dumps([run(arguments, folder) for folder, arguments in runs]))
"""


RunAsNobody = Callable[[list[tuple[Path, list[str]]]], list[tuple[int, str, str]]]


@pytest.fixture
def nobody(tmp_path: Path) -> RunAsNobody:
    """Runs commands as another user, each with a state folder; their statuses and what they said."""

    def run_as_nobody(runs: list[tuple[Path, list[str]]]) -> list[tuple[int, str, str]]:
        said = json.dumps([(str(state), arguments) for state, arguments in runs])
        ended = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, str(tmp_path / "warm"), said],
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        )
        return [(int(status), str(out), str(err)) for status, out, err in json.loads(ended.stdout)]

    return run_as_nobody


@pytest.fixture
def taken() -> Iterator[str]:
    """A port at which nothing can start, so that the suite of the first run does not."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield str(server.getsockname()[1])


@two_users
def test_no_command_fails_badly_for_a_folder_of_another_user_which_is_said(
    nobody: RunAsNobody, open_place: Path, taken: str
) -> None:
    closed = open_place / "closed"
    (closed / "logs").mkdir(parents=True)
    (closed / "suite.lock").touch()
    closed.chmod(0o700)
    commands = [["stop"], ["logs"], ["doctor"], ["up", "-d", "--port", taken], ["up", "--port", taken]]
    runs = [(state, command) for command in commands for state in (closed, closed / "below")]
    theirs = {open_place / "theirs": 0o700, open_place / "readable": 0o755, open_place / "writable": 0o777}
    for folder, bits in theirs.items():
        folder.mkdir()
        folder.chmod(bits)
        os.chown(folder, 12345, 12345)
        runs.append((folder, ["up", "--port", taken]))
    for (state, command), (status, out, said) in zip(runs, nobody(runs), strict=True):
        assert status == 1, command
        assert "Traceback" not in said
        assert "already runs" not in said
        assert str(state) in out + said, "which folder"
        if state in theirs:
            assert "user 12345" in said
            assert "Give another one: --state FOLDER or BOTTEGA_STATE." in said


def test_a_service_keeps_its_files_for_its_owner_whoever_starts_it(tmp_path: Path) -> None:
    earlier = tmp_path / "gateway.state" / "gateway"
    earlier.mkdir(mode=0o755, parents=True)
    with Services(tmp_path) as services:
        services.start("gateway", gateway_config(codec_processes=1), name="gateway")
        kept = [earlier, *earlier.rglob("*")]
        assert {"jobs.sqlite", "images"} <= {path.name for path in kept}
        assert {mode(path) for path in kept if path.is_dir()} == {0o700}
        assert {mode(path) for path in kept if path.is_file()} == {0o600}


def test_folders_of_an_earlier_version_are_closed_to_others(tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "state")
    for folder in (state.root, state.logs, state.config, (state.root / "controlnets"), (state.root / "gateway")):
        folder.mkdir(mode=0o755)
    (state.root / "suite.lock").touch(mode=0o644)
    with state.hold():
        pass
    assert {mode(path) for path in (state.root, state.logs, state.config, (state.root / "controlnets"))} == {0o700}
    assert mode(state.root / "suite.lock") == 0o600
    folders.make_own(state.root / "gateway")
    assert mode(state.root / "gateway") == 0o700


def test_a_folder_of_everybody_stays_so(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    make_private(tmp_path)
    assert mode(tmp_path) == 0o1777
    state = StateFolder(tmp_path)
    with state.hold():
        assert state.others() == "is open to other users"


@two_users
def test_a_lock_that_another_user_holds_is_no_suite_of_ones_own(open_place: Path) -> None:
    (open_place / "suite.lock").touch(mode=0o644)
    code = "import fcntl, sys; f = open('suite.lock'); fcntl.flock(f, fcntl.LOCK_SH); print('held'); sys.stdin.read()"
    with subprocess.Popen(
        ["/usr/bin/env", "python3", "-c", code],
        cwd=open_place,
        user=NOBODY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        result = run("up", "--state", open_place)
        other.kill()
    assert result.exit_code == 1
    assert f"is held by process {other.pid}" in result.stderr
    assert f"of {owner_of_uid(open_place)}" in result.stderr
    assert "No suite of yours runs from there" in result.stderr
    assert "already runs" not in result.stderr


def owner_of_uid(folder: Path) -> str:
    probe = folder / "probe"
    probe.touch()
    os.chown(probe, NOBODY, -1)
    return owner_of(probe)


@two_users
def test_root_is_told_whose_folder_it_works_in(open_place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(open_place, NOBODY, NOBODY)
    monkeypatch.setattr("bottega.client.cli.up.run_suite", lambda *_, **__: None)
    result = run("up", "--state", open_place)
    whose = f"The state folder {open_place} belongs to {owner_of(open_place)}, who can read and change"
    assert whose in " ".join(result.stderr.split())
