"""The SDK without asyncio: the same client, run on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterable
from datetime import datetime
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from bottega.client.aio import AsyncClient
from bottega.client.events import Event
from bottega.client.jobs import Job, JobPage, JobState
from bottega.client.options import GenerationOptions
from bottega.client.picture import Picture
from bottega.client.retry import RetryPolicy
from bottega.v1.fleet_pb2 import ListMembersResponse
from bottega.v1.image_pb2 import Model

T = TypeVar("T")

# After Ctrl-C: how long a call may take to let go, which needs no network.
_LET_GO_S = 2.0


class Client:
    """A connection to a gateway; AsyncClient documents the arguments and the methods.

    Safe to share between threads. Close it (`with` does); one that is forgotten closes when it is collected.
    """

    def __init__(
        self, address: str | None = None, *, timeout_s: float = 600.0, retry: RetryPolicy | None = None
    ) -> None:
        self._loop = _LoopThread()
        try:
            self._client = self._loop.run(_open(address, timeout_s, retry))
        except BaseException:
            self._loop.stop()
            raise
        self._close = weakref.finalize(self, _close, self._client, self._loop)

    @property
    def address(self) -> str:
        """host:port of the gateway."""
        return self._client.address

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancels what was left unfinished, then closes the connection. Twice is fine."""
        self._close()

    def generate(
        self,
        prompt: str,
        *,
        timeout_s: float | None = None,
        request_id: str | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Picture:
        """Draws one picture: `client.generate("a big red star", seed=7).save("star.png")`."""
        return self._loop.run(self._client.generate(prompt, timeout_s=timeout_s, request_id=request_id, **options))

    def generate_many(
        self,
        prompt: str,
        num_images: int,
        *,
        timeout_s: float | None = None,
        request_id: str | None = None,
        **options: Unpack[GenerationOptions],
    ) -> tuple[Picture, ...]:
        """Draws 1 to 8 pictures of one prompt together; picture i is drawn as a single one with seed + i."""
        return self._loop.run(
            self._client.generate_many(prompt, num_images, timeout_s=timeout_s, request_id=request_id, **options)
        )

    def stream(
        self,
        prompt: str,
        *,
        num_images: int = 1,
        preview: bool = False,
        timeout_s: float | None = None,
        request_id: str | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Generator[Event, None, None]:
        """Draws, and tells what happens: Queued, Progress, Interrupted, and as the last one Completed."""
        return self._pull(
            self._client.stream(
                prompt, num_images=num_images, preview=preview, timeout_s=timeout_s, request_id=request_id, **options
            )
        )

    def submit(
        self, prompt: str, *, num_images: int = 1, request_id: str | None = None, **options: Unpack[GenerationOptions]
    ) -> Job:
        """Starts a job that outlives this connection."""
        return self._loop.run(self._client.submit(prompt, num_images=num_images, request_id=request_id, **options))

    def get_job(self, job_id: str) -> Job:
        """How a job stands."""
        return self._loop.run(self._client.get_job(job_id))

    def list_jobs(
        self,
        *,
        states: Iterable[JobState] = (),
        created_after: datetime | None = None,
        created_before: datetime | None = None,
        page_size: int = 20,
        page_token: str = "",
    ) -> JobPage:
        """A page of jobs, newest first; without states, in all of them. Times need a time zone."""
        return self._loop.run(
            self._client.list_jobs(
                states=states,
                created_after=created_after,
                created_before=created_before,
                page_size=page_size,
                page_token=page_token,
            )
        )

    def watch_job(
        self, job_id: str, *, preview: bool = False, timeout_s: float | None = None
    ) -> Generator[Event, None, None]:
        """A job's events from its current state on. Leaving stops nothing."""
        return self._pull(self._client.watch_job(job_id, preview=preview, timeout_s=timeout_s))

    def cancel_job(self, job_id: str) -> Job:
        """Cancels a job, and says how it stands then; one that has ended stays as it is."""
        return self._loop.run(self._client.cancel_job(job_id))

    def get_image(self, job_id: str, index: int = 0, *, timeout_s: float | None = None) -> Picture:
        """A finished picture of a job."""
        return self._loop.run(self._client.get_image(job_id, index, timeout_s=timeout_s))

    def models(self) -> tuple[Model, ...]:
        """The models that are served now."""
        return self._loop.run(self._client.models())

    def fleet(self) -> ListMembersResponse:
        """The services that have joined, and how busy they are."""
        return self._loop.run(self._client.fleet())

    def _pull(self, events: AsyncGenerator[Event, None]) -> Generator[Event, None, None]:
        try:
            while (event := self._loop.run(_next(events))) is not None:
                yield event
        finally:
            self._loop.run(events.aclose())


class _LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bottega-client", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs `coroutine` there and waits. When the wait is interrupted, it is cancelled and waited for."""
        let_go = threading.Event()
        future = asyncio.run_coroutine_threadsafe(_noting_end(coroutine, let_go), self._loop)
        try:
            return future.result()
        except BaseException:
            # Ctrl-C: what the coroutine does on its way out (cancelling its job) must come before close().
            if future.cancel():
                let_go.wait(_LET_GO_S)
            raise

    def stop(self) -> None:
        """Ends the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _open(address: str | None, timeout_s: float, retry: RetryPolicy | None) -> AsyncClient:
    # A channel belongs to the loop that it is made in.
    return AsyncClient(address, timeout_s=timeout_s, retry=retry)


def _close(client: AsyncClient, loop: _LoopThread) -> None:
    loop.run(client.close())
    loop.stop()


async def _next(events: AsyncGenerator[Event, None]) -> Event | None:
    return await anext(events, None)


async def _noting_end(coroutine: Coroutine[Any, Any, T], ended: threading.Event) -> T:
    try:
        return await coroutine
    finally:
        ended.set()
