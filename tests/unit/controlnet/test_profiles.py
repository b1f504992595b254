"""What a ControlNet server remembers of what was measured."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bottega.adapter_rules import MAX_PROFILES
from bottega.controlnet.catalogue import SCHEMA, ProfileStore
from bottega.storage import SqliteDatabase
from bottega.v1.hosted_pb2 import ResidualProfile


def profile(model_hash: str = "m", similarity: float = 0.995) -> ResidualProfile:
    return ResidualProfile(model_hash=model_hash, num_inference_steps=20, similarity=similarity)


@contextlib.asynccontextmanager
async def opened(file: Path) -> AsyncIterator[ProfileStore]:
    database = SqliteDatabase(file, SCHEMA)
    await database.open()
    profiles = ProfileStore(database)
    await profiles.read()
    try:
        yield profiles
    finally:
        await database.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state" / "controlnets.db"


async def test_a_profile_is_there_after_a_restart_and_a_newer_one_takes_its_place(file: Path) -> None:
    async with opened(file) as first:
        await first.set("ab", profile("m", 0.9))
        await first.set("ab", profile("n", 0.98))
        await first.set("ab", profile("m", 0.995))
        await first.set("cd", profile("m", 1.0))
    async with opened(file) as again:
        assert list(again.of("ab")) == [profile("n", 0.98), profile("m", 0.995)]
        assert list(again.of("cd")) == [profile("m", 1.0)]
        assert list(again.of("ef")) == []


async def test_of_very_many_base_models_and_controlnets_the_first_are_forgotten(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bottega.controlnet.catalogue.MAX_PROFILED", 2)
    async with opened(file) as profiles:
        for number in range(MAX_PROFILES + 2):
            await profiles.set("ab", profile(f"m{number}"))
        assert [each.model_hash for each in profiles.of("ab")] == [f"m{number}" for number in range(2, 18)]
        for digest in ("cd", "ef"):
            await profiles.set(digest, profile())
    async with opened(file) as again:
        assert [bool(again.of(digest)) for digest in ("ab", "cd", "ef")] == [False, True, True]


async def test_a_damaged_row_is_left_out_and_told_of(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(file) as first:
        await first.set("ab", profile("m", 0.9))
        await first.set("cd", profile("m", 0.9))
    with contextlib.closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("UPDATE profiles SET digest = 'ef' WHERE digest = 'ab'")
    async with opened(file) as again:
        assert [list(again.of(digest)) for digest in ("ab", "cd", "ef")] == [[], [profile("m", 0.9)], []]
    assert len(caplog.records) == 1


async def test_a_profile_of_other_rules_is_not_used(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(file) as first:
        await first.set("ab", profile("m", 7))
    async with opened(file) as again:
        assert list(again.of("ab")) == []
    assert len(caplog.records) == 1
