"""What is known of every template, in one SQLite file: who recorded it, its sections, and how it was used.

Files without a record are none of the store's; a record without its file is missing. So whatever kills the process
between the two does no harm. One thread at a time calls it; its calls wait for the disk and raise StorageUnavailable,
or DataLoss for a damaged file.
"""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bottega.activations.disk.record_rows import (
    SCHEMA,
    SECTION_COLUMNS,
    TEMPLATE_COLUMNS,
    Part,
    layout_part,
    part_digest,
    read_section,
    read_template,
    section_place,
    section_row,
    template_row,
)
from bottega.activations.template import SectionKey, SectionRecord, TemplateRecord, TemplateUse
from bottega.storage import SqliteFile

_TEMPLATES = f"SELECT {', '.join(TEMPLATE_COLUMNS)} FROM templates"
_SECTIONS = f"SELECT {', '.join(SECTION_COLUMNS)} FROM sections WHERE number = ?"
_ADD_TEMPLATE = f"REPLACE INTO templates VALUES ({', '.join('?' * len(TEMPLATE_COLUMNS))})"
_ADD_SECTION = f"REPLACE INTO sections VALUES ({', '.join('?' * len(SECTION_COLUMNS))})"
_DROP_SECTION = (
    "DELETE FROM sections WHERE number = ? AND timestep = ? AND noise_level = ? AND half = ? AND controls = ?"
)
_USE = "UPDATE templates SET pinned = ?, uses = ?, used_s = ? WHERE number = ?"
# What no template has any more: sections that a damaged row leaves behind, layouts and maps of what was dropped.
_DROP_STRAYS = (
    "DELETE FROM sections WHERE number NOT IN (SELECT number FROM templates)",
    "DELETE FROM parts WHERE digest NOT IN (SELECT layout FROM sections UNION SELECT map FROM sections)",
)
# Layouts and maps that are at hand while all is read: templates of one model share most of them.
_PARTS_AT_HAND = 256


@dataclass(slots=True, kw_only=True)
class RecordChanges:
    """What is to become of records. templates: numbers, that go. sections: that go, by template. uses: by number."""

    templates: set[int] = field(default_factory=set)
    sections: set[tuple[int, SectionKey]] = field(default_factory=set)
    uses: dict[int, TemplateUse] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.templates or self.sections or self.uses)

    def add(self, other: RecordChanges) -> None:
        """Becomes both; the other one is the later."""
        self.templates |= other.templates
        self.sections |= other.sections
        self.uses.update(other.uses)


class TemplateRecords:
    """Open it before anything else."""

    def __init__(self, path: Path) -> None:
        self._file = SqliteFile(path, SCHEMA)
        self._path = path
        self._inode = 0

    def open(self) -> bool:
        """Makes the file where there is none; a damaged one is kept aside. Raises ConfigError for somebody else's.

        It may be opened again: one that was opened on a disk that could not be written stays so. Whether it is the same
        file then.
        """
        self._file.close()
        self._file.open()
        before, self._inode = self._inode, self._found_inode()
        return self._inode == before

    def close(self) -> None:
        """Lets the file go."""
        self._file.close()

    @property
    def in_place(self) -> bool:
        """Whether the file that is open is still the one in the folder."""
        return self._inode != 0 and self._found_inode() == self._inode

    def read(self) -> tuple[list[TemplateRecord], list[int]]:
        """All templates whose rows are what was written, with such sections; and the numbers of the others."""
        return self._file.transact(_read)

    def drop_strays(self) -> None:
        """Deletes what belongs to no template."""

        def drop(connection: sqlite3.Connection) -> None:
            for statement in _DROP_STRAYS:
                connection.execute(statement)

        self._file.transact(drop)

    def write(
        self,
        changes: RecordChanges,
        *,
        added: Collection[TemplateRecord] = (),
        sections: Collection[tuple[int, SectionRecord]] = (),
    ) -> None:
        """It is on the disk when this returns, all of it or nothing. Templates are added with their sections.

        sections: of templates that are there, by number; they take the place of others with their keys.
        """
        self._file.transact(lambda connection: _write(connection, changes, added, sections))

    def _found_inode(self) -> int:
        try:
            return self._path.stat().st_ino
        except OSError:
            return 0


def _read(connection: sqlite3.Connection) -> tuple[list[TemplateRecord], list[int]]:
    part = _parts(connection)

    def sections(number: int) -> Iterator[SectionRecord]:
        for row in connection.execute(_SECTIONS, (number,)):
            if (section := read_section(row, part)) is not None:
                yield section

    found, damaged = [], []
    for row in connection.execute(_TEMPLATES):
        template = read_template(row, sections)
        if template is None:
            damaged.append(row[0])
        else:
            found.append(template)
    return found, damaged


def _parts(connection: sqlite3.Connection) -> Part:
    """What reads layouts and maps: equal ones are one value."""

    @functools.lru_cache(maxsize=_PARTS_AT_HAND)
    def part(digest: str) -> bytes | None:
        row = connection.execute("SELECT data FROM parts WHERE digest = ?", (digest,)).fetchone()
        return row[0] if row is not None and part_digest(row[0]) == digest else None

    return part


def _write(
    connection: sqlite3.Connection,
    changes: RecordChanges,
    added: Collection[TemplateRecord],
    sections: Collection[tuple[int, SectionRecord]],
) -> None:
    connection.executemany(_DROP_SECTION, [section_place(number, key) for number, key in changes.sections])
    gone = [(number,) for number in changes.templates]
    connection.executemany("DELETE FROM sections WHERE number = ?", gone)
    connection.executemany("DELETE FROM templates WHERE number = ?", gone)
    connection.executemany(
        _USE, [(int(use.pinned), use.uses, use.used_s, number) for number, use in changes.uses.items()]
    )
    for template in added:
        connection.execute(_ADD_TEMPLATE, template_row(template))
    new = [(template.number, section) for template in added for section in template.sections.values()]
    new += sections
    parts = {part for _, section in new for part in (layout_part(section.layout), section.map)}
    # Also those that are there: one that was damaged would keep its place.
    connection.executemany("REPLACE INTO parts VALUES (?, ?)", [(part_digest(part), part) for part in parts])
    connection.executemany(_ADD_SECTION, [section_row(number, section) for number, section in new])
