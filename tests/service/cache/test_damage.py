"""A latent that is not what was written is never served: it is a miss, and is deleted."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import numpy as np
import pytest

from bottega.cache.disk.latent_files import LatentFiles, latent_name
from bottega.cache.index import KeyedIndex
from bottega.v1 import cache_pb2
from tests.support.cached_latents import (
    KEY,
    MODEL,
    latent,
    pins,
    question,
    record,
    room,
    running,
    similar,
    vector,
    written,
)

# Of SDXL's at 512 pixels: the digest is of all of a file, however large.
_BYTES = 4 * 64 * 64 * 2


@pytest.mark.parametrize("flips", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_every_flipped_bit_is_found(tmp_path: Path, flips: int) -> None:
    chance = random.Random(0)
    files = LatentFiles(tmp_path)
    files.open()
    data = chance.randbytes(_BYTES)
    digest = hashlib.sha256(data).digest()
    name = latent_name("ab" * 16, 5)
    files.write(name, data)
    found = 0
    with (tmp_path / "ab" / name).open("r+b", buffering=0) as file:
        for bit in chance.sample(range(8 * _BYTES), flips):
            place, flipped = bit // 8, data[bit // 8] ^ (1 << bit % 8)
            file.seek(place)
            file.write(bytes([flipped]))
            found += files.read(name, digest=digest, size_bytes=_BYTES) is None
            file.seek(place)
            file.write(data[place : place + 1])
    assert found == flips
    assert files.read(name, digest=digest, size_bytes=_BYTES) == data


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


@pytest.mark.parametrize("damage", ["gone", "shorter", "longer", "empty", "another's"])
def test_whatever_happened_to_a_file_is_a_miss(tmp_path: Path, damage: str) -> None:
    index = KeyedIndex()
    with running(tmp_path, index=index) as store:
        record(store, vector(0), steps=(5,))
        record(store, vector(1), seed=1, steps=(5,))
        written(store)
        other, entry = store.entries(MODEL, 2)
        file = _file(tmp_path, entry.entry, 5)
        data = file.read_bytes()
        match damage:
            case "gone":
                file.unlink()
            case "shorter":
                file.write_bytes(data[:-1])
            case "longer":
                file.write_bytes(data + b"\0")
            case "empty":
                file.write_bytes(b"")
            case _:
                file.write_bytes(_file(tmp_path, other.entry, 5).read_bytes())
        answer = store.ask(pins((entry.entry, 5)), vector(0))
        assert (answer.latents, answer.header.outcome) == ((), cache_pb2.CACHE_OUTCOME_MISS)
        assert store.ask(question(), vector(0)).latents == ()
        written(store)
        assert [left.entry for left in store.entries(MODEL, 2)] == [other.entry]
        assert not _file(tmp_path, entry.entry, 5).exists()
        assert index.entries(KEY) == 1, "what has no latents left is not searched any more"


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


def test_of_many_flipped_bits_in_a_stores_latents_none_goes_out(tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    with running(tmp_path) as store:
        for seed in range(40):
            record(store, vector(seed), seed=seed)
        written(store)
        entries = {entry.parameters.prompt: entry.entry for entry in store.entries(MODEL, 100)}
        for path in (tmp_path / "latents").glob("??/*@*"):
            data = bytearray(path.read_bytes())
            data[chance.integers(len(data))] ^= 1 << int(chance.integers(8))
            path.write_bytes(data)
        for seed in range(20):
            assert store.ask(question(images=3), similar(vector(seed), 0.97)).latents == ()
        for seed in range(20, 40):
            entry = entries[f"prompt {seed}"]
            assert store.ask(pins(*((entry, step) for step in (5, 10, 15, 20, 25))), vector(0)).latents == ()
        assert store.statistics().damaged == 200
        assert store.entries(MODEL, 100) == []


def test_a_damaged_picture_is_not_shown(tmp_path: Path) -> None:
    with running(tmp_path) as store:
        record(store, vector(0))
        written(store)
        (entry,) = store.entries(MODEL, 1)
        (tmp_path / "latents" / entry.entry[:2] / f"{entry.entry}.rgb").write_bytes(b"\xff" * 90)
        details = store.entry(entry.entry)
        assert details is not None
        assert (details.entry, details.picture) == (entry, None)
