"""Converts workers and jobs to the values of the scheduling policy: running jobs, and the needs of pending ones.

The state of a worker is computed only when it has changed: the queue is scheduled after every step of every job, and
most workers do not change between two rounds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from bottega.addons.interface.gateway_addon import (
    NO_COSTS,
    AddOn,
    ExpectedSavings,
    JobCosts,
    SecondsByWorker,
    WorkerCosts,
)
from bottega.addons.interface.views import Member
from bottega.clocks import Clock
from bottega.gateway.dispatch.dispatcher import Dispatcher
from bottega.gateway.fleet.registry import Fleet
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.repository import JobRepository
from bottega.gateway.scheduling.addon_costs import AddOnCosts
from bottega.gateway.scheduling.policy import PendingJob, RunningShares
from bottega.gateway.scheduling.worker_plan import Findings, ResourceRequest, WorkerState
from bottega.planning import Shape, rounded_share
from bottega.v1 import fleet_pb2
from bottega.v1.generation_pb2 import Provenance

# A worker that was lost with a job gets it again only if it reported at least so many seconds afterwards.
_TRUST_AFTER_S = 0.25
# Batch rows assumed for an attempt that another gateway sent to a worker: those of one guided image.
_FOREIGN_ROWS = 2
# Cached resource requests. A queue is read every second, and most jobs need the same as others; edits do because their
# shares are rounded.
_REQUESTS = 1024
# Number of workers compared to estimate a job's duration: most fleets have one kind of machine.
_COMPARED = 8
# After so many states of a worker, its batch sizes are computed anew although the same jobs run, because step
# times drift. Its engine does the same.
_KEPT_WIDTHS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _CachedState:
    """The policy's state of a worker, with the inputs from which it was computed."""

    state: WorkerState
    load: fleet_pb2.Load
    """The worker's last load report."""
    revision: int
    """Member.revision when the state was computed."""
    jobs: tuple[str, ...]
    """IDs of the jobs that run on the worker."""
    age: int
    """Number of times that the state was recomputed with the same jobs, reusing the batch sizes in `findings`."""


