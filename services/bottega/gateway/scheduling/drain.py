"""How a gateway that stops ends the watching of its jobs: each as soon as it cannot end here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from bottega.errors import Draining
from bottega.gateway.jobs.job import Job
from bottega.v1.image_pb2 import JOB_STATE_RUNNING


async def detach_when_idle(jobs: Iterable[Job], *, is_held: Callable[[Job], bool]) -> None:
    """Returns when no worker has any of the jobs. is_held: whether a job waits for its worker, and may not get it."""

    async def detach(job: Job) -> None:
        if not is_held(job):
            await _without_worker(job)
        if job.live:
            job.detach(draining())

    await asyncio.gather(*map(detach, jobs))


def draining() -> Draining:
    """Why nobody follows a job here any more."""
    return Draining("the gateway is stopping; call again", retry_after_s=1.0)


async def _without_worker(job: Job) -> None:
    """Returns when no worker has the job and nothing of it has to be written."""
    changed = asyncio.Event()
    job.listeners.add(changed.set)
    try:
        while job.live and (job.state == JOB_STATE_RUNNING or not job.open):
            changed.clear()
            await changed.wait()
    finally:
        job.listeners.discard(changed.set)
