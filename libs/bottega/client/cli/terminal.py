"""How the command speaks: results on stdout, everything else on stderr.

Nothing else here writes to a terminal. Whatever it is given is shown as plain text, one line each, however it came: no
markup is read, and nothing of it steers the terminal. Colours are given beside the text, by `Styled`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import click

from bottega.client.cli.escaping import escaped

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import ProgressColumn

# Of a cell of a table: what no terminal has room for need not be looked at.
_LONGEST_CELL = 400
_HASH_LETTERS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Styled:
    """A piece of a line with a look of its own. colour: by click's names."""

    text: str
    colour: str | None = None
    bold: bool = False
    dim: bool = False


Line = Sequence[str | Styled]


def say(*pieces: str | Styled) -> None:
    """A result: one line."""
    click.echo(_line(pieces))


def note(*pieces: str | Styled) -> None:
    """Something worth knowing on the way: one line."""
    click.echo(_line(pieces), err=True)


def fail(what: str, todo: str | Sequence[Line] = "", *, status: int = 1) -> NoReturn:
    """Says what happened and what to do about it, and ends the command.

    todo: lines, or text that may have several: untrusted text goes through escaped() first.
    """
    note(Styled(text="error:", colour="red", bold=True), f" {what}")
    lines = [(line,) for line in todo.split("\n") if todo] if isinstance(todo, str) else todo
    for line in lines:
        note("  ", *line)
    sys.exit(status)


def confirm(question: str) -> None:
    """Asks, and ends the command unless the answer is yes."""
    click.confirm(_line((question,)), abort=True, err=True)


class PlainTable:
    """A table in the command's one look; columns that begin with > are numbers. Without any name it has no head.

    wraps_last: the last column takes more than one line where there is no room, so that no other one is cut.
    table: for what shows it again and again.
    """

    def __init__(self, *columns: str, wraps_last: bool = False) -> None:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        self.table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold", show_header=any(columns))
        for column in columns:
            justify = "right" if column.startswith(">") else "left"
            self.table.add_column(column.removeprefix(">"), justify=justify, no_wrap=True)  # type: ignore[arg-type]
        self.table.columns[-1].no_wrap = not wraps_last
        self.table.columns[-1].overflow = "fold" if wraps_last else "ellipsis"

    def add_row(self, *cells: str) -> None:
        """One line, or more."""
        from rich.text import Text

        self.table.add_row(*(Text(escaped(cell[:_LONGEST_CELL])) for cell in cells))

    def add_caption(self, *lines: str) -> None:
        """Put lines below it."""
        from rich.text import Text

        self.table.caption = Text("\n".join(map(escaped, lines)))
        self.table.caption_justify = "left"


def print_table(table: PlainTable) -> None:
    """A table as a result; never cut where there is no terminal to fit it into."""
    console = new_console()
    if not console.is_terminal:
        console = new_console(width=200)
    console.print(table.table)


def size_text(size_bytes: int) -> str:
    """Bytes as people read them, such as 3.4 KiB, 120 MiB or 21.3 GiB."""
    if size_bytes < 1 << 20:
        return f"{size_bytes / 2**10:.1f} KiB"
    if size_bytes >= 1 << 30:
        return f"{size_bytes / 2**30:.{2 if size_bytes < 10 << 30 else 1}f} GiB"
    return f"{size_bytes / 2**20:.0f} MiB" if size_bytes >= 10 << 20 else f"{size_bytes / 2**20:.2f} MiB"


def short_hash(digest: str) -> str:
    """As much of a hash as tells it from others here."""
    return digest[:_HASH_LETTERS]


def share_text(share: float) -> str:
    """A share of something, 0 to 1, as people read it, such as 12.3 %; three digits of it count."""
    return f"{share * 100:.3g} %"


def new_console(*, stderr: bool = False, width: int | None = None) -> Console:
    """A console that reads no markup, no emoji codes and no numbers in what it is given."""
    from rich.console import Console

    return Console(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)


def text_column(key: str) -> ProgressColumn:
    """Of a progress bar: the field of its tasks that has this name, as plain text."""
    from rich.progress import ProgressColumn, Task
    from rich.text import Text

    class _PlainColumn(ProgressColumn):
        def render(self, task: Task) -> RenderableType:
            return Text(escaped(str(task.fields[key])), no_wrap=True, overflow="ellipsis")

    return _PlainColumn()


def _line(pieces: Line) -> str:
    return "".join(_piece(piece) for piece in pieces)


def _piece(piece: str | Styled) -> str:
    if isinstance(piece, str):
        return escaped(piece)
    return click.style(escaped(piece.text), fg=piece.colour, bold=piece.bold or None, dim=piece.dim or None)
