"""The table of entries: its counts, and that what has gone has gone from everywhere."""

from __future__ import annotations

from bottega.addons.interface.store_link import rank_stores
from bottega.cache.eviction import LCBFU
from bottega.cache.latent import Entry, EntryPicture, EntryRecord, KeptLatent
from bottega.cache.store.contents import EntryTable, new_usage
from bottega.transport import DType


def _record(
    number: int, *, key: str = "a", model: str = "m", steps: tuple[int, ...] = (5, 10), used_at: float = 0.0
) -> EntryRecord:
    entry = Entry(
        number=number,
        name=f"{number:032x}",
        noise=number,
        key=key,
        model_hash=model,
        dtype=DType.FLOAT16,
        shape=(4, 2, 2),
        picture=EntryPicture(height=1, width=1, digest=b"p"),
        recorded_s=1.0,
        place=f"{key}/0",
    )
    latents = {step: KeptLatent(digest=b"d%d" % step, usage=new_usage(step, used_at)) for step in steps}
    return EntryRecord(entry=entry, embedding=b"", parameters=b"", hits=0, latents=latents)


def _table() -> EntryTable:
    table = EntryTable(LCBFU)
    for record in (_record(1), _record(2), _record(3, key="b"), _record(4, key="c", model="n")):
        table.add(record)
    return table


def test_entries_whose_place_ranks_another_cache_first_are_elsewhere() -> None:
    table, caches = _table(), ("one", "two")
    first = {key: rank_stores(caches, f"{key}/0")[0] for key in "abc"}
    counts = {"a": 2, "b": 1, "c": 1}
    assert table.elsewhere("one", caches) == sum(counts[key] for key in "abc" if first[key] == "two")
    assert table.elsewhere("one", ["one"]) == 0
    table.clear("")
    assert table.elsewhere("one", ["two"]) == 0


def test_uses_are_told_once() -> None:
    table = _table()
    table.tick()
    table.use(1, 5)
    changes = table.take_changes()
    assert (changes.uses, list(changes.part_uses)) == ({1: (1,)}, [(1, 5)])
    _, used_at, _ = changes.part_uses[1, 5]
    assert used_at == 1.0
    assert not table.take_changes()
    table.remove(1, 10)
    table.use(1, 10)  # it has gone
    table.use(1, 5)
    table.remove(1, 5)
    changes = table.take_changes()
    assert (changes.part_uses, changes.uses, changes.gone) == ({}, {}, {1})


def test_the_policys_clock_goes_on_from_what_was_used_last() -> None:
    """Else what is recorded after a restart is older than all that was used before it."""
    table = EntryTable(LCBFU)
    for number, used_at in ((1, 7.0), (2, 3.0)):
        table.add(_record(number, used_at=used_at))
    assert table.now == 7.0
    table.tick()
    assert table.now == 8.0
