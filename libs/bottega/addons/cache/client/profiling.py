"""Measures the prompt similarity from which a cached latent is good enough, with pictures drawn by the running suite.

The first prompt of each pair is drawn exactly, so that the cache records it. The second prompt is drawn from noise, and
then from each latent of the first one, with the same seed. This is repeated with other seeds, and a pair's quality is
the mean, because a single picture may be right by chance.
Source: Nirvana (NSDI'24), Algorithm 2; bottega.addons.cache.skip_profile explains how it is read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Protocol, Unpack
from zlib import crc32

from bottega.addons.cache.client.samples import Method, PairSample, PromptPair, SampleFile, measured_profile
from bottega.addons.cache.client.types import CachedEntry, CacheProfile
from bottega.addons.cache.skip_profile import LEAST_SAMPLES, count_words, fraction_of
from bottega.addons.cache.starts import FRACTIONS, format_start
from bottega.client.sdk.aio import AsyncGatewayClient
from bottega.client.types.fleet import FleetStatus
from bottega.client.types.messages import as_list, describe
from bottega.client.types.options import GenerationOptions
from bottega.client.types.picture import Picture
from bottega.client.types.provenance import Parameters
from bottega.errors import CacheEntryGone, Unavailable, Violation
from bottega.rules import refuse

MOST_PAIRS = 5_000
MOST_DRAWS = 8
# Pairs that are drawn together: with four draws each they keep a batch full.
_PAIRS_AT_ONCE = 3
# After so many pairs, at least half of them must have been recorded: else the store is too small, or records nothing.
_TRIED = 10
_LEAST_RECORDED = 0.5
# Rows of a picture with guidance.
_ROWS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheMeasurement:
    """The parameters of a measurement."""

    pairs: Sequence[PromptPair]
    clip: Path | None = None
    """Folder of a CLIP model that scores the pictures; None for the embedded model's own scorer."""
    draws: int = 2
    """How often each pair of prompts is drawn, each time with other seeds."""
    num_inference_steps: int | None = None
    """Steps of each picture; None for the model's default."""
    model: str | None = None
    """Name of the model; None for the only one that is served."""
    samples: Path | None = None
    """File to which measured pairs are written, and whose pairs are not drawn again; None for no file."""

    def check(self) -> None:
        """Raise InvalidRequest with all rules that the parameters break."""
        broken = []
        pairs = as_list(self.pairs, name="pairs", what="PromptPair")
        if others := [pair for pair in pairs if not isinstance(pair, PromptPair)]:
            broken.append(Violation(field="pairs", description=f"must be PromptPair; got {describe(others[0])}"))
        elif not LEAST_SAMPLES <= len(set(pairs)) <= MOST_PAIRS:
            rule = f"{LEAST_SAMPLES} to {MOST_PAIRS} different ones are needed; got {len(set(pairs))}"
            broken.append(Violation(field="pairs", description=rule))
        if not 1 <= self.draws <= MOST_DRAWS:
            broken.append(Violation(field="draws", description=f"must be 1 to {MOST_DRAWS}; got {self.draws}"))
        refuse(broken)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawingEstimate:
    """An upper bound on the work of a measurement, without the pairs that its file of samples already has."""

    pictures: int
    """Number of pictures to draw."""
    seconds: float | None
    """Seconds that the workers need for the pictures if they do nothing else; None before any worker has measured its
    steps."""


