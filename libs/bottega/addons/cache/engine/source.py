"""The interface through which the engine gets cached latents and stores recordings."""

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
    """A query for latents that the pictures of a job may start from."""

    header: CacheQuestion
    embedding: Tensor
    """Embedding of the prompt, float32 [width], on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentReply:
    """The answer to a question."""

    header: CacheAnswer
    latents: tuple[Tensor, ...] = ()
    """Latents of the header's hits, in order, [channels, height, width] on the CPU; not to be changed."""
    work: StoreWork | None = None
    """Work of the store that answered; None if none did."""


class LatentSource(Protocol):
    """A source of cached latents. All calls come from the engine's thread, and none waits."""

    @property
    def linked(self) -> int:
        """Number of stores that would receive a question now."""
        ...

    def set_stores(self, stores: Sequence[ServiceAddress]) -> None:
        """Set the stores that exist now, the best first. Without stores, questions wait for the next one."""
        ...

    def ask(self, question: LatentQuestion) -> Future[LatentReply]:
        """Send a question, and return at once. A caller that no longer needs the answer cancels the future.

        The future never fails. If no store can answer, the outcome of the answer says so.
        """
        ...

    def report(self, reply: LatentReply, starts: CacheStarts) -> None:
        """Report to the store that sent a reply how many steps its latents saved, if it counts them."""
        ...

    def record(self, recording: JobRecording) -> bool:
        """Send a recording in the background. Return whether there was room for it; otherwise it is lost."""
        ...
