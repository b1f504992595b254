"""Files and records of a store together: what is loaded, what is deleted, and what survives damage."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from pathlib import Path

from bottega.blobstore.records import (
    NewRows,
    RecordChanges,
    RecordSchema,
    RecordTable,
    StoredRecord,
    shared_by_digest,
    shared_digest,
)
from bottega.blobstore.writer import BlobDisk, Completion

SCHEMA = RecordSchema(
    what="the records of a test",
    application_id=7,
    version=1,
    remedy="run it again",
    records=RecordTable(name="albums", fixed=("number INTEGER", "title TEXT"), changing=("uses INTEGER",)),
    parts=RecordTable(
        name="pages",
        fixed=("number INTEGER", "place INTEGER", "file TEXT", "layout TEXT"),
        key_columns=2,
        changing=("seen REAL",),
    ),
    shared=("layout",),
)
Album = tuple[str, int, dict[int, bytes | None]]
"""Title, uses, and layouts by place."""


def _disk(folder: Path) -> BlobDisk:
    return BlobDisk(folder, files="pages", names=re.compile("[0-9a-f]{4}"), schema=SCHEMA)


def _name(number: int, place: int) -> str:
    return f"{number:02x}{place:02x}"


def _add(disk: BlobDisk, number: int, *layouts: bytes) -> None:
    for place in range(len(layouts)):
        disk.files.write(_name(number, place), b"page")
    rows = NewRows(
        records=(((number, f"album {number}"), (0,)),),
        parts=tuple(
            ((number, place, _name(number, place), shared_digest(layout)), (0.0,))
            for place, layout in enumerate(layouts)
        ),
        shared=shared_by_digest(layouts),
    )
    disk.write(RecordChanges(), rows)


def _load(disk: BlobDisk) -> dict[int, Album]:
    found: dict[int, Album] = {}

    def complete(stored: StoredRecord, names: set[str]) -> Completion:
        pages = {part.key[1]: part for part in stored.parts if part.values[2] in names}
        number, title = stored.row.values
        if pages:
            layouts = {place: stored.shared(part.values[3]) for place, part in pages.items()}
            found[number] = title, stored.row.use[0], layouts
        missing = [part.key for part in stored.parts if part.key[1] not in pages]
        return Completion(files=[part.values[2] for part in pages.values()], missing=missing)

    disk.open()
    disk.load(complete)
    disk.tidy(RecordChanges())
    return found


def _execute(folder: Path, statement: str) -> list[tuple[object, ...]]:
    with contextlib.closing(sqlite3.connect(folder / "records.db")) as records, records:
        return records.execute(statement).fetchall()


def test_what_was_written_is_loaded_with_its_changes(tmp_path: Path) -> None:
    disk = _disk(tmp_path)
    assert _load(disk) == {}
    _add(disk, 1, b"a", b"b")
    _add(disk, 2, b"a")
    disk.tidy(RecordChanges(uses={1: (3,)}, part_uses={(1, 0): (0.5,)}, gone_parts={(1, 1)}))
    disk.records.close()
    again = _disk(tmp_path)
    assert _load(again) == {1: ("album 1", 3, {0: b"a"}), 2: ("album 2", 0, {0: b"a"})}
    assert _execute(tmp_path, "SELECT seen FROM pages WHERE number = 1") == [(0.5,)]
    assert not again.files.path(_name(1, 1)).exists(), "no record names it any more"
    assert _execute(tmp_path, "SELECT count(*) FROM shared") == [(1,)]
    again.records.close()


def test_damaged_rows_are_deleted_and_the_rest_is_loaded(tmp_path: Path) -> None:
    disk = _disk(tmp_path)
    _load(disk)
    for number in range(1, 5):
        _add(disk, number, b"a", b"b")
    _execute(tmp_path, "UPDATE albums SET title = 'another' WHERE number = 1")
    _execute(tmp_path, "UPDATE pages SET file = '0300' WHERE number = 2 AND place = 0")
    _execute(tmp_path, "UPDATE albums SET number = 9 WHERE number = 3")
    disk.files.remove([_name(4, 0)])
    assert _load(disk) == {2: ("album 2", 0, {1: b"b"}), 4: ("album 4", 0, {1: b"b"})}
    assert _execute(tmp_path, "SELECT number, place FROM pages") == [(2, 1), (4, 1)]
    assert _execute(tmp_path, "SELECT number FROM albums") == [(2,), (4,)]
    assert disk.files.open() == {_name(2, 1), _name(4, 1)}
    disk.records.close()


def test_a_damaged_shared_value_is_replaced_by_the_next_part_that_has_it(tmp_path: Path) -> None:
    disk = _disk(tmp_path)
    _load(disk)
    _add(disk, 1, b"a")
    _execute(tmp_path, "UPDATE shared SET data = x'00'")
    assert _load(disk)[1][2] == {0: None}
    _add(disk, 2, b"a")
    assert {number: layouts for number, (_, _, layouts) in _load(disk).items()} == {1: {0: b"a"}, 2: {0: b"a"}}
    disk.records.close()
