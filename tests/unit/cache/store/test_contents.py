"""The table of entries: its counts, and that what has gone has gone from everywhere."""

from __future__ import annotations

from bottega.addons.interface.store_link import rank_stores
from bottega.cache.eviction import LCBFU
from bottega.cache.latent import Entry, EntryPicture, EntryRecord, KeptLatent
from bottega.cache.store.contents import EntryTable, new_usage
from bottega.transport import DType
from bottega.v1.cache_pb2 import CacheModelStats


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


def test_what_there_is_of_a_model_is_counted() -> None:
    table = _table()
    assert table.models() == [
        CacheModelStats(model_hash="m", entries=3, latents=6, keys=2),
        CacheModelStats(model_hash="n", entries=1, latents=2, keys=1),
    ]
    assert (len(table), table.size_bytes) == (4, 8 * 32 + 4 * 3)


def test_entries_whose_place_ranks_another_cache_first_are_elsewhere() -> None:
    table, caches = _table(), ("one", "two")
    first = {key: rank_stores(caches, f"{key}/0")[0] for key in "abc"}
    counts = {"a": 2, "b": 1, "c": 1}
    assert table.elsewhere("one", caches) == sum(counts[key] for key in "abc" if first[key] == "two")
    assert table.elsewhere("one", ["one"]) == 0
    table.clear("")
    assert table.elsewhere("one", ["two"]) == 0


def test_keys_and_models_without_entries_vanish() -> None:
    table = _table()
    assert [entry.number for entry in table.clear("n").entries] == [4]
    assert not table.has_key("c")
    assert table.remove(3, 5).entries == []
    assert [entry.number for entry in table.remove(3, 10).entries] == [3]
    assert not table.has_key("b")
    assert table.models() == [CacheModelStats(model_hash="m", entries=2, latents=4, keys=1)]
    table.clear("")
    assert (table.models(), len(table), table.size_bytes, table.named(f"{1:032x}")) == ([], 0, 0, None)


def test_a_candidate_has_the_key_and_the_steps_that_are_left() -> None:
    table = _table()
    table.remove(1, 5)
    found = table.candidates("a", [(1, 0.9), (3, 0.8), (2, 0.7), (9, 0.6)])
    assert [(each.number, each.similarity, each.steps) for each in found] == [(1, 0.9, (10,)), (2, 0.7, (5, 10))]


def test_what_goes_is_told_with_its_files_and_rows() -> None:
    table = _table()
    removal = table.evict(7 * 32 + 4 * 3, 10)
    assert (removal.latents, len(removal.files), removal.entries) == (1, 1, [])
    table.take_changes()
    for _ in range(2):
        table.tick()
        table.use(2, 10)
    removal = table.evict(10**6, 1)
    assert [entry.number for entry in removal.entries] == [1, 3, 4] == sorted(table.take_changes().gone)
    assert table.steps_and_hits(2)[1] == 2
    assert table.newest("", 10)[0].number == 2


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
