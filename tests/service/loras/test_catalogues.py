"""Both catalogues of LoRAs: in SQLite and in PostgreSQL. One suite for both."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psycopg
import pytest

from bottega.errors import DataLoss, LoraExists, LoraNotFound
from bottega.loras.catalogue import LoraCatalogue
from bottega.loras.records import CatalogueRecord
from bottega.loras.shared_catalogue import SharedCatalogue
from tests.support.postgresql import new_database


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """An open catalogue, a way to open it again, and a way to damage the row of a name."""

    catalogue: LoraCatalogue | SharedCatalogue
    again: Callable[[], LoraCatalogue | SharedCatalogue]
    damage: Callable[[str], None]


@pytest.fixture(params=["sqlite", "postgresql"])
async def opened(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Catalogue]:
    with contextlib.ExitStack() as stack:
        if request.param == "sqlite":
            path = tmp_path / "catalogue.db"

            def damage(name: str) -> None:
                with contextlib.closing(sqlite3.connect(path)) as connection, connection:
                    connection.execute("UPDATE loras SET rank = 99 WHERE name = ?", (name,))

            def again() -> LoraCatalogue | SharedCatalogue:
                return LoraCatalogue(path)

        else:
            url = stack.enter_context(new_database())

            def damage(name: str) -> None:
                change = "UPDATE bottega_loras SET description = replace(description, '\"rank\": 4', '\"rank\": 99')"
                with psycopg.connect(url, autocommit=True) as connection:
                    connection.execute(change + " WHERE name = %s", (name,))

            def again() -> LoraCatalogue | SharedCatalogue:
                return SharedCatalogue(url)

        catalogue = again()
        await catalogue.open()
        try:
            yield Catalogue(catalogue=catalogue, again=again, damage=damage)
        finally:
            await catalogue.close()


def _record(name: str, *, digest: str = "", base: str = "miniature", pinned: bool = False) -> CatalogueRecord:
    return CatalogueRecord(
        name=name,
        digest=(digest or name.encode().hex()).ljust(64, "0"),
        base=base,
        rank=4,
        modules=2,
        size_bytes=1 << 33,
        text_bytes=10,
        trigger_words=("in ink", "日本"),
        format="kohya",
        ignored=("a.b",),
        bounds=((20, 3),),
        pinned=pinned,
        added_s=1234567.891,
    )


async def test_records_outlive_the_process_and_are_listed_by_name(opened: Catalogue) -> None:
    records = [_record(name) for name in ("b", "a@shop", "a", "B", "a/c")]
    for record in records:
        assert await opened.catalogue.add(record) == record
    await opened.catalogue.add(_record("other", base="sdxl"))
    again = opened.again()
    await opened.catalogue.close()
    await again.open()
    in_order = sorted(records, key=lambda record: record.name)
    assert await again.page(size=10, after="", base="miniature") == in_order
    assert await again.page(size=2, after="a", base="") == in_order[2:4]
    assert len(await again.all()) == 6
    assert await again.get("a@shop") == records[1]
    await again.close()


async def test_digests_have_all_their_names_sizes_and_pins(opened: Catalogue) -> None:
    catalogue = opened.catalogue
    one, two = await catalogue.add(_record("one", digest="ab")), await catalogue.add(_record("two", digest="ab"))
    other = await catalogue.add(_record("other", pinned=True))
    assert await catalogue.names(one.digest) == ["one", "two"]
    assert await catalogue.known([one.digest, "0" * 64]) == {one.digest: one.size_bytes}
    assert await catalogue.pinned() == {other.digest: other.size_bytes}
    await catalogue.change("two", lambda record: replace(record, pinned=True))
    assert await catalogue.pinned() == {other.digest: other.size_bytes, two.digest: two.size_bytes}
    await catalogue.remove("one")
    assert await catalogue.names(one.digest) == ["two"]
    for call in (catalogue.get, catalogue.remove):
        with pytest.raises(LoraNotFound, match="no LoRA one"):
            await call("one")


async def test_a_name_keeps_its_lora_and_takes_new_trigger_words(opened: Catalogue) -> None:
    catalogue = opened.catalogue
    first = await catalogue.add(_record("a"))
    later = replace(first, trigger_words=("else",), added_s=1.0)
    assert await catalogue.add(later) == first
    assert await catalogue.add(later, rewords=True) == replace(first, trigger_words=("else",))
    for other in (_record("a", digest="ff"), _record("a", base="sdxl")):
        with pytest.raises(LoraExists, match="remove it first"):
            await catalogue.add(other)
    assert (await catalogue.get("a")).trigger_words == ("else",)


async def test_a_damaged_row_is_skipped_and_replaced(opened: Catalogue, caplog: pytest.LogCaptureFixture) -> None:
    catalogue = opened.catalogue
    records = [await catalogue.add(_record(name)) for name in ("a", "b", "c")]
    opened.damage("b")
    assert await catalogue.page(size=2, after="", base="") == [records[0], records[2]]
    assert await catalogue.all() == [records[0], records[2]]
    assert [record.__dict__["lora"] for record in caplog.records if "is damaged" in record.message] == ["b"]
    with pytest.raises(DataLoss, match="bottega loras rebuild"):
        await catalogue.get("b")
    assert await catalogue.add(records[1]) == records[1]
    assert await catalogue.all() == records
