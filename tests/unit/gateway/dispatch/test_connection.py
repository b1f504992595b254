"""Small calls to workers: what a worker reports makes no more of them at once than it may."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

from bottega import kinds
from bottega.addons.interface.views import Member
from bottega.background_tasks import BackgroundTasks
from bottega.gateway.dispatch.connection import MAX_STALE, WorkerConnection
from bottega.gateway.dispatch.worker_client import WorkerClient
from bottega.v1.fleet_pb2 import Registration
from bottega.v1.worker_pb2 import AttemptId, WatchCheckpointsResponse


class SlowWorker:
    """Has not answered any call yet."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers = asyncio.Event()

    async def cancel_attempt(self, attempt: AttemptId, *, deadline_s: float) -> None:
        self.asked.append(attempt.job_id)
        await asyncio.wait_for(self.answers.wait(), deadline_s)

    async def checkpoints(self) -> AsyncIterator[WatchCheckpointsResponse]:
        await asyncio.Event().wait()
        yield WatchCheckpointsResponse()

    async def close(self) -> None:
        """Nothing to end."""


def _connection(worker: SlowWorker, calls: BackgroundTasks) -> WorkerConnection:
    member = Member(registration=Registration(kind=kinds.WORKER, name="w"), joined_at=0, heard_at=0)
    return WorkerConnection(member, cast(WorkerClient, worker), calls, lambda member, checkpoint: None)


async def test_a_worker_that_reports_thousands_of_stale_attempts_is_called_for_a_few_at_once() -> None:
    calls, workers = BackgroundTasks("calls"), (SlowWorker(), SlowWorker())
    liar, other = (_connection(worker, calls) for worker in workers)
    for _ in range(3):
        for number in range(4096):
            liar.stop_stale_attempt(AttemptId(job_id=str(number), number=1))
        await asyncio.sleep(0)
    other.stop_stale_attempt(AttemptId(job_id="another's", number=1))
    await asyncio.sleep(0)
    assert len(workers[0].asked) == MAX_STALE
    assert workers[1].asked == ["another's"], "one worker's lies are no other worker's"

    for worker in workers:
        worker.answers.set()
    for _ in range(20):
        await asyncio.sleep(0)
    liar.stop_stale_attempt(AttemptId(job_id="later", number=1))
    liar.close()
    other.close()
    await calls.join()
    assert workers[0].asked[MAX_STALE:] == ["later"]
