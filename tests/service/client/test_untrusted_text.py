"""Every command of `bottega` with untrusted services: what they say is shown as plain text, and never a traceback."""

from __future__ import annotations

import json
import math
import os
import pty
import re
import select
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import PIL.Image
import PIL.PngImagePlugin
import pytest
from click.testing import Result

from bottega import errors
from bottega.client.cli import main
from bottega.errors import BottegaError, Violation
from tests.fakes.hostile_services import FORGED, HIDDEN, HOSTILE, Manner, serving
from tests.support.terminal import run

# They ask no service: tests of their own show what they say.
LOCAL = {"up", "stop", "logs"}
# Arguments that lead further than a name would; everything else is made from the command's own declaration.
FURTHER: dict[str, list[str]] = {
    "generate": ["a star", "-o", "star.png"],
    "jobs get": ["job-1", "-o", "star.png", "--wait"],
    "cache inspect": ["0f" * 16, "-o", "entry.png"],
    "cache clear": ["--yes"],
    "cache warm": ["prompts.txt", "--at-once", "1"],
    "controlnets where": [HOSTILE],
    "controlnets add": ["edges", "folder"],
    "controlnets profile": ["edges", "edges.png"],
    "loras add": ["ink", "ink.safetensors", "--base", "miniature", "--trigger", "ink"],
    "loras profile": ["ink", *(word for number in range(4) for word in ("--prompt", f"a star {number}"))],
}


