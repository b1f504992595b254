"""An entry is never given to a question of another key, however similar the prompts, asked for or pinned."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bottega.cache.store.store import LatentStore
from bottega.v1.cache_pb2 import CACHE_OUTCOME_HIT, CacheQuestion, CacheStart
from tests.support.cached_latents import (
    MODEL,
    digest,
    latent,
    pins,
    question,
    record,
    running,
    similar,
    vector,
    written,
)

_KEYS = 40
_PAIRS = 2_000
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
    for _ in range(_PAIRS // 4):
        entry, other = _CHANCE.sample(entries, 2)
        for key in (other.key, _neighbour(entry.key)):
            assert store.ask(pins((entry.entry, 25), key=key), vector(0)).latents == ()
        assert store.ask(pins((entry.entry, 25), key=entry.key), vector(0)).latents


_PLAIN = "0e" * 32
_STYLED = "1e" * 32


def _styled(**fields: Any) -> CacheQuestion:
    """Of a job with LoRAs that come after twelve steps at most."""
    return question(_STYLED, **{"plain_key": _PLAIN, "plain_steps": 12, **fields})


def test_entries_without_loras_serve_none_with_some_but_where_the_store_is_told_so(tmp_path: Path) -> None:
    with running(tmp_path) as store:
        record(store, vector(0), key=_PLAIN)
        written(store)
        (entry,) = store.entries(MODEL, 1)
        assert store.ask(_styled(), vector(0)).latents == ()
        assert store.ask(_styled(pinned=[CacheStart(entry=entry.entry, step=10)]), vector(0)).latents == ()


def test_where_it_is_told_so_they_serve_after_steps_up_to_the_bound_alone(tmp_path: Path) -> None:
    with running(tmp_path, plain_for_loras=True) as store:
        record(store, vector(0), key=_PLAIN, seed=1)
        written(store)
        (plain,) = store.entries(MODEL, 1)

        answer = store.ask(_styled(), vector(0))
        (hit,) = answer.header.hits
        assert (hit.entry, hit.step, hit.without_loras) == (plain.entry, 10, True)
        assert digest(answer) == [hashlib.sha256(latent(1, 10).data).hexdigest()]
        assert store.statistics().holes == 0, "what is later was not evicted"
        assert store.ask(_styled(plain_steps=4), vector(0)).latents == ()
        assert store.ask(_styled(plain_key=""), vector(0)).latents == ()
        assert store.ask(_styled(plain_key="2e" * 32), vector(0)).latents == ()
        # As a picture is drawn again: the step of its LoRAs is given then, and nothing else has to be similar.
        (pinned,) = store.ask(
            _styled(pinned=[CacheStart(entry=plain.entry, step=10)], plain_steps=0), vector(5)
        ).header.hits
        assert pinned.without_loras


def test_entries_of_the_same_loras_go_before_those_without(tmp_path: Path) -> None:
    with running(tmp_path, plain_for_loras=True) as store:
        record(store, vector(0), key=_PLAIN, seed=1)
        record(store, similar(vector(0), 0.8), key=_STYLED, seed=2)
        written(store)
        own = next(entry.entry for entry in store.entries(MODEL, 2) if entry.key == _STYLED)

        (hit,) = store.ask(_styled(), vector(0)).header.hits
        assert (hit.entry, hit.without_loras) == (own, False)
        both = store.ask(_styled(images=2), vector(0)).header
        assert [each.without_loras for each in both.hits] == [False, True]
        assert both.outcome == CACHE_OUTCOME_HIT
