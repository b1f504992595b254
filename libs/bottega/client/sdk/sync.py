"""The SDK without asyncio, for calls to the gateway: the asyncio client on a loop in a thread of its own.

Add-ons (bottega.client.addons) derive from GatewayClient; bottega.client.sdk.clients combines all of them.
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
        self._client = (
            client  # a client closes when it is garbage-collected, which must not happen while its jobs are used
        )
        self._loop = loop

    @property
    def id(self) -> str:
        """Its ID at the gateway."""
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
    """The calls of Client to the gateway; see there."""

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
        """host:port of the gateway."""
        return str(self._async.address)

    @property
    def shows_key(self) -> bool:
        """Whether it gives an API key, by which the gateway knows a tenant."""
        return bool(self._async.shows_key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel unfinished pictures, then close the connection. Further calls do nothing."""
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


def _close(client: AsyncGatewayClient, loop: LoopThread) -> None:
    loop.run(client.close())
    loop.stop()
