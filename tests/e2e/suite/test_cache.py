"""An approximate cache in a suite: what is recorded, started from, pinned and never mixed up, and when it is gone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bottega import kinds
from bottega.client import (
    CachedEntry,
    CacheProfile,
    Client,
    LengthClass,
    Picture,
    RetryPolicy,
    SkipProfile,
    parameters_of,
)
from bottega.errors import CacheEntryGone, NoCache
from tests.e2e.conftest import Suite
from tests.support.services import FREE_PORTS, Service
from tests.support.waiting import wait_until

_PROMPT = "a big red star on the left on a blue background"
_SIMILAR = "a small red star on the left on a blue background"
# After three steps of ten, whatever is recorded under the key is similar enough.
_STEPS, _STEP = 10, 3
_FRACTION = 0.3
# Nobody waits for a hit: on a busy machine one may come too late.
_TRIES = 8


@dataclass(slots=True)
class _Cache:
    """A cache of the suite; another life of it has the same state."""

    suite: Suite
    service: Service

    def restart(self) -> None:
        """Another life of one that was killed, which has joined."""
        self.service = _start_cache(self.suite)


def _start_cache(suite: Suite) -> Service:
    config = {
        "name": "cache",
        "gateway": suite.gateway.fleet,
        "server": FREE_PORTS,
        "exploration": 0.0,
        "min_free_bytes": 0,
    }
    service = suite.services.start("cache", config, name="cache")
    wait_until(lambda: _has_joined(suite.client), "the cache to join")
    return service


def _has_joined(client: Client) -> bool:
    return any(member.kind == kinds.CACHE for member in client.fleet().members)


def _is_asked(client: Client) -> bool:
    client.generate(_PROMPT, num_inference_steps=4, seed=1)
    (figures,) = client.cache_stats()
    return bool(figures.lookups)


@pytest.fixture(scope="module")
def cache(suite: Suite) -> Iterator[_Cache]:
    """To which the worker has its link."""
    cache = _Cache(suite, _start_cache(suite))
    (model,) = suite.client.models()
    enough = SkipProfile(classes=(LengthClass(max_words=math.inf, thresholds={_FRACTION: -1.0}),))
    suite.client.set_cache_profile(CacheProfile(model_hash=model.model_hash, balanced=enough, fast=enough))
    wait_until(lambda: _is_asked(suite.client), "the worker to ask it")
    yield cache
    cache.service.stop()
    wait_until(lambda: not _has_joined(suite.client), "the cache to leave")


@pytest.fixture
def key(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options that no other test draws with, so that what it records serves this one alone."""
    return {"num_inference_steps": _STEPS, "negative_prompt": request.node.name}


def _record(client: Client, key: dict[str, Any]) -> str:
    """Has the second picture of a key recorded, as the first one never is; its entry."""
    known = {each.entry for each in client.cache_entries()}
    for seed in range(2):
        drawn = client.generate(_PROMPT, seed=seed, fidelity="balanced", **key)
        assert drawn.provenance.exact
        assert drawn.provenance.parameters.approximate_cache is False

    def new() -> list[CachedEntry]:
        return [each for each in client.cache_entries() if each.entry not in known]

    wait_until(lambda: bool(new()), "the picture to be recorded")
    (recorded,) = new()
    assert (recorded.parameters.prompt, recorded.parameters.seed) == (_PROMPT, 1)
    return recorded.entry


def _started(draw: Callable[[], list[Picture]]) -> list[Picture]:
    """Draws until some picture started from a cached latent."""
    for _ in range(_TRIES):
        pictures = draw()
        if pictures[0].provenance.cached_starts:
            return pictures
    raise AssertionError(f"no hit in {_TRIES} tries")


def _again(client: Client, picture: Picture, folder: Path) -> Picture:
    prompt, options = parameters_of(picture.save(folder / f"{picture.job_id}-{picture.index}.png"))
    return client.generate(prompt, **options)


def test_a_similar_prompt_starts_from_what_was_recorded_and_its_pin_draws_the_same(
    client: Client, cache: _Cache, key: dict[str, Any], tmp_path: Path
) -> None:
    entry = _record(client, key)
    (drawn,) = _started(lambda: [client.generate(_SIMILAR, seed=7, fidelity="balanced", **key)])
    (use,) = drawn.provenance.cached_starts
    assert (use.entry, use.image) == (f"{entry}@{_STEP}", 0)
    assert use.from_step in (_STEP - 1, _STEP)
    assert 0 < use.similarity < 1
    assert not drawn.provenance.exact
    assert _again(client, drawn, tmp_path).data == drawn.data
    noise = client.generate(_SIMILAR, seed=7, fidelity="balanced", approximate_cache=False, **key)
    assert noise.provenance.exact
    assert noise.pil().tobytes() != drawn.pil().tobytes()
    exact = client.generate(_SIMILAR, seed=7, **key)
    assert (exact.provenance.exact, list(exact.provenance.cached_starts)) == (True, [])
    assert exact.pil().tobytes() == noise.pil().tobytes()
    assert _again(client, noise, tmp_path).data == noise.data
    assert client.cache_entry(use.entry).parameters.prompt == _PROMPT


def test_when_the_cache_is_gone_every_picture_is_drawn_and_a_pin_waits_for_its_return(
    suite: Suite, cache: _Cache, key: dict[str, Any]
) -> None:
    client = suite.client
    pin = f"{_record(client, key)}@{_STEP}"
    pinned = client.generate(_SIMILAR, seed=7, cache_entry=pin, **key)
    cache.service.kill()
    for seed in range(3):
        drawn = client.generate(_SIMILAR, seed=seed, fidelity="balanced", **key)
        assert (drawn.provenance.exact, list(drawn.provenance.cached_starts)) == (True, [])
    wait_until(lambda: not _has_joined(client), "the cache to be lost")
    with Client(suite.gateway.address, retry=RetryPolicy(patience_s=1.0)) as hurried, pytest.raises(NoCache):
        hurried.generate(_SIMILAR, seed=7, cache_entry=pin, **key)
    cache.restart()
    again = client.generate(_SIMILAR, seed=7, cache_entry=pin, **key)
    assert again.data == pinned.data
    client.clear_cache()
    with pytest.raises(CacheEntryGone, match=pin):
        client.generate(_SIMILAR, seed=7, cache_entry=pin, **key)
