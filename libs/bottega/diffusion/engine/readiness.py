"""Which requests may be denoised now: the batcher contains those that have everything for their next step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from bottega.diffusion.engine.addon import EngineAddOn, Parts
from bottega.diffusion.engine.batcher import Batcher
from bottega.diffusion.engine.events import Event, JobDecided, JobStarted
from bottega.diffusion.engine.job import EngineJob
from bottega.diffusion.engine.request import Request

# How long an idle turn waits for what jobs lack. It is short because commands are read between turns.
_PAUSE_S = 0.05


class ReadinessGate:
    """Adds requests to the batcher when their add-ons are ready, and removes them when they are not."""

    def __init__(self, batcher: Batcher[Request], addons: Sequence[EngineAddOn]) -> None:
        self._batcher = batcher
        self._addons = addons

    def update(self, job: EngineJob, now_s: float) -> Iterator[Event]:
        """Move requests of a job into the batcher if they can make their next step, and the others out of it.

        Raises:
            BottegaError: The job can never go on.
        """
        if job.started and not job.addons:
            return
        for part in job.addons.values():
            part.update(now_s)
        yield from self._decisions(job)
        blocked = {request for request in job.runs if not request.done and self._is_blocked(job, request)}
        for request in job.runs:
            if request in blocked:
                self._batcher.remove(request)
            elif not request.done and request not in self._batcher:
                self._batcher.add(request, job.order.share)
        if not job.started and len(blocked) < len(job.runs):
            job.started, job.checkpoint_s = True, now_s
            yield JobStarted(key=job.key, steps_total=job.steps_total, steps_resumed=job.steps_resumed)

    def wait(self, jobs: Iterable[Parts]) -> None:
        """Wait briefly for what these jobs lack, when there is nothing else to do."""
        jobs = list(jobs)
        for addon in self._addons:
            waiting = [part for parts in jobs if (part := parts.get(addon)) is not None and part.waiting]
            if waiting:
                addon.wait(waiting, _PAUSE_S)
                return

    def _decisions(self, job: EngineJob) -> Iterator[Event]:
        """Yield the decisions that add-ons made since the last call, before the steps that they change."""
        made = {addon.kind: part.decision for addon, part in job.addons.items()}
        decided = {kind: decision for kind, decision in made.items() if decision is not None}
        if decided != job.decided:
            job.decided = decided
            yield JobDecided(key=job.key, decisions=decided)

    def _is_blocked(self, job: EngineJob, request: Request) -> bool:
        return any(part.blocks(request) for part in job.addons.values())
