"""An entry is never given to a question of another key, however similar the prompts, asked for or pinned."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from bottega.cache.store import LatentStore
from tests.support.cached_latents import MODEL, pins, question, record, running, vector, written

_KEYS = 100
_PAIRS = 10_000
_CHANCE = random.Random(0)


def _key() -> str:
    return f"{_CHANCE.getrandbits(256):064x}"


def _neighbour(key: str) -> str:
    """Of one other digit: nothing that looks at a part of a key tells them apart."""
    place = _CHANCE.randrange(64)
    digit = _CHANCE.choice([each for each in "0123456789abcdef" if each != key[place]])
    return key[:place] + digit + key[place + 1 :]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LatentStore]:
    """With an entry of vector(0) under each of many keys."""
    with running(tmp_path_factory.mktemp("cache")) as made:
        for seed in range(_KEYS):
            record(made, vector(0), key=_key(), seed=seed, steps=(5, 25))
        written(made)
        yield made


def test_a_question_never_meets_an_entry_of_another_key(store: LatentStore) -> None:
    entries = store.entries(MODEL, _KEYS)
    assert len(entries) == _KEYS
    for entry in entries:  # its own key does
        (hit,) = store.ask(question(entry.key), vector(0)).header.hits
        assert (hit.entry, hit.step) == (entry.entry, 25)
    for _ in range(_PAIRS):
        entry = _CHANCE.choice(entries)
        assert store.ask(question(_neighbour(entry.key)), vector(0)).latents == ()


def test_a_pin_never_meets_an_entry_of_another_key(store: LatentStore) -> None:
    entries = store.entries(MODEL, _KEYS)
    for _ in range(_PAIRS // 10):
        entry, other = _CHANCE.sample(entries, 2)
        for key in (other.key, _neighbour(entry.key)):
            assert store.ask(pins((entry.entry, 25), key=key), vector(0)).latents == ()
        assert store.ask(pins((entry.entry, 25), key=entry.key), vector(0)).latents
