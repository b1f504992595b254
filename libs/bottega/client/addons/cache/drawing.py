"""Draws a pair of prompts: the first so that it is recorded, the second from noise and from the first one's latents."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Unpack
from zlib import crc32

from bottega.client.addons.cache.prompt_pairs import PromptPair
from bottega.client.sdk.aio import AsyncGatewayClient
from bottega.client.types.options import GenerationOptions
from bottega.client.types.picture import Picture
from bottega.client.types.provenance import Parameters, parameters_from
from bottega.errors import CacheEntryGone, Unavailable
from bottega.latents import format_start
from bottega.planning import fraction_of
from bottega.v1.cache_pb2 import CacheEntry

ListEntries = Callable[[str, int], Awaitable[Sequence[CacheEntry]]]
"""The newest entries of the model with this hash, at most so many."""

# A recording comes after its picture, by a thread of its own.
_RECORDED_S, _POLL_S = 30.0, 0.5
_NEWEST = 500
# Of finished recordings that nobody has asked for yet, so many are remembered.
_MOST_REMEMBERED = 20_000
# Pictures that are asked for at once: enough to fill a batch.
_AT_ONCE = 16


# What tells recordings of a measurement from others: prompt, seed, number of steps.
_Drawn = tuple[str, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairDraw:
    """Encoded pictures of the second prompt with one seed. similarity: cosine of the prompts' embeddings.

    cached: by the fraction of the steps that the first prompt's latent stands for.
    """

    similarity: float
    uncached: bytes
    cached: Mapping[float, bytes]


class RecordedEntries:
    """Finds as which entry a picture was recorded: the same prompt may have been drawn with another number of steps."""

    def __init__(self, list_entries: ListEntries) -> None:
        self._list_entries = list_entries
        self._known: dict[_Drawn, CacheEntry] = {}
        self._asking = asyncio.Lock()
        self._asked_s = 0.0
        self._failure: Unavailable | None = None

    async def find(self, model_hash: str, parameters: Parameters) -> CacheEntry | None:
        """Waits for it a while; None where it was not recorded. Raises Unavailable where the cache cannot be asked.

        parameters: of the picture, complete. A call that fails is made again: a measurement takes hours.
        """
        drawn, deadline = _drawn(parameters), time.monotonic() + _RECORDED_S
        while (found := self._known.pop(drawn, None)) is None and time.monotonic() < deadline:
            await self._refresh(model_hash)
        if found is None and self._failure is not None:
            raise self._failure
        return found

    async def _refresh(self, model_hash: str) -> None:
        """Asks, not too often: of several that wait, one does."""
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
            for entry in reversed(entries):  # of those that are alike the newest is kept
                self._known[_drawn(parameters_from(entry.parameters))] = entry


def _drawn(parameters: Parameters) -> _Drawn:
    return parameters.prompt, parameters.seed, parameters.num_inference_steps


class PairDrawer:
    """Draws pairs through a running suite, all with the same settings, so that their latents have one key."""

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
        """Draws a picture, after which the cache records this kind of request; the model's hash, and steps."""
        picture = await self._draw(prompt, seed=0, fidelity="exact", identical_results=False)
        self._model_hash = picture.provenance.model_hash
        return self._model_hash, picture.provenance.parameters.num_inference_steps

    async def draw(self, pair: PromptPair, number: int) -> PairDraw | None:
        """The pair's draw of this number, which has seeds of its own; None where the first picture is not recorded.

        Raises Unavailable where the model is replaced meanwhile, or pictures start from no latents; and what drawing
        raises.
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

    async def _start_from(self, entry: CacheEntry, step: int, prompt: str, seed: int) -> Picture | None:
        """None where the latent has been evicted meanwhile."""
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
