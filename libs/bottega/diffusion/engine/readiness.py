"""What stands between a job and its steps: ControlNets that are being opened, LoRAs on their way.

Knows jobs and the batcher that they enter and leave; runs no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from bottega.diffusion.controlnets.provider import ControlNets
from bottega.diffusion.engine.batcher import Batcher
from bottega.diffusion.engine.events import Event, JobStarted, LorasIn
from bottega.diffusion.engine.job import EngineJob
from bottega.diffusion.engine.request import Request
from bottega.diffusion.loras import LoraSource, LoraWeights
from bottega.diffusion.loras.addon import JobLoras
from bottega.errors import Unavailable

# How long a job waits for its ControlNets: the largest in use has 5 GB, a minute's reading from a slow disk, and
# another one may have to be waited for first.
OPENING_TIMEOUT_S = 120.0
# How long a turn with nothing else to do waits for them: commands are heard between turns.
_PAUSE_S = 0.05


class ReadinessGate:
    """Lets jobs into the batcher when what they need is there, and takes them out while it is not."""

    def __init__(
        self,
        batcher: Batcher[Request],
        weights: LoraWeights,
        *,
        controlnets: ControlNets | None,
        loras: LoraSource | None,
    ) -> None:
        self._batcher = batcher
        self._weights = weights
        self._controlnets = controlnets
        self._loras = loras
        self._opening: dict[EngineJob, float] = {}  # those whose ControlNets are not there, and since when

    def add(self, job: EngineJob, now_s: float) -> None:
        """A job whose prompt is encoded waits from now on."""
        self._opening[job] = now_s

    def forget(self, job: EngineJob) -> None:
        """A job is over. Harmless when it does not wait."""
        self._opening.pop(job, None)

    def look(self, job: EngineJob, now_s: float) -> Iterator[Event]:
        """Lets a job go on if what it needs is there, and ends what it needs no longer.

        Raises the error for which it never will be there.
        """
        arrived = job.loras.arrive(self._weights, job.requests, now_s)
        opened = self._opened(job, now_s)
        if job.controls.over(min(request.step for request in job.requests)):
            job.controls.close()  # before the job's end: others may wait for the room
        if arrived and job.loras.step is not None:
            yield LorasIn(key=job.key, step=job.loras.step)
        if opened and (job in self._opening or job.loras.specs):
            yield from self._let_in(job, now_s)

    def pause(self, loras: Iterable[JobLoras]) -> None:
        """Waits a little for what jobs lack: nothing else can be done. loras: of all jobs that are here."""
        lacking = list(loras)
        if self._loras is not None and any(each.pending for each in lacking):
            self._loras.settle([handle for each in lacking for handle in each.handles], _PAUSE_S)
        elif self._controlnets is not None and self._opening:
            self._controlnets.settle([handle for job in self._opening for handle in job.controls.handles], _PAUSE_S)

    def _opened(self, job: EngineJob, now_s: float) -> bool:
        """Whether a job's ControlNets are there. One whose server died in a step that needs it leaves the batcher: who
        goes on with it may have to load it first, and nobody else shall wait for that.

        Raises why they never will be.
        """
        if job.controls.opened:
            return True
        waited_s = now_s - self._opening.get(job, now_s)
        if waited_s > OPENING_TIMEOUT_S:
            raise Unavailable(f"the ControlNets were not there within {OPENING_TIMEOUT_S:g} s")
        if job not in self._opening and any(job.controls.needed(request.step) for request in job.requests):
            self._opening[job] = now_s
            for request in job.runs:
                self._batcher.remove(request)
        return False

    def _let_in(self, job: EngineJob, now_s: float) -> Iterator[Event]:
        """A job can be denoised, for the first time or again; but not those of its images that now need its LoRAs."""
        if job in self._opening:
            job.opened(now_s - self._opening.pop(job))
        blocked = job.loras.block(job.requests, now_s)
        if job.loras.pending:
            blocked.update(job.meter.shadows)
        for request in job.runs:
            runs = request in self._batcher
            if runs and request in blocked:
                self._batcher.remove(request)
            elif not (runs or request in blocked or request.done):
                self._batcher.add(request)
        if not job.started and len(blocked) < len(job.runs):
            job.started, job.checkpoint_s = True, now_s
            yield JobStarted(key=job.key, steps_total=job.steps_total, steps_resumed=job.steps_resumed)