class FleetSnapshot:
    """Converts the members and jobs of the gateway to the policy's values, and caches them."""

    def __init__(
        self, fleet: Fleet, dispatcher: Dispatcher, jobs: JobRepository, addons: Sequence[AddOn], clock: Clock
    ) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._addons = addons
        self._jobs = jobs
        self._addon_costs = AddOnCosts(clock)
        self._cache: dict[Member, _CachedState] = {}
        # By job, steps of its checkpoint and decisions, which change what it needs.
        self._requests: dict[tuple[str, int, bytes], ResourceRequest] = {}

    def workers_of(self, model: str) -> list[WorkerState]:
        """Return the states of all workers that accept new jobs of a model."""
        return self.workers(self._fleet.workers(model))

    def workers(self, members: Iterable[Member]) -> list[WorkerState]:
        """Return the states of these workers."""
        states, known = [], self._cache.get
        for member in members:  # there may be hundreds, most of which have not changed
            cached = known(member)
            if cached is None or cached.load is not member.load or cached.revision != member.revision:
                connection = self._dispatcher.connections.get(member)
                cached = self._renewed(member, cached, connection.jobs if connection else [])
            states.append(cached.state)
        return states

    def forget(self, member: Member) -> None:
        """Drop the cached state of a worker that is lost."""
        self._cache.pop(member, None)

    def pending(
        self, line: Iterable[Job], members: Mapping[str, Member], shares: RunningShares
    ) -> Iterator[PendingJob]:
        """Yield the jobs of a model's queue that some worker may run now, one by one as they are needed.

        Jobs that wait for an unavailable add-on are skipped, so that they do not delay the jobs behind them.

        Args:
            line: The jobs in the order of the queue.
            members: Workers that may get jobs, by name.
            shares: Shares of the model's tenants.
        """
        costs_by_key = _CostsByKey(self._addons, members)
        for job in line:
            costs = costs_by_key.of(job)
            if (costs.eligible is None or costs.eligible) and shares.begin(job.request.tenant):
                none_runs = shares.has_none(job.request.tenant)
                steps_left = _steps_left(job, self._savings(job))
                yield PendingJob(
                    job_id=job.job_id,
                    request=self._request_for(job, steps_left, costs.share),
                    avoid=job.losses.last_worker if _must_avoid(job, members) else "",
                    exclusive=job.quarantined,
                    within_share=shares.claim(job.request.tenant),
                    none_runs=none_runs,
                    eligible=costs.eligible,
                    load_s=costs.load_s,
                    reduced=self._reduced(job, steps_left, costs.shares),
                    due_s=job.due_s,
                )

    def resource_request(self, job: Job) -> ResourceRequest:
        """Return the resources that a pending job is expected to need on any worker, as known at `estimate_anew`."""
        resumed = job.checkpoint.steps_done if job.checkpoint is not None else 0
        key = job.job_id, resumed, job.decisions.SerializeToString()
        known = self._requests.get(key)
        if known is None:
            savings = self._savings(job)
            known = self._request_for(job, _steps_left(job, savings), _computed_share(savings))
            self._requests[key] = known
        return known

    def estimate_anew(self) -> None:
        """Forget what jobs were expected to need. Call this each second."""
        self._requests.clear()

    def note_turns(self, job: Job, provenance: Provenance) -> None:
        """Update the estimates of what a job's add-ons cost with the measured turns of its last attempt."""
        self._addon_costs.note(job, provenance)
        self._requests.clear()

    def _request_for(self, job: Job, steps_left: float, share: float) -> ResourceRequest:
        return _request_for(job, steps_left, share, self._addon_costs.slowdown(job))

    def alone_s(self, model: str, request: ResourceRequest) -> float:
        """Return the seconds that a job takes alone, on the fastest of some workers; 0 if none has measured a step."""
        workers = self.workers(islice(self._fleet.serving(model), _COMPARED))
        measured = [worker for worker in workers if not worker.unmeasured]
        return min((worker.alone_s(request) + worker.fixed_s for worker in measured), default=0.0)

    def _savings(self, job: Job) -> list[ExpectedSavings]:
        return [addon.expected_savings(job) for addon in self._addons]

    def _reduced(self, job: Job, steps_left: float, shares: Mapping[str, float]) -> Mapping[str, ResourceRequest]:
        """Return the job's resources at each worker that computes a smaller share of its tokens."""
        by_share = {share: self._request_for(job, steps_left, share) for share in set(shares.values())}
        return {worker: by_share[share] for worker, share in shares.items()}

    def _renewed(self, member: Member, cached: _CachedState | None, ours: Sequence[Job]) -> _CachedState:
        """Compute the state of a worker that has changed or is new.

        Args:
            member: The worker.
            cached: The cached state, or None.
            ours: Jobs that this gateway has sent to the worker.
        """
        jobs = tuple(job.job_id for job in ours)
        same = cached is not None and cached.jobs == jobs and cached.age < _KEPT_WIDTHS
        findings = Findings()
        if cached is not None and same:
            findings.widths = cached.state.findings.widths
        if cached is not None and cached.load is member.load:
            findings.alone, findings.turns = cached.state.findings.alone, cached.state.findings.turns
        renewed = self._cache[member] = _CachedState(
            state=self._new_state(member, ours, findings),
            load=member.load,
            revision=member.revision,
            jobs=jobs,
            age=cached.age + 1 if cached is not None and same else 0,
        )
        return renewed

    def _new_state(self, member: Member, ours: Sequence[Job], findings: Findings) -> WorkerState:
        running, due_s = self._running(member, ours)
        return WorkerState(
            worker=member.name,
            running=running,
            due_s=due_s,
            # A reported attempt counts until the next report: one that was stopped may still run a forward pass.
            finishing=len({job.job_id for job in ours} | member.steps_left.keys()) - len(running),
            exclusive=any(job.quarantined for job in ours),
            times=member.times,
            fixed_s=max(0.0, member.load.fixed_s),
            max_rows=member.load.max_rows,
            fractions=member.fractions,
            findings=findings,
        )

    def _running(self, member: Member, ours: Sequence[Job]) -> tuple[tuple[ResourceRequest, ...], tuple[float, ...]]:
        """Return the resources of the jobs that still denoise on a worker, and the seconds until each is due."""
        reported = dict(member.steps_left)
        requests, due_s = list[ResourceRequest](), list[float]()
        for job in ours:
            left = float(job.steps.total - job.steps.done)
            if job.job_id in reported:
                left = min(left, reported.pop(job.job_id) / job.request.evaluations_per_step)
            if left > 0:
                share = member.shares.get(job.job_id) or _computed_share(self._savings(job))
                requests.append(self._request_for(job, left, share))
                due_s.append(job.due_s)
        for job_id, left in reported.items():
            if left > 0 and self._jobs.find_live(job_id) is None:
                share = member.shares.get(job_id, 1.0)
                requests.append(ResourceRequest(rows=_FOREIGN_ROWS, steps=left, shape=(0, 0), share=share))
                due_s.append(math.inf)
        return tuple(requests), tuple(due_s)


