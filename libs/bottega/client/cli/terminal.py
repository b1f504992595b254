"""The terminal output of the command: results on stdout, everything else on stderr.

All output of the command goes through this module, because prompts, names, errors and log lines come over the network,
from anybody. So every text is escaped and shown on one line: markup is not interpreted, and characters that could
control the terminal, hide text or mislead become visible. Colours are set by `Styled`, never by the text itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal, NoReturn

import click

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.progress import ProgressColumn
    from rich.table import Table
import unicodedata

LONGEST = 16_000
"""Maximum number of characters that are shown of one text; an untrusted text may have some MiB."""
_CUT = " ... ({} more letters)"

# Unicode categories: control, format (bidirectional overrides and isolates, zero width), line and paragraph separators,
# lone surrogates, private use, and unassigned in this Python's Unicode version.
_HIDDEN = frozenset({"Cc", "Cf", "Zl", "Zp", "Cs", "Co", "Cn"})
# Invisible characters of other categories: fillers, a joiner, vowels, the Braille blank.
_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0")
# Variation selectors. Emoji need two of them; the others are invisible here.
_SELECTORS = range(0xFE00, 0xFE10)
_USED_SELECTORS = "\ufe0e\ufe0f"
_MORE_SELECTORS = range(0xE0100, 0xE01F0)
# Joiners are valid between emoji and between letters of scripts without case, but not in Latin, Greek and Cyrillic.
_JOINERS = "\u200c\u200d"
_JOINED = frozenset({"So", "Sk", "Lo", "Mn", "Mc"})
# Languages put up to three marks on a letter; more would cover the lines above and below.
_MOST_MARKS = 4
_MARKS = frozenset({"Mn", "Me"})
# Characters of a table's cell: no terminal has room for more.
_LONGEST_CELL = 400
_HASH_LETTERS = 12
# Columns of a terminal in which wrapped text is still readable.
_NARROWEST_TEXT = 20
# Columns between two columns of a table, and at its two edges, in rich's SIMPLE_HEAD.
_GAP = 3
_EDGES = 2
# Columns at which captions wrap in a file or a pipe.
_WIDTH_OF_FILES = 200


def escaped(text: str) -> str:
    """Return a text as one line, in which invisible characters are escaped as in Python's string literals."""
    if text.isascii() and text.isprintable() and len(text) <= LONGEST:
        return text
    shown, marks = [], 0
    for index, letter in enumerate(text[:LONGEST]):
        marks = marks + 1 if unicodedata.category(letter) in _MARKS else 0
        hidden = marks > _MOST_MARKS or _is_hidden(text, index)
        shown.append(letter.encode("unicode_escape").decode() if hidden else letter)
    if len(text) > LONGEST:
        shown.append(_CUT.format(len(text) - LONGEST))
    return "".join(shown)


def escaped_lines(text: str) -> list[str]:
    """Return the lines of a text, each escaped. For texts of several lines, such as a traceback."""
    return [escaped(line.expandtabs()) for line in text.split("\n")]


def escaped_and_cut(text: str, width: int) -> str:
    """Return a text escaped, with white space as single spaces, and cut to a width in columns of the terminal."""
    from rich.text import Text

    # Far more than fits into the columns, including white space and marks.
    begun = text[: 20 * width]
    shown = Text(escaped(" ".join(begun.split())))
    if len(begun) < len(text):
        shown.append("…")
    shown.truncate(width, overflow="ellipsis")
    return shown.plain


def _is_hidden(text: str, index: int) -> bool:
    letter = text[index]
    if letter in _JOINERS:
        return not all(_is_joined(near) for near in (text[index - 1 : index], text[index + 1 : index + 2]))
    if ord(letter) in _SELECTORS:
        return letter not in _USED_SELECTORS
    return unicodedata.category(letter) in _HIDDEN or letter in _BLANK or ord(letter) in _MORE_SELECTORS


def _is_joined(letter: str) -> bool:
    return letter != "" and unicodedata.category(letter) in _JOINED


@dataclass(frozen=True, slots=True, kw_only=True)
class Styled:
    """A piece of a line that has its own colour and weight."""

    text: str
    colour: str | None = None
    """One of Click's names of colours."""
    bold: bool = False
    dim: bool = False


Line = Sequence[str | Styled]


def say(*pieces: str | Styled) -> None:
    """Print a line of the result, on stdout."""
    click.echo(_line(pieces))


def note(*pieces: str | Styled) -> None:
    """Print a remark, such as progress or a hint, on stderr."""
    click.echo(_line(pieces), err=True)


def fail(what: str, todo: str | Sequence[Line] = "", *, status: int = 1) -> NoReturn:
    """Print an error and advice, and end the command.

    Args:
        todo: The advice as lines, or as a text of several lines. Untrusted text in it must be escaped already.
    """
    note(Styled(text="error:", colour="red", bold=True), f" {what}")
    lines = [(line,) for line in todo.split("\n") if todo] if isinstance(todo, str) else todo
    for line in lines:
        note("  ", *line)
    sys.exit(status)


def is_interactive() -> bool:
    """Return whether the command runs at a terminal, so that it can ask questions."""
    return sys.stdin.isatty()


def confirm(question: str) -> None:
    """Ask a question, and end the command unless the answer is yes."""
    click.confirm(_line((question,)), abort=True, err=True)


