"""Where cached latents come from and recordings go to, as the engine sees it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from bottega.diffusion.cached_starts.recorder import JobRecording
from bottega.diffusion.engine.store_work import StoreWork
from bottega.v1.cache_pb2 import CacheAnswer, CacheQuestion, CacheStarts
from bottega.v1.fleet_pb2 import ServiceAddress


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentQuestion:
    """What the pictures of a job may start from. embedding: the prompt's, float32 [width], on the CPU."""

    header: CacheQuestion
    embedding: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentReply:
    """latents: of the header's hits, in their order, [channels, height, width] on the CPU; nobody writes to them.

    work: of the store that has answered; None where none has.
    """

    header: CacheAnswer
    latents: tuple[Tensor, ...] = ()
    work: StoreWork | None = None


class LatentSource(Protocol):
    """All calls come from the engine's thread, and none waits."""

    @property
    def linked(self) -> int:
        """Stores that would hear a question now."""
        ...

    def set_stores(self, stores: Sequence[ServiceAddress]) -> None:
        """The stores that there are now, the best first. What is asked while there are none waits for the next."""
        ...

    def ask(self, question: LatentQuestion) -> Future[LatentReply]:
        """Asks, and returns at once. Whoever does not need the answer any more cancels the future.

        It never fails: where nothing can be said, the outcome of its answer says so.
        """
        ...

    def report(self, reply: LatentReply, starts: CacheStarts) -> None:
        """Tell the store that sent a reply what its latents saved. A store that does not count that is told nothing."""
        ...

    def record(self, recording: JobRecording) -> bool:
        """Sends a recording in the background; whether there was room for it. One that was not taken is lost."""
        ...
