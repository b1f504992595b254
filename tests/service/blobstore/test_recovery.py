"""After a restart or a kill a store has what it had, without what was interrupted, damaged or put there by others.

Both stores that use blobstore keep these promises.
"""

from __future__ import annotations

import contextlib
import random
import signal
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.blob_stores import CASES, StoreCase
from tests.support.forked_services import start_program

# After "begun" a store reads for some 30 ms; after "writing" it records, replaces and evicts.
_MOMENTS = (("begun", 0.1), ("writing", 0.3))

Case = StoreCase[Any]
pytestmark = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def _run_until_killed(case: Case, folder: Path, line: str, after_s: float) -> list[str]:
    """What it said before it was killed, some time after that line."""
    lines = []
    with contextlib.closing(start_program(case.writer, str(folder), service=case.service)) as writer:
        for found in writer.output:
            lines.append(found.decode().strip())
            if lines[-1] == line:
                time.sleep(after_s)
                break
        status = writer.kill()
        lines += writer.output.read().decode().split("\n")
    assert status == -signal.SIGKILL, f"it ended by itself, and said why: {lines}"
    return lines


@pytest.mark.parametrize("kills", [2, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_no_kill_leaves_anything_torn(case: Case, tmp_path: Path, kills: int) -> None:
    chance = random.Random(kills)
    for kill in range(kills):
        line, most_s = _MOMENTS[(kill + 1) % 2]
        assert line in _run_until_killed(case, tmp_path, line, chance.uniform(0.0, most_s))
    case.look_through(tmp_path)
    assert not list(tmp_path.glob("*.damaged-*"))
    assert not list((tmp_path / case.files / "incoming").iterdir())


def test_files_without_a_record_are_deleted_and_foreign_ones_are_not(case: Case, tmp_path: Path) -> None:
    with case.running(tmp_path) as store:
        case.record(store, 0)
    files = tmp_path / case.files
    (files / "ab").mkdir(exist_ok=True)
    orphans = [files / "ab" / case.orphan(), files / "incoming" / case.orphan()]
    foreign = [files / "ab" / "notes.txt", files / "notes.txt"]
    for path in (*orphans, *foreign):
        path.write_bytes(b"something")
    with case.running(tmp_path) as store:
        assert case.serves(store, 0)
        assert not any(path.exists() for path in orphans)
        assert all(path.exists() for path in foreign)


def test_a_record_without_its_files_is_gone_and_others_are_not(case: Case, tmp_path: Path) -> None:
    with case.running(tmp_path) as store:
        case.record(store, 0)
        others = set(case.paths(tmp_path))
        case.record(store, 1)
    for path in set(case.paths(tmp_path)) - others:
        path.unlink()
    with case.running(tmp_path) as store:
        assert (case.serves(store, 0), case.serves(store, 1)) == (True, False)
    with contextlib.closing(sqlite3.connect(tmp_path / "records.db")) as records:
        for table in case.tables:
            numbers = {number for (number,) in records.execute(f"SELECT number FROM {table}")}
            assert len(numbers) == 1, "the records know, too"


@pytest.mark.parametrize("damage", ["gone", "shorter", "another's", "flipped"])
def test_a_file_that_is_not_what_it_was_is_never_served(case: Case, tmp_path: Path, damage: str) -> None:
    with case.running(tmp_path) as store:
        case.record(store, 0)
        others = case.paths(tmp_path)
        case.record(store, 1)
        for path in set(case.paths(tmp_path)) - set(others):
            data = path.read_bytes()
            match damage:
                case "gone":
                    path.unlink()
                case "another's":
                    path.write_bytes(others[0].read_bytes())
                case "flipped":
                    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
                case _:
                    path.write_bytes(data[:-1])
        assert not case.serves(store, 1)
        assert case.serves(store, 0)
        assert store.statistics().damaged >= 1
        assert store.statistics().trouble == ""


def test_a_record_with_a_flipped_bit_is_not_believed(case: Case, tmp_path: Path) -> None:
    with case.running(tmp_path) as store:
        for name in range(2):
            case.record(store, name)
    table = case.tables[0]
    with contextlib.closing(sqlite3.connect(tmp_path / "records.db")) as records, records:
        first = f"SELECT min(number) FROM {table}"
        records.execute(f"UPDATE {table} SET checksum = checksum + 1 WHERE number = ({first})")
    with case.running(tmp_path) as store:
        assert (case.serves(store, 0), case.serves(store, 1)) == (False, True)
        assert store.statistics().trouble == ""
        case.record(store, 0)
        assert case.serves(store, 0)
        assert len(case.paths(tmp_path)) == 2 * case.files_per_record


def test_records_that_are_destroyed_are_set_aside_and_the_store_starts_empty(case: Case, tmp_path: Path) -> None:
    with case.running(tmp_path) as store:
        case.record(store, 0)
        case.set_profile(store)
    (tmp_path / "records.db").write_bytes(b"\xff" * 8192)
    with case.running(tmp_path) as store:
        assert case.count(store) == 0
        assert case.paths(tmp_path) == []
        assert store.profiles()
        case.record(store, 0)
        assert case.serves(store, 0)
    assert list(tmp_path.glob("records.damaged-*.db"))


def test_a_damaged_profile_is_ignored(case: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with case.running(tmp_path) as store:
        case.set_profile(store)
    with case.running(tmp_path) as store:
        assert store.profiles()
    (file,) = (tmp_path / "profiles").iterdir()
    file.write_text(file.read_text(encoding="utf-8").replace("0.", "0.1", 1), encoding="utf-8")
    with case.running(tmp_path) as store:
        assert store.profiles() == []
    assert case.damaged_profile in caplog.text