class PlainTable:
    """A table that adapts to the width at which it is shown.

    If it is too wide, optional columns are dropped first, and a line below the table names them. Then text wraps.
    Headers and cells are never cut.

    Args:
        columns: Headers. A column whose header begins with > is right-aligned and never wraps. If all headers are
            empty, the table is shown without them.
        wraps: Headers of columns whose text may wrap. The text of the last column always may.
        optional: Headers of columns that may be dropped, the least important first.
    """

    def __init__(self, *columns: str, wraps: Sequence[str] = (), optional: Sequence[str] = ()) -> None:
        last = columns[-1].removeprefix(">")
        self._columns = tuple(
            _Column(
                header=name.removeprefix(">"),
                is_number=name.startswith(">"),
                may_wrap=not name.startswith(">") and name in {*wraps, last},
            )
            for name in columns
        )
        self._optional = tuple(optional)
        self._rows: list[tuple[str, ...]] = []
        self._caption: tuple[str, ...] = ()

    def add_row(self, *cells: str) -> None:
        """Add a row. Cells that are missing at its end are empty."""
        texts = [escaped(cell[:_LONGEST_CELL]) for cell in cells]
        self._rows.append((*texts, *[""] * (len(self._columns) - len(texts))))

    def add_caption(self, *lines: str) -> None:
        self._caption = tuple(map(escaped, lines))

    @property
    def table(self) -> Table:
        """The table with all its columns, in rich's form."""
        return self._rich_table(range(len(self._columns)))

    @property
    def full_width(self) -> int:
        """Width in terminal columns at which every cell fits on one line."""
        return _table_width(self._widths(range(len(self._columns))))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        shown = self._shown_at(options.max_width)
        is_too_narrow = _table_width(self._widths(shown, wrapped=True)) > options.max_width
        yield self._rich_table(shown, wraps_all=is_too_narrow)

    def _widths(self, indices: Iterable[int], *, wrapped: bool = False) -> list[int]:
        """Return the width that each column needs, with its text on one line, or wrapped as far as that is allowed."""
        from rich.cells import cell_len

        widths = []
        for index in indices:
            column = self._columns[index]
            header = cell_len(column.header)
            width = max([header, *(cell_len(row[index]) for row in self._rows)])
            widths.append(max(header, min(width, _NARROWEST_TEXT)) if wrapped and column.may_wrap else width)
        return widths

    def _shown_at(self, width: int) -> Sequence[int]:
        """Return the indices of the columns that fit into this width, and of all columns that are not optional."""
        left_out: set[int] = set()
        headers = [column.header for column in self._columns]
        for name in self._optional:
            shown = [index for index in range(len(headers)) if index not in left_out]
            if _table_width(self._widths(shown, wrapped=True)) <= width:
                break
            if name in headers:
                left_out.add(headers.index(name))
        return [index for index in range(len(headers)) if index not in left_out]

    def _rich_table(self, shown: Sequence[int], *, wraps_all: bool = False) -> Table:
        """Return these columns as a table of rich; `wraps_all` lets all columns wrap, except right-aligned ones."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        has_head = any(column.header for column in self._columns)
        table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold", show_header=has_head)
        for index in shown:
            column = self._columns[index]
            justify: Literal["left", "right"] = "right" if column.is_number else "left"
            may_wrap = column.may_wrap or (wraps_all and not column.is_number)
            table.add_column(column.header, justify=justify, no_wrap=not may_wrap, overflow="fold")
        for row in self._rows:
            table.add_row(*(Text(row[index]) for index in shown))
        left_out = [column.header for index, column in enumerate(self._columns) if index not in shown]
        caption = [*self._caption, *([f"a wider terminal shows more: {', '.join(left_out)}"] if left_out else [])]
        if caption:
            table.caption = Text("\n".join(caption))
            table.caption_justify = "left"
        return table


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    header: str
    is_number: bool
    may_wrap: bool


def _table_width(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1) + _EDGES


def print_table(table: PlainTable) -> None:
    """Print a table as a result. A file or a pipe gets all columns, and each row on one line, unless COLUMNS is set."""
    console = new_console()
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console = new_console(width=max(table.full_width, _WIDTH_OF_FILES))
    console.print(table)


def print_facts(facts: Iterable[tuple[str, str]], *, caption: str = "") -> None:
    """Print pairs of label and text as a table without headers."""
    table = PlainTable("", "")
    for label, text in facts:
        table.add_row(label, text)
    if caption:
        table.add_caption(caption)
    print_table(table)


def duration_text(seconds: float) -> str:
    """Return a rough duration, such as 40 s, 12 min, 3.5 h or 4 d."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86_400:.0f} d"


def size_text(size_bytes: int) -> str:
    """Return a size, such as 3.4 KiB, 120 MiB or 21.3 GiB."""
    if size_bytes < 1 << 20:
        return f"{size_bytes / 2**10:.1f} KiB"
    if size_bytes >= 1 << 30:
        return f"{size_bytes / 2**30:.{2 if size_bytes < 10 << 30 else 1}f} GiB"
    return f"{size_bytes / 2**20:.0f} MiB" if size_bytes >= 10 << 20 else f"{size_bytes / 2**20:.2f} MiB"


def moment_text(moment: datetime) -> str:
    """Return a time, such as 2026-11-21 10:30 UTC."""
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def short_hash(digest: str) -> str:
    """Return the first digits of a hash, enough to distinguish it from others."""
    return digest[:_HASH_LETTERS]


def share_text(share: float) -> str:
    """Return a share, given as 0 to 1, as a percentage with three significant digits, such as 12.3 %."""
    return f"{share * 100:.3g} %"


def new_console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return a rich console that prints text unchanged, without markup, emoji codes and highlighting."""
    from rich.console import Console

    return Console(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)


def text_column(key: str) -> ProgressColumn:
    """Return a column of a progress bar that shows the field `key` of its tasks, escaped."""
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
