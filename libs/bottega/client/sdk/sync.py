"""The SDK without asyncio, for calls to the gateway. It runs the asyncio client on an event loop in its own thread.

A method is written once, in the asyncio class. Its blocking version is one line (`models = blocking(Async.models)`),
which has the same arguments and documentation. Add-ons (bottega.client.addons) derive from GatewayClient;
bottega.client.sdk.clients combines all of them.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from types import TracebackType
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, Self, TypeVar

from bottega.client.sdk.aio import AsyncGatewayClient
from bottega.client.sdk.aio_job import AsyncJob
from bottega.client.transport.calls import RetryPolicy
from bottega.client.transport.credentials import Tls

T = TypeVar("T")
WrappedT = TypeVar("WrappedT")
OwnerT = TypeVar("OwnerT", bound="OnLoop")

# Seconds that a call may take to end after Ctrl-C, which needs no network.
_CANCEL_S = 2.0
# Seconds that a task may take to end when it is cancelled once more, because it missed the interrupt.
_CLOSE_S = 2.0
P = ParamSpec("P")


class LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bottega-client", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, and return its result. If the wait is interrupted, cancel the coroutine."""
        ended = threading.Event()
        future = asyncio.run_coroutine_threadsafe(_set_when_ended(coroutine, ended), self._loop)
        try:
            return future.result()
        except BaseException:
            # After Ctrl-C, the coroutine must cancel its job before close().
            if future.cancel():
                ended.wait(_CANCEL_S)
            raise

    def iterate(self, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """Yield the items of an asynchronous generator, which is closed at the end. No item may be None."""
        iteration = _Iteration(items)
        try:
            while (item := self.run(iteration.next())) is not None:
                yield item
        finally:
            self.run(iteration.close())

    def stop(self) -> None:
        """End the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _Iteration(Generic[T]):
    """An asynchronous generator that is advanced one item at a time, and may be closed while it computes an item."""

    def __init__(self, items: AsyncGenerator[T, None]) -> None:
        self._items = items
        self._next_task: asyncio.Task[Any] | None = None

    async def next(self) -> T | None:
        """Return the next item; None at the end."""
        self._next_task = asyncio.current_task()
        try:
            return await anext(self._items, None)
        finally:
            self._next_task = None

    async def close(self) -> None:
        """Cancel a running call and close the generator, which cannot be closed while it runs."""
        if self._next_task is not None:
            if not self._next_task.cancelling():
                self._next_task.cancel()
            await asyncio.wait({self._next_task}, timeout=_CLOSE_S)
        await self._items.aclose()


async def _set_when_ended(coroutine: Coroutine[Any, Any, T], ended: threading.Event) -> T:
    try:
        return await coroutine
    finally:
        ended.set()


class OnLoop:
    """A base class of blocking objects: it has the object of the asyncio SDK, and the loop that runs its methods."""

    _async: Any
    _loop: LoopThread


def blocking(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[OnLoop, P], T]:
    """Return a blocking version of the coroutine method `method`."""

    def call(self: OnLoop, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._loop.run(method(self._async, *args, **kwargs))

    return _documented(call, method)


def blocking_as(
    wrap: Callable[[OwnerT, T], WrappedT],
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[OwnerT, P], WrappedT]:
    """Return a blocking version of `method` that passes the result to `wrap`, which makes it a blocking object."""

    def call(self: OwnerT, /, *args: P.args, **kwargs: P.kwargs) -> WrappedT:
        return wrap(self, self._loop.run(method(self._async, *args, **kwargs)))

    return _documented(call, method, returns=inspect.signature(wrap).return_annotation)


def iterating(
    method: Callable[Concatenate[Any, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[OnLoop, P], Generator[T, None, None]]:
    """Return a blocking version of the asynchronous generator method `method`."""

    def call(self: OnLoop, /, *args: P.args, **kwargs: P.kwargs) -> Generator[T, None, None]:
        return self._loop.iterate(method(self._async, *args, **kwargs))

    return _documented(call, method, returns="Generator[Event, None, None]")


CallT = TypeVar("CallT", bound=Callable[..., Any])


def _documented(call: CallT, method: Callable[..., Any], *, returns: object = None) -> CallT:
    """Give a function the name, documentation and signature of `method`, but the return type `returns` if given."""
    functools.update_wrapper(call, method, assigned=("__name__", "__doc__"), updated=())
    if returns is not None:
        signature = inspect.signature(method).replace(return_annotation=returns)
        call.__signature__ = signature  # type: ignore[attr-defined]
    return call


class Job(OnLoop):
    """A handle on a job, made by `client.job(id)`. The gateway's class of the same name is the job itself."""

    def __init__(self, job: AsyncJob, client: GatewayClient, loop: LoopThread) -> None:
        self._async = job
        self._client = (
            client  # a client closes when it is garbage-collected, which must not happen while its jobs are used
        )
        self._loop = loop

    @property
    def id(self) -> str:
        """The job's ID at the gateway."""
        return str(self._async.id)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    status = blocking(AsyncJob.status)
    stream = iterating(AsyncJob.stream)
    result = blocking(AsyncJob.result)
    image = blocking(AsyncJob.image)
    image_url = blocking(AsyncJob.image_url)
    trace = blocking(AsyncJob.trace)
    cancel = blocking(AsyncJob.cancel)
    delete = blocking(AsyncJob.delete)


class GatewayClient(OnLoop):
    """The methods of Client that call the gateway. AsyncClient documents the arguments."""

    _kind: ClassVar[type[AsyncGatewayClient]] = AsyncGatewayClient

    def __init__(
        self,
        address: str | Sequence[str] | None = None,
        *,
        fleet_address: str | Sequence[str] | None = None,
        api_key: str | None = None,
        tls: Tls | None = None,
        timeout_s: float = 600.0,
        retry: RetryPolicy | None = None,
    ) -> None:
        async def opened() -> AsyncGatewayClient:  # a channel belongs to the loop in which it is made
            return self._kind(
                address, fleet_address=fleet_address, api_key=api_key, tls=tls, timeout_s=timeout_s, retry=retry
            )

        self._loop = LoopThread()
        try:
            self._async = self._loop.run(opened())
        except BaseException:
            self._loop.stop()
            raise
        self._close = weakref.finalize(self, _close, self._async, self._loop)

    @property
    def address(self) -> str:
        """host:port of the gateway; several with commas between them."""
        return str(self._async.address)

    @property
    def shows_key(self) -> bool:
        """Whether the client sends an API key, which identifies a tenant to the gateway."""
        return bool(self._async.shows_key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel unfinished requests, then close the connection. Further calls do nothing."""
        self._close()

    def job(self, job_id: str) -> Job:
        """Return a handle on the job with this ID. Its methods raise JobNotFound if there is no such job."""
        return self._job(self._async.job(job_id))

    def _job(self, job: AsyncJob) -> Job:
        return Job(job, self, self._loop)

    generate = blocking(AsyncGatewayClient.generate)
    generate_many = blocking(AsyncGatewayClient.generate_many)
    edit = blocking(AsyncGatewayClient.edit)
    stream = iterating(AsyncGatewayClient.stream)
    submit = blocking_as(_job, AsyncGatewayClient.submit)
    delete = blocking(AsyncGatewayClient.delete)
    list_jobs = blocking(AsyncGatewayClient.list_jobs)
    models = blocking(AsyncGatewayClient.models)
    adapters = blocking(AsyncGatewayClient.adapters)
    fleet = blocking(AsyncGatewayClient.fleet)
    undelivered_webhooks = blocking(AsyncGatewayClient.undelivered_webhooks)
    replay_webhooks = blocking(AsyncGatewayClient.replay_webhooks)


def _close(client: AsyncGatewayClient, loop: LoopThread) -> None:
    loop.run(client.close())
    loop.stop()