def estimate_drawing(wanted: CacheMeasurement, fleet: FleetStatus) -> DrawingEstimate:
    """Estimate the number of pictures of a measurement, and the time from the step times of the model's workers."""
    draws = len(set(wanted.pairs)) * wanted.draws
    # A draw makes two pictures from noise, and one from each latent.
    pictures = draws * (2 + len(FRACTIONS))
    pictures_of_steps = draws * (2 + sum(1 - fraction for fraction in FRACTIONS))
    rates = []
    for member in fleet.members:
        for model in member.models:
            turns = member.load.step_times
            if wanted.model not in (None, model.name) or not turns:
                continue
            steps = pictures_of_steps * (wanted.num_inference_steps or model.default_steps)
            row_s = min(turn.seconds / turn.rows for turn in turns if turn.rows)
            rates.append(1 / (steps * _ROWS * row_s + pictures * member.load.fixed_s))
    return DrawingEstimate(pictures=pictures, seconds=1 / sum(rates) if rates else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCache:
    """A measured profile, with the samples from which it was computed."""

    profile: CacheProfile
    method: Method
    samples: tuple[PairSample, ...]
    unrecorded: int
    """Number of pairs without a sample, because the cache did not record their first picture."""


class Scores(Protocol):
    """The interface of a scorer of pictures, such as bottega.quality.scoring.Scorer."""

    async def score(self, prompt: str, picture: bytes) -> float:
        """Return how well a picture shows a prompt; more is better. Raise InvalidRequest if there is no score."""
        ...


async def measure_cache(
    drawer: PairDrawer, scores: Scores, wanted: CacheMeasurement, *, on_pair: Callable[[int, int], None]
) -> MeasuredCache:
    """Draw and score all pairs, and return the profile computed from them.

    Args:
        drawer: Draws with the running suite.
        scores: Scores the pictures.
        wanted: The measurement, already checked.
        on_pair: Called after each pair with the number of pairs that are done and the number of all.

    Raises:
        InvalidRequest: The prompts cannot be scored.
        Unavailable: The cache records nothing.
        BottegaError: Drawing failed.
    """
    model_hash, steps = await drawer.begin(wanted.pairs[0].first)
    method = Method(model_hash=model_hash, num_inference_steps=steps, draws=wanted.draws, judge=judge_name(wanted.clip))
    kept = await asyncio.to_thread(SampleFile, wanted.samples, method)
    pairs = list(dict.fromkeys(wanted.pairs))
    progress = _Progress(kept, len(pairs), on_pair)

    async def measure(pair: PromptPair) -> None:
        await progress.add(await measure_pair(drawer, scores, pair, wanted.draws))

    await _for_each(kept.missing(pairs), measure)
    samples = tuple(kept.samples)
    return MeasuredCache(
        profile=measured_profile(model_hash, samples, describe_method(method, samples)),
        method=method,
        samples=samples,
        unrecorded=progress.unrecorded,
    )


def describe_method(method: Method, samples: Sequence[PairSample]) -> str:
    """Return a sentence that describes how a profile was measured."""
    return (
        f"{len(samples)} pairs of prompts, {method.draws} seeds each, {method.num_inference_steps} steps; quality by "
        f"{method.judge}, the mean over a pair's pictures; {datetime.now(UTC):%Y-%m-%d}"
    )


async def measure_pair(drawer: PairDrawer, scores: Scores, pair: PromptPair, draws: int) -> PairSample | None:
    """Draw and score one pair. Return None if the cache did not record a picture of its first prompt."""
    drawn = await asyncio.gather(*(drawer.draw(pair, number) for number in range(draws)))
    whole = [draw for draw in drawn if draw is not None]
    if len(whole) < draws:
        return None
    fractions = set.intersection(*(set(draw.cached) for draw in whole))
    return PairSample(
        first=pair.first,
        second=pair.second,
        words=count_words(pair.second),
        similarity=mean(draw.similarity for draw in whole),
        uncached=mean([await scores.score(pair.second, draw.uncached) for draw in whole]),
        cached={
            fraction: mean([await scores.score(pair.second, draw.cached[fraction]) for draw in whole])
            for fraction in sorted(fractions)
        },
    )


def judge_name(clip: Path | None) -> str:
    """Return the display name of the scorer: that of the CLIP model in a folder, or the embedded model's own scorer."""
    return f"CLIP score ({clip.resolve().name})" if clip else "the oracle (share of correct statements in the prompt)"


class _Progress:
    """A counter of measured pairs, which passes the number done and the number of all pairs to `on_pair`."""

    def __init__(self, kept: SampleFile, pairs: int, on_pair: Callable[[int, int], None]) -> None:
        self._kept = kept
        self._pairs = pairs
        self._on_pair = on_pair
        self._tried = 0
        self.unrecorded = 0

    async def add(self, sample: PairSample | None) -> None:
        """Count a pair; None is a pair that was not recorded. Raise Unavailable if most pairs are not recorded."""
        self._tried += 1
        if sample is None:
            self.unrecorded += 1
            if self._tried >= _TRIED and self.unrecorded > _LEAST_RECORDED * self._tried:
                missing = f"of {self._tried} pairs {self.unrecorded} were not recorded"
                raise Unavailable(f"{missing}: is the cache too small, or its disk full?")
        else:
            await asyncio.to_thread(self._kept.add, sample)
        self._on_pair(len(self._kept.samples) + self.unrecorded, self._pairs)


async def _for_each(pairs: Sequence[PromptPair], work: Callable[[PromptPair], Awaitable[None]]) -> None:
    """Run `work` for all pairs, several at a time. Raise the first error, and cancel the others."""
    left = list(reversed(pairs))

    async def work_on() -> None:
        while left:
            await work(left.pop())

    tasks = [asyncio.create_task(work_on()) for _ in range(_PAIRS_AT_ONCE)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


ListEntries = Callable[[str, int], Awaitable[Sequence[CachedEntry]]]
"""Lists the newest entries of a model. The arguments are the model's hash and the maximum number of entries."""

# The cache records a picture some time after it was drawn, in a thread of its own.
_RECORDED_S, _POLL_S = 30.0, 0.5
_NEWEST = 500
# Recorded entries that are remembered until they are asked for.
_MOST_REMEMBERED = 20_000
# Concurrent requests: enough to fill a batch.
_AT_ONCE = 16

# What identifies a recording of a measurement: prompt, seed, number of steps.
_Drawn = tuple[str, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairDraw:
    """The encoded pictures of a pair's second prompt with one seed."""

    similarity: float
    """Cosine between the embeddings of the two prompts."""
    uncached: bytes
    """The picture that was drawn from noise."""
    cached: Mapping[float, bytes]
    """The pictures that started from the first prompt's latents, by the fraction of the steps that was skipped."""


class RecordedEntries:
    """Finds the cache entry that was recorded from a picture."""

    def __init__(self, list_entries: ListEntries) -> None:
        self._list_entries = list_entries
        self._known: dict[_Drawn, CachedEntry] = {}
        self._asking = asyncio.Lock()
        self._asked_s = 0.0
        self._failure: Unavailable | None = None

    async def find(self, model_hash: str, parameters: Parameters) -> CachedEntry | None:
        """Wait for the entry of a picture, and return it; None if the picture was not recorded in time.

        Raises Unavailable if the cache does not answer. A call that fails is tried again before that, because a
        measurement takes hours.

        Args:
            model_hash: Hash of the model.
            parameters: The picture's complete parameters.
        """
        drawn, deadline = _drawn(parameters), time.monotonic() + _RECORDED_S
        while (found := self._known.pop(drawn, None)) is None and time.monotonic() < deadline:
            await self._refresh(model_hash)
        if found is None and self._failure is not None:
            raise self._failure
        return found

    async def _refresh(self, model_hash: str) -> None:
        """List the newest entries, unless another task has just done so."""
        async with self._asking:
            since_s = time.monotonic() - self._asked_s
            if since_s < _POLL_S:
                await asyncio.sleep(_POLL_S - since_s)
                return
            self._asked_s = time.monotonic()
            if len(self._known) > _MOST_REMEMBERED:
                self._known.clear()
            try:
                entries = await self._list_entries(model_hash, _NEWEST)
            except Unavailable as failure:
                self._failure = failure
                return
            self._failure = None
            for entry in reversed(entries):  # the newest of equal ones is kept
                self._known[_drawn(entry.parameters)] = entry


def _drawn(parameters: Parameters) -> _Drawn:
    return parameters.prompt, parameters.seed, parameters.num_inference_steps


class PairDrawer:
    """Draws pairs with the running suite, all with equal settings, so that one may start from another's latents."""

    def __init__(
        self,
        client: AsyncGatewayClient,
        list_entries: ListEntries,
        *,
        num_inference_steps: int | None,
        model: str | None,
    ) -> None:
        self._client = client
        self._recorded = RecordedEntries(list_entries)
        self._options = GenerationOptions(num_inference_steps=num_inference_steps, model=model)
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._model_hash = ""

    async def begin(self, prompt: str) -> tuple[str, int]:
        """Draw a first picture, so that the cache records later requests with these settings.

        Return the model's hash and the number of denoising steps.
        """
        picture = await self._draw(prompt, seed=0, fidelity="exact", identical_results=False)
        self._model_hash = picture.provenance.model_hash
        return self._model_hash, picture.provenance.parameters.num_inference_steps

    async def draw(self, pair: PromptPair, number: int) -> PairDraw | None:
        """Draw a pair once, and return the pictures; None if the first picture was not recorded.

        Args:
            pair: The prompts.
            number: How often the pair was drawn before, which determines the seeds.

        Raises:
            Unavailable: The model was replaced meanwhile, or pictures do not start from latents.
            BottegaError: Drawing failed.
        """
        seed = crc32(f"{pair.first}\n{pair.second}".encode()) // 2 + 2 * number
        first, uncached = await asyncio.gather(
            self._draw(pair.first, seed=seed, fidelity="exact", identical_results=False),
            self._draw(pair.second, seed=seed + 1, fidelity="exact", approximate_cache=False),
        )
        entry = await self._recorded.find(self._model_hash, first.provenance.parameters)
        if uncached.provenance.model_hash != self._model_hash:
            raise Unavailable("the model was replaced between two pictures: measure again")
        if entry is None:
            return None
        started = await asyncio.gather(*(self._start_from(entry, step, pair.second, seed + 1) for step in entry.steps))
        steps = uncached.provenance.parameters.num_inference_steps
        drawn = {
            fraction_of(step, steps): picture
            for step, picture in zip(entry.steps, started, strict=True)
            if picture is not None
        }
        if not drawn:
            return None
        similarity = next(iter(drawn.values())).provenance.cached_starts[0].similarity
        return PairDraw(
            similarity=similarity,
            uncached=uncached.data,
            cached={fraction: picture.data for fraction, picture in drawn.items()},
        )

    async def _start_from(self, entry: CachedEntry, step: int, prompt: str, seed: int) -> Picture | None:
        """Draw a picture from a cached latent. Return None if the latent has been evicted."""
        pin = format_start(entry.entry, step)
        try:
            picture = await self._draw(prompt, seed=seed, fidelity="balanced", cache_entry=pin)
        except CacheEntryGone:
            return None
        if [use.entry for use in picture.provenance.cached_starts] != [pin]:
            raise Unavailable(f"the worker {picture.provenance.worker} did not start from {pin}")
        return picture

    async def _draw(self, prompt: str, **options: Unpack[GenerationOptions]) -> Picture:
        merged: GenerationOptions = {**self._options, **options}
        async with self._room:
            return await self._client.generate(prompt, **merged)
