"""The SDK without asyncio, as far as the gateway alone is asked: the asyncio client on a loop in a thread of its own.

Add-ons (bottega.client.addons) derive from GatewayClient; bottega.client.sdk.clients puts all of them together.
"""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import ClassVar, Self

from bottega.client.sdk.aio import AsyncGatewayClient
from bottega.client.sdk.aio_job import AsyncJob
from bottega.client.sdk.blocking import OnLoop, blocking, blocking_as, iterating
from bottega.client.sdk.loop_thread import LoopThread
from bottega.client.transport.credentials import Tls
from bottega.client.transport.retry import RetryPolicy


class Job(OnLoop):
    """A handle on a job, made by `client.job(id)`. The gateway's class of the same name is the job itself."""

    def __init__(self, job: AsyncJob, client: GatewayClient, loop: LoopThread) -> None:
        self._async = job
        self._client = client  # closes when it is collected: not while its jobs are in use
        self._loop = loop

    @property
    def id(self) -> str:
        """What the gateway calls it."""
        return str(self._async.id)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    status = blocking(AsyncJob.status)
    stream = iterating(AsyncJob.stream)
    result = blocking(AsyncJob.result)
    image = blocking(AsyncJob.image)
    trace = blocking(AsyncJob.trace)
    cancel = blocking(AsyncJob.cancel)
    delete = blocking(AsyncJob.delete)


class GatewayClient(OnLoop):
    """What a client without asyncio asks of the gateway. See Client."""

    _kind: ClassVar[type[AsyncGatewayClient]] = AsyncGatewayClient

    def __init__(
        self,
        address: str | None = None,
        *,
        fleet_address: str | None = None,
        api_key: str | None = None,
        tls: Tls | None = None,
        timeout_s: float = 600.0,
        retry: RetryPolicy | None = None,
    ) -> None:
        async def opened() -> AsyncGatewayClient:  # a channel belongs to the loop that it is made in
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
        """host:port of the gateway."""
        return str(self._async.address)

    @property
    def shows_key(self) -> bool:
        """Whether it shows an API key, by which the gateway knows a tenant."""
        return bool(self._async.shows_key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancels what was left unfinished, then closes the connection. Twice is fine."""
        self._close()

    def job(self, job_id: str) -> Job:
        """The job of that id, wherever it began. Asks nobody: an unknown one is JobNotFound when it is used."""
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


def _close(client: AsyncGatewayClient, loop: LoopThread) -> None:
    loop.run(client.close())
    loop.stop()
