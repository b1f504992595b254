"""A latent that is not what was written is never served: it is a miss, and is deleted."""

from __future__ import annotations

from pathlib import Path

from bottega.cache.records import latent_name
from bottega.v1 import cache_pb2
from tests.support.cached_latents import MODEL, latent, question, record, room, running, similar, vector, written


def _file(folder: Path, entry: str, step: int) -> Path:
    return folder / "latents" / entry[:2] / latent_name(entry, step)


def test_a_damaged_latent_is_deleted_and_the_next_one_serves(tmp_path: Path) -> None:
    with running(tmp_path) as store:
        record(store, vector(0))
        written(store)
        (entry,) = store.entries(MODEL, 1)
        file = _file(tmp_path, entry.entry, 25)
        data = bytearray(file.read_bytes())
        data[100] ^= 1
        file.write_bytes(data)
        answer = store.ask(question(), vector(0))
        assert [hit.step for hit in answer.header.hits] == [20]
        assert answer.latents[0].data == latent(0, 20).data
        written(store)
        assert not file.exists()
        found = store.statistics()
        assert (found.damaged, found.evictions, found.bytes) == (1, 0, room(4, 1))
    with running(tmp_path) as store:
        assert list(store.entries(MODEL, 1)[0].steps) == [5, 10, 15, 20]


def test_a_latent_that_cannot_be_read_now_is_passed_over_and_kept(tmp_path: Path) -> None:
    with running(tmp_path) as store:
        record(store, vector(0))
        written(store)
        (entry,) = store.entries(MODEL, 1)
        file = _file(tmp_path, entry.entry, 25)
        data = file.read_bytes()
        file.unlink()
        file.mkdir()  # reading it fails, as it does on a disk that does not answer
        answer = store.ask(question(), vector(0))
        assert (answer.latents, answer.header.outcome) == ((), cache_pb2.CACHE_OUTCOME_UNAVAILABLE)
        record(store, similar(vector(0), 0.92), seed=1)
        written(store)
        answer = store.ask(question(), vector(0))
        assert [(hit.entry == entry.entry, hit.step) for hit in answer.header.hits] == [(False, 20)]
        file.rmdir()
        file.write_bytes(data)
        assert [hit.entry for hit in store.ask(question(), vector(0)).header.hits] == [entry.entry]
        assert store.statistics().damaged == 0


def test_a_damaged_picture_is_not_shown(tmp_path: Path) -> None:
    with running(tmp_path) as store:
        record(store, vector(0))
        written(store)
        (entry,) = store.entries(MODEL, 1)
        (tmp_path / "latents" / entry.entry[:2] / f"{entry.entry}.rgb").write_bytes(b"\xff" * 90)
        details = store.entry(entry.entry)
        assert details is not None
        assert (details.entry, details.picture) == (entry, None)
