"""Stages as roles: which jobs a worker without text encoders or a VAE decoder may get, and when.

Such a worker uses services of the kind `encode` or `decode`, which are workers with only this role. It may get jobs
while one of the same model is there. It never gets jobs that change the text encoders, or compare prompts in it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bottega import kinds
from bottega.addons.interface.gateway_addon import NO_COSTS, AddOn, FleetView, JobCosts, WorkerCosts
from bottega.addons.interface.views import AddOnJob, Member
from bottega.clocks import Clock
from bottega.errors import NoWorker

# Seconds for which a verdict on the jobs of a model is used again.
_FRESH_S = 0.5
# Seconds after which a verdict that nobody asked for says nothing about the time since then. While a job waits, it is
# asked for once a second.
_FORGOTTEN_S = 3.0
# Number of stages and models of which the last worker is known, the newest ones.
_MAX_SEEN = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    """Whether workers can get the jobs of a model with certain needs."""

    at: float
    """Time on the monotonic clock."""
    reason: str = ""
    """Why none can; empty if one can."""
    since: float = 0.0
    """Time since which none can."""
    starting: bool = False
    """Whether a worker that may help is starting."""


_NO_VERDICT = _Verdict(at=-math.inf)


class StageRoles(AddOn):
    """The add-on that keeps jobs from workers whose stages nobody computes now.

    Args:
        fleet: The connected services.
        clock: Clock of the gateway.
        grace_s: Shortest time in seconds for which jobs wait for a stage that no worker computes. They wait longer for
            workers that are slow to start (`FleetView.grace_s`).
    """

    def __init__(self, fleet: FleetView, clock: Clock, *, grace_s: float) -> None:
        self._fleet = fleet
        self._clock = clock
        self._grace_s = grace_s
        self._verdicts: dict[tuple[str, bool], _Verdict] = {}
        # The worker that last computed each stage of each model, by stage and name of the model.
        self._seen: dict[tuple[str, str], Member] = {}
        # They are asked for each job of a queue in a round.
        self._job_costs = {
            needs: JobCosts(key=needs, at=functools.partial(self._costs, needs=needs)) for needs in (False, True)
        }

    def costs(self, job: AddOnJob) -> JobCosts:
        """Return the object that tells which workers may get a job. Jobs with equal needs share one object."""
        return self._job_costs[needs_encoders(job)]

    def unavailable(self, job: AddOnJob) -> NoWorker | None:
        """Return an error if for longer than the grace period no worker could get the job because of its roles."""
        key, now = (job.bare.model, needs_encoders(job)), self._clock.monotonic()
        known = self._verdicts.get(key, _NO_VERDICT)
        if now - known.at >= _FRESH_S:  # it is asked for each waiting job, once a second
            goes_on = known.reason and now - known.at < _FORGOTTEN_S
            since = known.since if goes_on else now
            known = _Verdict(at=now, reason=self._reason(*key), since=since, starting=self._is_any_starting())
            self._verdicts[key] = known
        if not known.reason or known.starting or now - known.since < self._model_grace_s(key[0]):
            return None
        return NoWorker(f"no worker of model {key[0]} can draw the job: {known.reason}", retry_after_s=self._grace_s)

    def member_changed(self, member: Member, *, lost: bool = False) -> None:
        """Note which worker computes a stage of a model. One that has left may come back."""
        if member.kind in kinds.STAGES:
            for model in member.registration.models:
                self._seen.pop((member.kind, model.name), None)
                self._seen[member.kind, model.name] = member  # the newest last
            if len(self._seen) > _MAX_SEEN:
                del self._seen[next(iter(self._seen))]

    def _is_any_starting(self) -> bool:
        """Return whether a worker of any role starts. It names its model when its engine is ready."""
        starts = (worker.is_starting for kind in (kinds.WORKER, *kinds.STAGES) for worker in self._fleet.services(kind))
        return any(starts)

    def _model_grace_s(self, model: str) -> float:
        """Return for how many seconds jobs of a model wait for its stages: twice as long as their workers start."""
        seen = (self._seen.get((stage, model)) for stage in kinds.STAGES)
        return max((self._fleet.grace_s(member) for member in seen if member is not None), default=self._grace_s)

    def _reason(self, model: str, needs: bool) -> str:
        """Return why no worker of a model can get jobs; empty if one can, or if there is none."""
        reason = ""
        for worker in self._fleet.services(kinds.WORKER):
            if worker.serves(model) and not (reason := self._lacks(worker, needs=needs)):
                return ""
        return reason

    def _costs(self, workers: Mapping[str, Member], *, needs: bool) -> WorkerCosts:
        lacking = [worker.name for worker in workers.values() if worker.asks and self._lacks(worker, needs=needs)]
        return WorkerCosts(eligible=frozenset(workers).difference(lacking)) if lacking else NO_COSTS

    def _lacks(self, worker: Member, *, needs: bool) -> str:
        """Return why a worker can get no job; empty if it can.

        Args:
            needs: Whether the job needs the worker's own text encoders.
        """
        if needs and kinds.ENCODE in worker.asks:
            what = "LoRAs of text encoders, embeddings and masks"
            return f"{what} need a worker with the role encode, which {worker.name} lacks"
        for stage in worker.asks:
            if next(self._providers(worker, stage), None) is None:
                return f"{worker.name} lacks the role {stage}, and no worker with only this role serves its model now"
        return ""

    def _providers(self, worker: Member, stage: str) -> Iterator[Member]:
        return (
            service
            for service in self._fleet.services(stage)
            if not service.draining and service.computes_stage_for(worker)
        )


def needs_encoders(job: AddOnJob) -> bool:
    """Return whether a job needs text encoders in its own worker: for LoRAs of them, embeddings, or a mask."""
    return job.request.mask_digest != "" or not all(lora.denoiser_only for lora in job.bare.loras)
