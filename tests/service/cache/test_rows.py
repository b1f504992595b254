"""Pictures of one prompt in a row: one at most starts from what another came from, one by one or together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bottega.addons.cache.starts import prompt_digest
from bottega.cache.latent import StoreAnswer
from bottega.cache.store.store import LatentStore
from bottega.v1 import cache_pb2
from bottega.v1.cache_pb2 import CacheStarts
from tests.support.cached_latents import KEY, MODEL, question, record, running, similar, vector, written

PROMPT = prompt_digest("a prompt")
ROW = 6


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LatentStore]:
    """With pictures of eight prompts that are similar to PROMPT, the most similar first."""
    with running(tmp_path) as store:
        for number in range(8):
            record(store, similar(vector(0), 0.99 - number / 1000, number), seed=number)
        written(store)
        yield store


def _ask(store: LatentStore, images: int = 1) -> StoreAnswer:
    return store.ask(question(prompt_digest=PROMPT, images=images), vector(0))


def _entries(*answers: StoreAnswer) -> list[str]:
    return [hit.entry for answer in answers for hit in answer.header.hits]


def test_of_six_requests_one_after_the_other_one_at_most_starts_from_an_entry_of_another(store: LatentStore) -> None:
    started = _entries(*(_ask(store) for _ in range(ROW)))
    assert (len(started), len(set(started))) == (ROW, ROW - 1)
    # Those of other prompts are not in their row.
    other = store.ask(question(prompt_digest=prompt_digest("another")), vector(0))
    assert _entries(other) == started[:1]


def test_the_picture_of_an_entry_is_one_of_its_own_prompts_row(tmp_path: Path) -> None:
    own = question(prompt_digest=prompt_digest("prompt 5"))
    with running(tmp_path) as store:
        record(store, vector(0), seed=5)
        written(store)
        assert len(_entries(store.ask(own, vector(0)))) == 1
        answer = store.ask(own, vector(0))
        assert (_entries(answer), answer.header.outcome) == ([], cache_pb2.CACHE_OUTCOME_RESTING)
        assert answer.header.record, "so that there is another one for later rows"
        assert store.lookups()["resting"] == 1
        for seed in range(10, 15):
            record(store, vector(0), seed=seed, prompt="prompt 5")
        written(store)
        assert len(_entries(store.ask(own, vector(0)))) == 1


def test_pictures_from_noise_are_part_of_the_row_whether_they_are_recorded_or_not(tmp_path: Path) -> None:
    with running(tmp_path) as store:
        record(store, similar(vector(0), 0.98), seed=7)
        written(store)
        # After two starts from the entry come four pictures from noise; then the first start is out of the row.
        asked = [question(prompt_digest=PROMPT, seed=100 + number) for number in range(8)]
        assert [len(_entries(store.ask(each, vector(0)))) for each in asked] == [1, 1, 0, 0, 0, 0, 1, 1]
        together = question(prompt_digest=PROMPT, images=6, seed=200)
        after = [question(prompt_digest=PROMPT, seed=300 + number) for number in range(3)]
        assert [len(_entries(store.ask(each, vector(0)))) for each in (together, *after)] == [0, 1, 1, 0]


def test_entries_that_began_with_the_same_noise_count_as_one(tmp_path: Path) -> None:
    for known in (False, True):  # what was read from the disk counts like what was recorded now
        with running(tmp_path) as store:
            if not known:
                for number in range(3):
                    record(store, similar(vector(0), 0.98, number), seed=7, prompt=f"prompt {number}")
                written(store)
            assert [len(_entries(_ask(store))) for _ in range(4)] == [1, 1, 0, 0]
            together = store.ask(question(prompt_digest="0e" * 32, images=3), vector(0))
            assert len(_entries(together)) == 2


def test_a_latent_that_came_too_late_serves_the_next_picture(store: LatentStore) -> None:
    for _ in range(4):
        (late,) = _entries(_ask(store))
        store.count_starts(CacheStarts(key=KEY, prompt_digest=PROMPT, unused=[late, "0" * 32]))
    assert all(each.hits == 0 for each in store.entries(MODEL, 10))
    assert len(set(_entries(*(_ask(store) for _ in range(ROW))))) == ROW - 1
    assert sum(each.hits for each in store.entries(MODEL, 10)) == ROW


@pytest.mark.parametrize("digest", ["0", "g" * 64, "AB" * 32])
def test_what_is_no_digest_is_refused(store: LatentStore, digest: str) -> None:
    with pytest.raises(ValueError, match="64 hex digits"):
        store.ask(question(prompt_digest=digest), vector(0))
    with pytest.raises(ValueError, match="64 hex digits"):
        store.count_starts(CacheStarts(key=KEY, prompt_digest=digest))
