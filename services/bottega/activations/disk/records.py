"""Records of all templates in one SQLite file: their recorders, sections and uses.

Files without a record are deleted; records without a file count as missing. So the process may be killed between both
writes. Calls must come from one thread at a time. They block on the disk and raise StorageUnavailable, or DataLoss for
a damaged file.
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
# Rows without a template: sections that a damaged row left behind, and layouts and maps of dropped templates.
_DROP_STRAYS = (
    "DELETE FROM sections WHERE number NOT IN (SELECT number FROM templates)",
    "DELETE FROM parts WHERE digest NOT IN (SELECT layout FROM sections UNION SELECT map FROM sections)",
)
# Layouts and maps that are cached while reading; templates of one model share most of them.
_PARTS_AT_HAND = 256


@dataclass(slots=True, kw_only=True)
class RecordChanges:
    """Changes of records that are to be written."""

    templates: set[int] = field(default_factory=set)
    """Numbers of templates to delete."""
    sections: set[tuple[int, SectionKey]] = field(default_factory=set)
    """Sections to delete, with the template's number."""
    uses: dict[int, TemplateUse] = field(default_factory=dict)
    """New uses, by the template's number."""

    def __bool__(self) -> bool:
        return bool(self.templates or self.sections or self.uses)

    def add(self, other: RecordChanges) -> None:
        """Merge later changes into these."""
        self.templates |= other.templates
        self.sections |= other.sections
        self.uses.update(other.uses)


class TemplateRecords:
    """The SQLite file of records. Call `open` first."""

    def __init__(self, path: Path) -> None:
        self._file = SqliteFile(path, SCHEMA)
        self._path = path
        self._inode = 0

    def open(self) -> bool:
        """Open or create the file, and return whether it is the same file as before.

        A damaged file is set aside. Open it again after the disk failed: a file that was opened on a read-only disk
        stays read-only. Raise ConfigError if it is another program's file.
        """
        self._file.close()
        self._file.open()
        before, self._inode = self._inode, self._found_inode()
        return self._inode == before

    def close(self) -> None:
        self._file.close()

    @property
    def in_place(self) -> bool:
        """Whether the open file is still the one in the folder."""
        return self._inode != 0 and self._found_inode() == self._inode

    def read(self) -> tuple[list[TemplateRecord], list[int]]:
        """Return all templates, with their intact sections, and the numbers of damaged ones."""
        return self._file.transact(_read)

    def drop_strays(self) -> None:
        """Delete rows that belong to no template."""

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
        """Write all or nothing, and return when it is on disk.

        Templates are added with their sections. `sections` are of known templates, by number, and replace those with
        the same key.
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
    """Return a cached reader of layouts and maps."""

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
    # Existing ones are replaced as well, in case they are damaged.
    connection.executemany("REPLACE INTO parts VALUES (?, ?)", [(part_digest(part), part) for part in parts])
    connection.executemany(_ADD_SECTION, [section_row(number, section) for number, section in new])
