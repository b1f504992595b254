"""The interface through which the engine gets cached latents and sends recordings."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from bottega.addons.cache.engine.recorder import JobRecording
from bottega.engine.store_work import StoreWork
from bottega.v1.cache_pb2 import CacheAnswer, CacheQuestion, CacheStarts
from bottega.v1.fleet_pb2 import ServiceAddress


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentQuestion:
    """A query for latents from which the pictures of a job may start."""

    header: CacheQuestion
    embedding: Tensor
    """Embedding of the prompt, float32 [width], on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentReply:
    """The response to a query."""

    header: CacheAnswer
    latents: tuple[Tensor, ...] = ()
    """The latents that the header lists, in its order, [channels, height, width] on the CPU; not to be changed."""
    work: StoreWork | None = None
    """Time that the cache spent on the query; None if no cache answered."""


class LatentSource(Protocol):
    """A source of cached latents. All calls come from the engine's thread and return at once."""

    @property
    def linked(self) -> int:
        """Number of caches that can receive a query now."""
        ...

    def set_stores(self, stores: Sequence[ServiceAddress]) -> None:
        """Set the caches that exist now, the best first. Without one, queries wait until there is one."""
        ...

    def ask(self, question: LatentQuestion) -> Future[LatentReply]:
        """Send a query, and return at once. A caller that no longer needs the response cancels the future.

        The future never fails. If no cache can answer, the response's outcome says so.
        """
        ...

    def report(self, reply: LatentReply, starts: CacheStarts) -> None:
        """Report how many steps latents of a response saved to the cache that sent it, if it counts them."""
        ...

    def record(self, recording: JobRecording) -> bool:
        """Send a recording in the background. Return False if the buffer is full, and the recording is dropped."""
        ...
