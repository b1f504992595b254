"""How the command speaks: results on stdout, everything else on stderr. Knows neither services nor pictures."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def say(text: str = "") -> None:
    """A result."""
    click.echo(_printable(text))


def note(text: str = "") -> None:
    """Something worth knowing on the way."""
    click.echo(_printable(text), err=True)


def fail(what: str, todo: str = "", *, status: int = 1) -> NoReturn:
    """Says what happened and what to do about it, and ends the command."""
    note(f"{click.style('error:', fg='red', bold=True)} {what}")
    for line in todo.splitlines():
        note(f"  {line}")
    sys.exit(status)


def stderr_console() -> Console:
    """A console for what moves, such as progress bars."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def new_table(*columns: str) -> Table:
    """A table in the command's one look; columns that begin with > are numbers. Without any name it has no head."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold", show_header=any(columns))
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left", no_wrap=True)
    return table


def print_table(table: Table) -> None:
    """A table as a result; never cut where there is no terminal to fit it into."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    console.print(table)


def _printable(text: str) -> str:
    """Names of files and arguments may be bytes that are no Unicode, which not every terminal's encoding can carry."""
    return text.encode(errors="backslashreplace").decode()
