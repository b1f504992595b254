"""Workers and jobs as the scheduler sees them: what still denoises where, and what waits asks for.

Reads fleet members, attempts and jobs; decides nothing. What a worker runs is translated again only when it has
changed: a look at the queue is due at every step of every job, and from one to the next most workers stand still.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from bottega.gateway.addons.controlnets.placement import ControlNetPlacement
from bottega.gateway.addons.loras.costs import LoraSizes, lora_costs
from bottega.gateway.dispatch.dispatcher import Dispatcher
from bottega.gateway.fleet.members import Member
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.repository import JobRepository
from bottega.gateway.scheduling.policy import PendingJob, ResourceRequest, WorkerState
from bottega.lora.set_key import LoraSetKey
from bottega.planning import Shape
from bottega.v1 import fleet_pb2

# A worker that was lost with a job gets it again only if it was heard this long afterwards.
_TRUST_AFTER_S = 0.25
# Rows of an attempt that another gateway gave to a worker: unknown, so those of a guided image.
_FOREIGN_ROWS = 2
# Most jobs ask for what others ask for: a queue is gone through every second, and these need not be made again.
_DEMANDS = 1024
_NOTHING: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class _CachedState:
    """A seat, with the report and the count of moves that it was made of."""

    seat: WorkerState
    load: fleet_pb2.Load
    moves: int


class FleetSnapshot:
    """Translates for the scheduler."""

    def __init__(
        self, dispatcher: Dispatcher, placement: ControlNetPlacement, log: JobRepository, lora_sizes: LoraSizes
    ) -> None:
        self._dispatcher = dispatcher
        self._placement = placement
        self._jobs = log
        self._lora_sizes = lora_sizes
        self._kept: dict[Member, _CachedState] = {}

    def seats(self, members: Iterable[Member]) -> list[WorkerState]:
        """The workers, by what they run."""
        return [self._seat(member) for member in members]

    def forget(self, member: Member) -> None:
        """The worker is lost."""
        self._kept.pop(member, None)

    def candidates(self, line: Iterable[Job], members: Mapping[str, Member]) -> Iterator[PendingJob]:
        """Those of a model's line that somebody may get now, made one by one as they are asked for.

        Others wait for a ControlNet that is away, and are not in the way of those behind them.
        """
        takers: dict[tuple[str, ...], Mapping[str, float] | None] = {(): None}
        extra_s: dict[LoraSetKey, Mapping[str, float]] = {}
        for job in line:
            if job.controlnets not in takers:
                takers[job.controlnets] = self._placement.takers(job)
            if job.lora_set not in extra_s:
                extra_s[job.lora_set] = lora_costs(job.lora_set, members, self._lora_sizes)
            mine = takers[job.controlnets]
            if mine is None or mine:
                yield self.waiting(job, members, mine, extra_s[job.lora_set])

    def waiting(
        self,
        job: Job,
        members: Mapping[str, Member],
        takers: Mapping[str, float] | None = None,
        extra_s: Mapping[str, float] = _NOTHING,
    ) -> PendingJob:
        """A job that waits, by what it asks for; a checkpoint saves it steps. takers, extra_s: see PendingJob."""
        return PendingJob(
            job_id=job.job_id,
            demand=demand(job),
            avoid=job.lost_worker if _must_avoid(job, members) else "",
            alone=job.quarantined,
            takers=takers,
            extra_s=extra_s,
        )

    def _seat(self, member: Member) -> WorkerState:
        kept, moves = self._kept.get(member), self._dispatcher.moves(member)
        if kept is None or kept.load is not member.load or kept.moves != moves:
            kept = self._kept[member] = _CachedState(seat=self._new_seat(member), load=member.load, moves=moves)
        return kept.seat

    def _new_seat(self, member: Member) -> WorkerState:
        ours = self._dispatcher.running_on(member)
        running = tuple(self._running(member))
        return WorkerState(
            worker=member.name,
            running=running,
            # What it reports counts until it reports otherwise: an attempt that was stopped may be in its last turn.
            finishing=len({job.job_id for job in ours} | member.steps_left.keys()) - len(running),
            closed=any(job.quarantined for job in ours),
            times=member.times,
            fixed_s=max(0.0, member.load.fixed_s),
            max_rows=member.load.max_rows,
        )

    def _running(self, member: Member) -> list[ResourceRequest]:
        """What still denoises on a worker, as far as is known."""
        told = dict(member.steps_left)
        demands = []
        for job in self._dispatcher.running_on(member):
            left = min(job.steps_total - job.steps_done, told.pop(job.job_id, job.steps_total))
            if left > 0:
                demands.append(_demand(job, left))
        for job_id, left in told.items():
            if left > 0 and self._jobs.find_live(job_id) is None:
                demands.append(ResourceRequest(rows=_FOREIGN_ROWS, steps=left, shape=(0, 0)))
        return demands


def demand(job: Job) -> ResourceRequest:
    """What a job that waits asks for; a checkpoint saves it steps."""
    return _demand(job, job.steps_total - (job.checkpoint.steps_done if job.checkpoint else 0))


def _must_avoid(job: Job, members: Mapping[str, Member]) -> bool:
    suspect = members.get(job.lost_worker) if job.lost_worker else None
    if suspect is None:
        return False
    return len(members) > 1 or suspect.heard_at < job.lost_at + _TRUST_AFTER_S


def _demand(job: Job, steps_left: int) -> ResourceRequest:
    """steps_left: over all images; they run side by side."""
    steps = math.ceil(max(0, steps_left) / job.num_images)
    return _demand_of(job.rows, steps, job.shape)


@functools.lru_cache(_DEMANDS)
def _demand_of(rows: int, steps: int, shape: Shape) -> ResourceRequest:
    return ResourceRequest(rows=rows, steps=steps, shape=shape)
