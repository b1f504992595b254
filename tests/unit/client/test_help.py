"""The help of every command, as a newcomer reads it on a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator

import click
from click.testing import CliRunner

from bottega.client.cli import main

COLUMNS = 80


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from commands(found, (*path, name))


def test_the_help_of_every_command_fits_the_terminal_and_cuts_no_summary() -> None:
    for path in commands(main):
        _assert_fits(path)


def _assert_fits(path: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(main, [*path, "--help"], terminal_width=COLUMNS, prog_name="bottega")
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    assert [line for line in lines if len(line) > COLUMNS] == []
    assert [line for line in lines if line.endswith("...") and not line.startswith("Usage:")] == []
    without_help = [line for line in lines if line.startswith("  -") and not line.split("  ")[-1].strip()]
    assert without_help == []


def test_the_list_of_commands_says_what_each_command_says_itself() -> None:
    assert isinstance(main, click.Group)
    context = click.Context(main)
    listed = CliRunner().invoke(main, ["--help"]).output.split("Commands:")[1]
    said = dict(line.split(maxsplit=1) for line in listed.strip().splitlines())
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None
        assert said[name] == command.get_short_help_str(limit=110)