class _CostsByKey:
    """The costs of jobs in one round, by their add-ons' keys. Most jobs of a queue have the same costs as others.

    Args:
        addons: The gateway's add-ons.
        members: Workers that may get jobs, by name.
    """

    def __init__(self, addons: Sequence[AddOn], members: Mapping[str, Member]) -> None:
        self._addons = addons
        self._members = members
        self._known: dict[tuple[int, Hashable], WorkerCosts] = {}
        self._sums: dict[tuple[Hashable, ...], WorkerCosts] = {}

    def of(self, job: Job) -> WorkerCosts:
        """Return the sum of a job's costs over all add-ons."""
        of_job = [addon.costs(job) for addon in self._addons]
        keys = tuple([None if costs is None else costs.key for costs in of_job])
        total = self._sums.get(keys)
        if total is None:
            total = self._sums[keys] = self._sum(of_job)
        return total

    def _sum(self, of_job: Sequence[JobCosts | None]) -> WorkerCosts:
        total = NO_COSTS
        for number, asked in enumerate(of_job):
            if asked is None:
                continue
            costs = self._known.get((number, asked.key))
            if costs is None:
                costs = self._known[number, asked.key] = asked.at(self._members) or NO_COSTS
            if costs is not NO_COSTS:
                total = costs if total is NO_COSTS else _sum(total, costs, self._members)
        return total


def _sum(one: WorkerCosts, other: WorkerCosts, members: Mapping[str, Member]) -> WorkerCosts:
    load_s = one.load_s or other.load_s
    if one.load_s and other.load_s:
        load_s = SecondsByWorker(
            members.keys(), lambda worker: one.load_s.get(worker, 0.0) + other.load_s.get(worker, 0.0)
        )
    limits = [costs.eligible for costs in (one, other) if costs.eligible is not None]
    return WorkerCosts(
        load_s=load_s,
        eligible=frozenset.intersection(*limits) if limits else None,
        # Only one kind of add-on reduces the computed tokens.
        shares={**one.shares, **other.shares},
        share=min(one.share, other.share),
    )


def _steps_left(job: Job, savings: Sequence[ExpectedSavings]) -> float:
    """Return the steps that a pending job still has to compute. A checkpoint or an add-on may save some."""
    if job.checkpoint is not None:
        return job.steps.total - job.checkpoint.steps_done
    return job.steps.total - sum(each.skipped_steps for each in savings)


def _computed_share(savings: Sequence[ExpectedSavings]) -> float:
    return min((each.computed_share for each in savings), default=1.0)


def _must_avoid(job: Job, members: Mapping[str, Member]) -> bool:
    lost = members.get(job.losses.last_worker) if job.losses.last_worker else None
    if lost is None:
        return False
    return len(members) > 1 or lost.heard_at < job.losses.last_at + _TRUST_AFTER_S


def _request_for(job: Job, steps_left: float, share: float, slowdown: float) -> ResourceRequest:
    """Return the resources of a job as the policy needs them.

    Args:
        job: The job.
        steps_left: Steps left, summed over all images. The images run side by side.
        share: Share of the tokens that is computed.
        slowdown: How many times as long its forward passes take because of its add-ons.
    """
    steps = math.ceil(max(0, steps_left) * job.request.evaluations_per_step / job.num_images)
    return _cached_request(job.rows, steps, job.request.shape, rounded_share(share), slowdown)


@functools.lru_cache(_REQUESTS)
def _cached_request(rows: int, steps: int, shape: Shape, share: float, slowdown: float) -> ResourceRequest:
    return ResourceRequest(rows=rows, steps=steps, shape=shape, share=share, slowdown=slowdown)
