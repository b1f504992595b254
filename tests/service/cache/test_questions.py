"""What a store of latents answers: by similarity and profile, each picture from another entry, under one key alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bottega.cache.store.store import LatentStore
from bottega.v1 import cache_pb2, generation_pb2
from bottega.v1.cache_pb2 import CacheStart, CacheStarts
from tests.support.cached_latents import (
    KEY,
    MODEL,
    digest,
    latent,
    pins,
    profile,
    question,
    record,
    running,
    similar,
    vector,
    written,
)

HIT = cache_pb2.CACHE_OUTCOME_HIT
MISS = cache_pb2.CACHE_OUTCOME_MISS


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LatentStore]:
    """With one entry, of vector(0)."""
    with running(tmp_path / "cache") as made:
        record(made, vector(0))
        written(made)
        yield made


@pytest.mark.parametrize(("similarity", "step"), [(0.6, 0), (0.66, 5), (0.96, 25), (1.0, 25)])
def test_the_more_similar_a_prompt_is_the_more_steps_are_skipped(
    store: LatentStore, similarity: float, step: int
) -> None:
    answer = store.ask(question(), similar(vector(0), similarity))
    assert answer.header.outcome == (HIT if step else MISS)
    assert [hit.step for hit in answer.header.hits] == ([step] if step else [])
    if step:
        assert answer.header.hits[0].similarity == pytest.approx(similarity, abs=1e-5)
        assert answer.latents[0].data == latent(0, step).data
        assert (answer.latents[0].dtype, answer.latents[0].shape) == (latent(0, step).dtype, latent(0, step).shape)


def test_exact_requests_are_given_nothing(store: LatentStore) -> None:
    for fields in ({"fidelity": generation_pb2.FIDELITY_EXACT}, {"images": 0}):
        answer = store.ask(question(**fields), vector(0))
        assert (list(answer.header.hits), answer.header.outcome, answer.header.record) == ([], 0, True)
    assert sum(store.statistics().lookups.values()) == 0


def test_pictures_of_a_job_start_from_different_entries(tmp_path: Path) -> None:
    with running(tmp_path) as store:
        for seed in range(3):
            record(store, similar(vector(0), 0.99 - 0.01 * seed, seed), seed=seed)
        written(store)
        answer = store.ask(question(images=4), vector(0))
        assert len({hit.entry for hit in answer.header.hits}) == 3 == len(set(digest(answer)))
        assert (answer.header.outcome, answer.header.record) == (MISS, False)
        assert store.ask(question(images=3), vector(0)).header.outcome == HIT


def test_without_a_profile_nothing_is_reused_and_all_is_recorded(tmp_path: Path) -> None:
    with running(tmp_path, measured=False) as store:
        record(store, vector(0))
        written(store)
        answer = store.ask(question(), vector(0))
        assert not answer.header.hits
        assert (answer.header.outcome, answer.header.record) == (cache_pb2.CACHE_OUTCOME_NO_PROFILE, True)


def test_a_key_is_recorded_from_its_second_question_on(tmp_path: Path) -> None:
    with running(tmp_path, doorkeeper=True) as store:
        asked = [store.ask(question(key), vector(0)).header.record for key in (KEY, "00" * 32, KEY, "00" * 32)]
        assert asked == [False, False, True, True]
        record(store, vector(0), key="11" * 32)
        written(store)
        assert store.ask(question("11" * 32), vector(1)).header.record  # it has entries


def test_what_starts_from_a_latent_is_not_recorded(store: LatentStore) -> None:
    assert not store.ask(question(), vector(0)).header.record
    assert store.ask(question(), vector(1)).header.record


def test_a_share_of_hits_is_drawn_from_noise_and_recorded(tmp_path: Path) -> None:
    with running(tmp_path, exploration=0.3, seed=1) as store:
        record(store, vector(0))
        written(store)
        answers = [store.ask(question(), vector(0)) for _ in range(500)]
        explored = [answer for answer in answers if answer.header.outcome == cache_pb2.CACHE_OUTCOME_EXPLORED]
        assert 110 < len(explored) < 190
        assert all(answer.header.record and not answer.latents for answer in explored)
        assert sum(answer.header.outcome == HIT for answer in answers) == 500 - len(explored)
        (entry,) = store.entries(MODEL, 10)
        assert all(store.ask(pins((entry.entry, 5)), vector(0)).latents for _ in range(20)), "pins are kept"


def test_a_pin_is_served_whatever_its_similarity_and_says_which_it_is(tmp_path: Path) -> None:
    with running(tmp_path, measured=False) as store:
        record(store, vector(0))
        written(store)
        (entry,) = store.entries(MODEL, 10)
        answer = store.ask(pins((entry.entry, 10), ("", 0)), similar(vector(0), 0.1))
        (hit,) = answer.header.hits
        assert (hit.entry, hit.step, answer.header.outcome) == (entry.entry, 10, HIT)
        assert hit.similarity == pytest.approx(0.1, abs=1e-5)
        assert answer.latents[0].data == latent(0, 10).data
        assert not answer.header.record


def test_a_pin_that_is_gone_is_left_out(store: LatentStore) -> None:
    (entry,) = store.entries(MODEL, 10)
    answer = store.ask(pins(("0" * 32, 5), (entry.entry, 11), (entry.entry, 5)), vector(0))
    assert answer.header.outcome == MISS
    assert [(hit.entry, hit.step) for hit in answer.header.hits] == [(entry.entry, 5)]


def test_clearing_forgets_the_entries_of_a_model(store: LatentStore, tmp_path: Path) -> None:
    other = "ef" * 32
    record(store, vector(0), key="11" * 32, model=other, seed=7)
    written(store)
    assert store.clear(MODEL) == 1
    assert not store.ask(question(), vector(0)).header.hits
    assert [entry.model_hash for entry in store.entries("", 10)] == [other]
    files = [path.name for path in (tmp_path / "cache" / "latents").glob("??/*")]
    assert len(files) == 6
    assert store.clear() == 1
    assert store.statistics().models == ()
    assert store.statistics().bytes == 0


def test_a_profile_counts_at_once_and_is_forgotten_without_classes(store: LatentStore) -> None:
    strict = profile()
    for threshold in strict.balanced[0].thresholds:
        threshold.similarity = 1.0
    store.set_profile(strict)
    assert not store.ask(question(), similar(vector(0), 0.98)).header.hits
    assert store.profiles() == [strict]
    store.add_profile(profile())  # it has one
    assert store.profiles() == [strict]
    strict.ClearField("balanced")
    strict.ClearField("fast")
    store.set_profile(strict)
    assert store.profiles() == []
    assert store.ask(question(), vector(0)).header.outcome == cache_pb2.CACHE_OUTCOME_NO_PROFILE


@pytest.mark.parametrize(
    "fields",
    [
        {"key": "AB" * 32},
        {"images": 9},
        {"steps": 0},
        {"words": -1},
        {"pinned": [CacheStart(entry="0" * 32, step=5)] * 9},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_question_that_breaks_a_rule_is_refused(store: LatentStore, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"question|key"):
        store.ask(question(**fields), vector(0))


@pytest.mark.parametrize(
    "embedding",
    [
        np.zeros(64, np.float32),
        np.ones(64, np.float64),
        np.ones(32, np.float32),
    ],
    ids=["zero", "float64", "other width than the key's"],
)
def test_an_embedding_that_is_none_is_refused(store: LatentStore, embedding: np.ndarray) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the index has words of its own
        store.ask(question(), embedding)


def test_nearer_entries_whose_latents_are_gone_hide_no_farther_ones(tmp_path: Path) -> None:
    with running(tmp_path) as store:
        for seed in range(1, 20):
            record(store, similar(vector(0), 0.84, seed), seed=seed, steps=(25,))
        record(store, similar(vector(0), 0.7), seed=20, steps=(5,))
        written(store)
        (hit,) = store.ask(question(), vector(0)).header.hits
        assert hit.step == 5
        assert store.ask(question(), vector(100)).header.outcome == MISS


def test_steps_are_counted_as_skipped_once_a_worker_says_so(store: LatentStore) -> None:
    assert store.ask(question(), vector(0)).header.counts_starts
    for starts in (CacheStarts(key=KEY, pictures=1, skipped_steps=24), CacheStarts(key=KEY, pictures=8)):
        store.count_starts(starts)
    assert store.statistics().steps_skipped == 24


@pytest.mark.parametrize(("pictures", "steps"), [(0, 1), (9, 9), (1, -1), (1, 1000)])
def test_steps_that_no_picture_can_have_skipped_are_refused(store: LatentStore, pictures: int, steps: int) -> None:
    with pytest.raises(ValueError, match="0 to 8 pictures"):
        store.count_starts(CacheStarts(key=KEY, pictures=pictures, skipped_steps=steps))
