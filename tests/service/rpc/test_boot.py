"""A service as a process: the turns of its life, what ends it, what it says and with which status when it cannot."""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.scripted_service import FREED_MIB, KEPT_VARIABLE, main

ROOT = Path(__file__).resolve().parents[3]
SERVICES = sorted(path.parent.name for path in (ROOT / "services" / "bottega").glob("*/__main__.py"))
COMMAND = [sys.executable, "-m", "tests.fakes.scripted_service"]
TURNS = ["made", "entered", "warm", "finished", "shut down", "left"]
PATIENCE_S = 30.0

Process = subprocess.Popen[str]


def started(folder: Path, config: object, *options: str, kept_mib: int = 0) -> Process:
    """The scripted service, with this configuration."""
    file = folder / "config.yaml"
    file.write_text(json.dumps(config), encoding="utf-8")
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*COMMAND, "--config", str(file), *options],
        cwd=ROOT,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        env={**os.environ, KEPT_VARIABLE: str(kept_mib)},
    )


def ended(process: Process) -> tuple[int, list[str], str]:
    """Its status, the turns that it had, and what it said."""
    try:
        said, errors = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    return process.returncode, said.splitlines(), errors


def serving(process: Process) -> dict[str, str]:
    assert process.stderr
    line: dict[str, str] = json.loads(process.stderr.readline())
    assert line["event"] == "serving"
    return line


def end_stdin(process: Process) -> None:
    assert process.stdin
    process.stdin.close()
    process.stdin = None  # communicate would flush it


ENDS: dict[str, Callable[[Process], None]] = {
    "SIGTERM": lambda process: process.send_signal(signal.SIGTERM),
    "the end of stdin": end_stdin,
}


@pytest.mark.parametrize("end", ENDS)
def test_a_service_says_in_json_that_it_serves_and_lives_to_its_last_turn(tmp_path: Path, end: str) -> None:
    process = started(tmp_path, {"server": {"drain_grace_s": 1.0}}, "--stop-with-stdin")
    line = serving(process)
    assert line["service"] == "scripted"
    assert line["address"].startswith("127.0.0.1:")
    ENDS[end](process)
    status, turns, said = ended(process)
    assert (status, turns) == (0, TURNS)
    assert json.loads(said.splitlines()[-1])["event"] == "stopped"


@pytest.mark.parametrize(
    ("turn", "error", "status", "turns"),
    [
        ("entered", "ConfigError", 2, ["made"]),
        ("warm", "Unavailable", 1, ["made", "entered", "shut down", "left"]),
    ],
)
def test_an_error_at_a_turn_is_a_line_and_a_status_and_what_was_made_is_taken_down(
    tmp_path: Path, turn: str, error: str, status: int, turns: list[str]
) -> None:
    seen = ended(started(tmp_path, {"fails_at": turn, "error": error}))
    assert seen == (status, turns, f"bottega.scripted: {turn} it cannot be\n")


def test_a_service_that_cannot_go_on_drains_and_ends_with_the_error(tmp_path: Path) -> None:
    status, turns, said = ended(started(tmp_path, {"fails_at": "served"}))
    assert (status, turns) == (1, TURNS)
    *lines, last = said.splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["serving", "draining"]
    assert last == "bottega.scripted: served it cannot be"


Boot = Callable[..., tuple[int, list[str], str]]


@pytest.fixture
def boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Boot]:
    """Boots the scripted service in this process, to an end before it is entered; says what `ended` does."""

    def boot(config: object, *options: str) -> tuple[int, list[str], str]:
        file = tmp_path / "config.yaml"
        file.write_text(json.dumps(config), encoding="utf-8")
        monkeypatch.setattr(sys, "argv", ["scripted", "--config", str(file), *options])
        status = main()
        said = capsys.readouterr()
        return status, said.out.splitlines(), said.err

    umask, files = os.umask(0o077), resource.getrlimit(resource.RLIMIT_NOFILE)
    yield boot
    os.umask(umask)
    resource.setrlimit(resource.RLIMIT_NOFILE, files)


@pytest.mark.parametrize(("error", "status"), [("ConfigError", 2), ("Unavailable", 1)])
def test_an_error_when_it_is_made_is_a_line_and_a_status(boot: Boot, error: str, status: int) -> None:
    assert boot({"fails_at": "made", "error": error}) == (status, [], "bottega.scripted: made it cannot be\n")


def test_a_fault_of_ours_is_not_made_a_line(boot: Boot) -> None:
    with pytest.raises(RuntimeError, match="made it cannot be"):
        boot({"fails_at": "made", "error": "RuntimeError"})


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"fials_at": "warm"}, "fials_at: unknown key; known at the top level: server, fails_at, error, frees"),
        ({"server": {"log_level": "loud"}}, "server.log_level"),
        ("no mapping", "(top level)"),
    ],
)
def test_a_key_that_cannot_be_used_is_named_and_nothing_is_made(
    boot: Boot, tmp_path: Path, config: object, named: str
) -> None:
    status, turns, said = boot(config)
    assert (status, turns) == (2, [])
    assert said.startswith(f"bottega.scripted: {tmp_path / 'config.yaml'} cannot be used:\n")
    assert named in said


def test_a_file_that_is_not_there_is_named(boot: Boot, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere.yaml"
    status, turns, said = boot({}, "--config", str(nowhere))
    assert (status, turns) == (2, [])
    assert said == f"bottega.scripted: {nowhere} cannot be read: No such file or directory\n"


def test_freed_memory_is_given_back_at_rest_unless_the_service_has_it_from_the_start(tmp_path: Path) -> None:
    first_mib: dict[int, int] = {}
    rested_mib: dict[int, int] = {}
    for kept_mib in (0, FREED_MIB):
        process = started(tmp_path, {"frees": True}, kept_mib=kept_mib)
        serving(process)
        process.terminate()
        status, turns, _ = ended(process)
        assert status == 0
        first_mib[kept_mib], rested_mib[kept_mib], young_objects, frozen_objects = map(int, turns[2].split())
        assert young_objects > 1000, "the collector looks as often as Python's own"
        assert frozen_objects > 1000, "the collector looks at what was imported"
    assert first_mib[FREED_MIB] - first_mib[0] > FREED_MIB * 0.75
    assert rested_mib[FREED_MIB] - rested_mib[0] > FREED_MIB * 0.75


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_has_the_same_command_line(
    service: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(f"bottega.{service}.__main__")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "argv", [service, "--help"])
    with pytest.raises(SystemExit) as ends:
        module.main()
    assert ends.value.code == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"usage: python -m bottega.{service} [-h] [--config FILE] [--stop-with-stdin]"
    assert said[2].startswith("Bottega's ")
    assert said[-2].startswith("  --config FILE      YAML file; every key has a default, see ")
    assert said[-1] == "  --stop-with-stdin  stop, as after SIGTERM, when the stdin pipe is closed"
