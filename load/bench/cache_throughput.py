"""What the approximate cache gains one client of the whole suite, on a stream of prompts: each drawn without and with.

The two take turns, prompt by prompt, so that a machine that changes changes both. The cache is cold at first.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from bottega.addons.cache.client.types import profile_from
from bottega.client import Picture
from bottega.v1.cache_pb2 import CacheProfile
from load.bench.cache_replay import STEPS
from load.bench.cache_suite import CacheCast, CacheSuite, suite
from load.bench.report import percentile

# Of what the saved steps would give alone; and of one client's seconds.
WANTED_RATIO, WANTED_P99 = 0.97, 1.25
# The first requests pay for what is made once, and no cache records a key's first one.
_WARM_UP = 3


@dataclass(slots=True, kw_only=True)
class Timed:
    """Times of the requests for each prompt."""

    without: list[float] = field(default_factory=list)
    """Seconds of each request without the cache."""
    with_cache: list[float] = field(default_factory=list)
    """Seconds of each request with the cache."""
    skipped: list[int] = field(default_factory=list)
    """Steps that each request with the cache saved; 0 for a miss."""

    @property
    def saved(self) -> float:
        """Of all steps, those that were not computed."""
        return sum(self.skipped) / (STEPS * len(self.skipped))

    @property
    def throughput_ratio(self) -> float:
        """Pictures a second with the cache, over those without it."""
        return sum(self.without) / sum(self.with_cache)

    @property
    def wanted_ratio(self) -> float:
        """What it should be at least, by the steps saved."""
        return WANTED_RATIO / (1.0 - self.saved)

    @property
    def p99_over_median(self) -> float:
        """Of the seconds with the cache."""
        return percentile(self.with_cache, 0.99) / median(self.with_cache)


def measure(folder: Path, prompts: Sequence[str], profile: CacheProfile, threads: int) -> Timed:
    """Draws each prompt twice. profile: of any model; it is set for the one that is served."""
    cast = CacheCast(folder=folder, engine={"threads": threads}, cache={"exploration": 0.0, "budget_bytes": 256 << 20})
    timed = Timed()
    with suite(cast) as running:
        running.client.set_cache_profile(replace(profile_from(profile), model_hash=running.model_hash))
        for number in range(_WARM_UP):
            _draw(running, f"warm up {number}", number, cached=True)
        for number, prompt in enumerate(prompts, start=_WARM_UP):
            _, seconds = _draw(running, prompt, number, cached=False)
            timed.without.append(seconds)
            picture, seconds = _draw(running, prompt, number, cached=True)
            timed.with_cache.append(seconds)
            timed.skipped.append(sum(start.skipped_steps for start in picture.provenance.cached_starts))
    return timed


def _draw(running: CacheSuite, prompt: str, seed: int, *, cached: bool) -> tuple[Picture, float]:
    began_s = time.perf_counter()
    picture = running.client.generate(
        prompt, seed=seed, num_inference_steps=STEPS, fidelity="balanced", approximate_cache=cached
    )
    return picture, time.perf_counter() - began_s