def leaves(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield " ".join(path), command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        assert found is not None
        yield from leaves(found, (*path, name))


COMMANDS = {name: command for name, command in leaves(main) if name not in LOCAL}


def arguments_of(name: str) -> list[str]:
    if name in FURTHER:
        return [*name.split(), *FURTHER[name]]
    needed = [item for item in COMMANDS[name].params if isinstance(item, click.Argument) and item.required]
    return [*name.split(), *("edges.png" if isinstance(item.type, click.Path) else "edges" for item in needed)]


@pytest.fixture(autouse=True)
def given(own_folder: Path) -> None:
    """What the commands are given, in the folder that they are run in."""
    PIL.Image.new("RGB", (8, 8)).save("edges.png")
    Path("ink.safetensors").write_bytes(b"weights")
    Path("prompts.txt").write_text(f"a star\n{HOSTILE}\n", encoding="utf-8")


def run_with_arguments(name: str, address: str) -> Result:
    return run(*arguments_of(name), address=address)


def is_plain(result: Result) -> None:
    assert not isinstance(result.exception, Exception), repr(result.exception)
    assert "Traceback" not in result.output, result.output
    assert not HIDDEN & set(result.output), repr(result.output)
    hidden = {letter for letter in result.output if unicodedata.category(letter) in ("Cc", "Cf", "Zl", "Zp")} - {"\n"}
    assert not hidden
    for line in result.output.splitlines():
        assert not line.strip().startswith(FORGED), result.output


@pytest.mark.parametrize(
    "manner",
    [
        Manner(),
        Manner(known=False),
        Manner(number=1e300),
        Manner(number=math.nan),
    ],
    ids=["words", "later enumerations", "large numbers", "no numbers"],
)
def test_every_command_shows_what_services_say_as_plain_text(manner: Manner, own_folder: Path) -> None:
    with serving(manner) as address:
        for name in COMMANDS:
            result = run_with_arguments(name, address)
            is_plain(result)


def refused(kind: type[BottegaError], **metadata: str) -> Callable[[], BottegaError]:
    return lambda: kind(
        HOSTILE,
        metadata={HOSTILE[:40]: HOSTILE, **metadata},
        violations=[Violation(field=HOSTILE, description=HOSTILE), Violation(field="lora", description=HOSTILE)],
        retry_after_s=1e6,  # nobody waits for it
    )


def test_every_command_shows_refusals_as_plain_text() -> None:
    refusals = [refused(errors.QueueFull), refused(errors.DataLoss, loras=HOSTILE), refused(errors.InternalError)]
    for error, names in (
        (refused(errors.InvalidRequest), tuple(COMMANDS)),
        *((error, ("generate", "loras list", "jobs get")) for error in refusals),
    ):
        with serving(Manner(error=error)) as address:
            for name in names:
                result = run_with_arguments(name, address)
                is_plain(result)
                assert result.exit_code != 0


@pytest.mark.parametrize(("name", "end"), [("generate", b"waiting in the queue"), ("top", b"\x1b[1mservice")])
def test_what_moves_on_a_terminal_is_plain_too(name: str, end: bytes) -> None:
    with serving(Manner(number=1)) as address:
        shown_is_plain(on_terminal(arguments_of(name), address, end=end))


def shown_is_plain(shown: str) -> None:
    for hidden in ("\x1b]0;", "\x1b[2J", "\x9b", "\u202e", "\u2066", "\u200b", "\x07", "\x00", "\x08", "\u2028"):
        assert hidden not in shown
    assert "[/b]" in shown
    assert "Traceback" not in shown
    assert not any(line.strip().startswith(FORGED) for line in shown.replace("\r", "\n").split("\n"))


def on_terminal(arguments: list[str], address: str, *, end: bytes) -> str:
    """What a terminal of 100 columns would be sent, until the program ends or has said `end` twice."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "bottega.client.cli", *arguments, "--address", address],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40", "BOTTEGA_FLEET": address},
    )
    os.close(theirs)
    data, deadline_s = b"", time.monotonic() + 30
    try:
        while time.monotonic() < deadline_s and data.count(end) < 2:
            if select.select([ours], [], [], 0.1)[0]:
                try:
                    data += os.read(ours, 1 << 16)
                except OSError:  # it has ended
                    break
    finally:
        process.kill()
        process.wait(10)
        os.close(ours)
    return data.decode(errors="replace")


def test_a_wrong_command_line_is_repeated_as_plain_text(address: str) -> None:
    for arguments in (
        ["generate", "a star", "--like", HOSTILE],
        ["generate", "a star", "--control", HOSTILE],
        ["jobs", "list", "--since", HOSTILE],
        ["jobs", f"--{HOSTILE}"],
        [f"--{HOSTILE}"],
        [HOSTILE],
        ["logs", HOSTILE],
        ["loras", "add", "ink", HOSTILE],
    ):
        # Which no command line can have.
        result = run(*(argument.replace("\x00", "") for argument in arguments), address=address)
        assert result.exit_code in (1, 2), (arguments, result.output)
        assert not (HIDDEN - {"\t"}) & set(result.output), repr(result.output)


def test_a_fault_of_the_command_itself_is_told_as_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError(HOSTILE)

    monkeypatch.setattr("bottega.client.sdk.clients.Client.models", broken)
    with serving(Manner()) as address:
        result = run("models", address=address)
    assert result.exit_code == 1
    assert "ZeroDivisionError" in result.output
    assert "unexpected error in this command" in result.output
    assert not HIDDEN & set(result.output)


def test_logs_are_shown_as_plain_text(own_folder: Path) -> None:
    logs = own_folder / "state" / "logs"
    logs.mkdir(parents=True)
    forged = json.dumps({"time": "2026-01-02 10:00:00,001", "level": "ERROR", "event": FORGED})
    fields = {
        "time": "2026-01-02 10:00:00,000",
        "level": HOSTILE,
        "event": HOSTILE,
        HOSTILE: HOSTILE,
        "exc_info": HOSTILE,
    }
    lines = [
        json.dumps(fields),
        json.dumps({**fields, "request_id": f"a\n{forged}"}, ensure_ascii=False),
        f"a library says \x1b[2J \u202e \r{forged}",
        "[" * 60_000,
    ]
    (logs / "gateway.log").write_bytes("".join(f"{line}\n" for line in lines).encode())
    result, raw = run("logs"), run("logs", "--raw")
    for each in (result, raw):
        is_plain(each)
        assert each.exit_code == 0
    assert len(raw.output.splitlines()) == len(lines)
    assert not any(line.startswith(("{", "10:00:00,001")) for line in result.output.splitlines())


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"prompt": HOSTILE, "sampler": 99}),
        json.dumps({"prompt": HOSTILE, HOSTILE: HOSTILE}),
        json.dumps({"prompt": "a star", "controlnets": [{"name": HOSTILE}]}),
        json.dumps({"prompt": "a star", "controlnets": [{"name": "edges"}], "model": HOSTILE}),
        json.dumps({"prompt": HOSTILE, "model": HOSTILE}),
    ],
    ids=["sampler", "unknown field", "a name that cannot be", "no control image", "drawn"],
)
def test_a_picture_of_unknown_origin_is_drawn_again_or_refused_in_plain_text(own_folder: Path, text: str) -> None:
    info = PIL.PngImagePlugin.PngInfo()
    info.add_itxt("bottega", text)
    PIL.Image.new("RGB", (8, 8)).save("odd.png", pnginfo=info)
    with serving(Manner()) as address:
        is_plain(run("generate", "--like", "odd.png", address=address))
    given = ("edges.png", "ink.safetensors", "odd.png", "prompts.txt")
    drawn = [path.name for path in own_folder.iterdir() if path.name not in given]
    assert all(re.fullmatch(r"[a-z0-9-]+\.png", name) for name in drawn)
