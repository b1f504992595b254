"""Small calls to workers: what a worker reports makes no more of them at once than it may."""

from __future__ import annotations

import asyncio
from typing import cast

from bottega.gateway.dispatch.attempts import WorkerClient
from bottega.gateway.dispatch.background_calls import MOST_STALE, BackgroundCalls
from bottega.v1.worker_pb2 import AttemptId


class SlowWorker:
    """Has not answered any call yet."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers = asyncio.Event()

    async def cancel_attempt(self, attempt: AttemptId, *, deadline_s: float) -> None:
        self.asked.append(attempt.job_id)
        await asyncio.wait_for(self.answers.wait(), deadline_s)


async def test_a_worker_that_reports_thousands_of_stale_attempts_is_called_for_a_few_at_once() -> None:
    errands, liar, other = BackgroundCalls(), SlowWorker(), SlowWorker()
    for _ in range(3):
        for number in range(4096):
            errands.stop_stale_attempt(cast(WorkerClient, liar), AttemptId(job_id=str(number), number=1))
        await asyncio.sleep(0)
    errands.stop_stale_attempt(cast(WorkerClient, other), AttemptId(job_id="another's", number=1))
    await asyncio.sleep(0)
    assert len(liar.asked) == MOST_STALE
    assert other.asked == ["another's"], "one worker's lies are no other worker's"

    liar.answers.set()
    other.answers.set()
    await errands.close()
    errands.stop_stale_attempt(cast(WorkerClient, liar), AttemptId(job_id="later", number=1))
    await errands.close()
    assert liar.asked[MOST_STALE:] == ["later"]
