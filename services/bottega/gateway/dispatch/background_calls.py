"""Small calls to workers in the background, and the stream of their checkpoints: no outcome of a job depends on them.

A call that fails is logged, and nobody waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from bottega.background_tasks import BackgroundTasks
from bottega.errors import BottegaError
from bottega.gateway.dispatch.attempts import WorkerClient
from bottega.gateway.jobs import log_lines
from bottega.gateway.jobs.job import Job
from bottega.v1 import worker_pb2

_CANCEL_DEADLINE_S = 2.0
_PREVIEW_DEADLINE_S = 2.0
_WATCH_PAUSE_S = 0.5
# Of one worker, at once; it runs some tens of attempts, and may report thousands.
MOST_STALE = 64

_log = logging.getLogger(__name__)


class BackgroundCalls:
    """The calls that are under way. Close it after the last client was given to `close_client`."""

    def __init__(self) -> None:
        self._calls = BackgroundTasks("calls of workers")
        self._stale: Counter[WorkerClient] = Counter()

    def stop_attempt(self, client: WorkerClient, attempt: worker_pb2.AttemptId) -> None:
        """Has a worker stop an attempt that nobody waits for."""
        self._calls.start(_stop_attempt(client, attempt))

    def stop_stale_attempt(self, client: WorkerClient, attempt: worker_pb2.AttemptId) -> None:
        """The same for one that the worker reports; more than MOST_STALE wait until it reports them again."""
        if self._stale[client] < MOST_STALE:
            self._stale[client] += 1
            self._calls.start(self._stop_stale_attempt(client, attempt))

    def preview_attempt(self, client: WorkerClient, attempt: worker_pb2.AttemptId, job: Job) -> None:
        """Has a worker send previews."""
        self._calls.start(_preview_attempt(client, attempt, job))

    def close_client(self, client: WorkerClient) -> None:
        """Ends every call of it."""
        self._calls.start(client.close())

    async def close(self) -> None:
        """Returns when all of them are over."""
        await self._calls.join()

    async def _stop_stale_attempt(self, client: WorkerClient, attempt: worker_pb2.AttemptId) -> None:
        try:
            await _stop_attempt(client, attempt)
        finally:
            self._stale[client] -= 1
            if not self._stale[client]:
                del self._stale[client]


async def watch_checkpoints(
    client: WorkerClient, name: str, on_checkpoint: Callable[[worker_pb2.WatchCheckpointsResponse], None]
) -> None:
    """Passes on every checkpoint of a worker, until it is cancelled. name: of the worker, for the log."""
    while True:
        try:
            async for news in client.checkpoints():
                on_checkpoint(news)
        except BottegaError as error:
            _log.debug("checkpoints cannot be watched", extra={"member": name, "text": error.message})
        except Exception:  # noqa: BLE001 - the boundary of the task: without it a worker's jobs begin anew when it dies
            _log.exception("checkpoints could not be taken", extra={"member": name})
        await asyncio.sleep(_WATCH_PAUSE_S)


async def _stop_attempt(client: WorkerClient, attempt: worker_pb2.AttemptId) -> None:
    try:
        await client.cancel_attempt(attempt, deadline_s=_CANCEL_DEADLINE_S)
    except BottegaError as error:
        # The worker gives the attempt up by itself once its deadline or grace is over.
        _log.info("attempt could not be cancelled", extra={"job_id": attempt.job_id, "text": error.message})


async def _preview_attempt(client: WorkerClient, attempt: worker_pb2.AttemptId, job: Job) -> None:
    try:
        await client.preview_attempt(attempt, deadline_s=_PREVIEW_DEADLINE_S)
    except BottegaError as error:
        # It goes on without previews, unless it is lost; then the next attempt has them.
        _log.warning("no previews", extra={**log_lines.job_fields(job), "text": error.message})
