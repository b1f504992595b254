"""A process that keeps a store of cached latents at work, and says on stdout how far it is: for kills.

It never ends by itself. Lines are "begun"; "sound N" when what was there has been read and looked through, all N
latents; "writing" when it has written something then. It ends with status 1, and says why, where something was not as
it was recorded.

Its budget is small, so that there are always evictions; its index makes sketches from few entries of a key on, so that
it does so at every start, and as the keys fill.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
from pathlib import Path

from bottega.cache.index.key_index import KeyedIndex
from bottega.cache.index.vector_index import IndexSettings
from bottega.cache.store.store import LatentStore
from tests.support.cached_latents import (
    WAIT_S,
    latent,
    pins,
    profile,
    question,
    record,
    room,
    settings,
    similar,
    vector,
)

KEYS = tuple(f"{number:064x}" for number in range(3))
_BUDGET_BYTES = room(300, 100)
_SEEDS = 200


def store_of(folder: Path) -> LatentStore:
    """As every process of such a test has it."""
    index = KeyedIndex(settings=IndexSettings(flat_entries=16))
    given = settings(folder, budget_bytes=_BUDGET_BYTES, batch_share=0.05, retry_s=0.02)
    return LatentStore(given, index=index)


def look_through(store: LatentStore) -> int:
    """Reads every latent there is; how many. Raises AssertionError for one that is not what was recorded."""
    number, entries = 0, store.entries("", 10_000)
    for entry in entries:
        seed = int(entry.parameters.prompt.removeprefix("prompt "))
        assert entry.key == KEYS[seed % 3], "of another key"
        answer = store.ask(pins(*((entry.entry, step) for step in entry.steps), key=entry.key), vector(seed))
        assert [hit.step for hit in answer.header.hits] == list(entry.steps), "a latent is gone"
        for hit, found in zip(answer.header.hits, answer.latents, strict=True):
            assert found.data == latent(seed, hit.step).data, "a latent is another"
            assert hit.similarity > 0.999, "the embedding is another"
        number += len(answer.latents)
    figures = store.statistics()
    assert figures.bytes == room(number, len(entries)) <= _BUDGET_BYTES, "there are others"
    assert (figures.damaged, figures.trouble) == (0, "")
    return number


def main() -> None:
    """Argument: the folder."""
    _say("begun")
    store = store_of(Path(sys.argv[1]))
    store.start()
    assert store.flush(WAIT_S), store.statistics().trouble
    _say(f"sound {look_through(store)}")
    if not store.profiles():
        store.set_profile(profile())
    chance = random.Random()
    for turn in itertools.count():
        seed = chance.randrange(_SEEDS)
        record(store, vector(seed), key=KEYS[seed % 3], seed=seed)
        answer = store.ask(question(KEYS[seed % 3], images=2), similar(vector(seed), 0.97))
        for hit, found in zip(answer.header.hits, answer.latents, strict=True):
            assert found.data == latent(seed, hit.step).data, "a latent is another"
        if turn == 0 or turn % 50 == 49:
            store.flush(WAIT_S)
        if turn == 0:
            _say("writing")
        if turn % 500 == 499:
            store.clear()


def _say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    main()
