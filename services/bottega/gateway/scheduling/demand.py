"""The demand for services: each model's work, forecast once a second, and how many services it needs.

Scalers, which join the fleet with the pools of services that they may run, are told their share. Other autoscalers read
the same numbers from the metrics or from ListMembers.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bottega import kinds
from bottega.addons.interface.views import Member
from bottega.clocks import Clock
from bottega.gateway.config import ScalingConfig
from bottega.gateway.dispatch.dispatcher import Dispatcher
from bottega.gateway.fleet.registry import Fleet
from bottega.gateway.jobs.job import Job
from bottega.gateway.scheduling.queue import JobQueue
from bottega.gateway.scheduling.snapshot import FleetSnapshot
from bottega.gateway.scheduling.worker_plan import BatchCosts, ResourceRequest, WorkerState
from bottega.planning.scaling import ArrivalRate, Need, PoolState, Supply, TargetCount, Work, services_needed, share_out
from bottega.v1.fleet_pb2 import Demand, Pool, PoolTarget

_log = logging.getLogger(__name__)
# Seconds that a job counts as while no step has been measured.
_UNKNOWN_JOB_S = 1.0
# A start that takes longer than usual is expected to take this much longer than it took so far.
_LATE_SHARE = 0.25
# Updates, one a second, within which a scaler reports that its services have changed.
_LAGGING_UPDATES = 10
# Services without work that a scaler is told.
_MAX_IDLE = 256
# Share of the work that services may have together, up to which some of them may be stopped.
_IDLE_SHARE = 0.75


_Pools = Sequence[tuple[Member, Pool]]
"""The pools of one kind and model, each with its scaler."""


@dataclass(slots=True, kw_only=True)
class _ModelState:
    """The state of a model between two forecasts."""

    jobs: ArrivalRate = field(default_factory=ArrivalRate)
    images: ArrivalRate = field(default_factory=ArrivalRate)
    seconds: ArrivalRate = field(default_factory=ArrivalRate)
    costs: BatchCosts | None = None
    """Costs at a worker that was there last; None while none has measured a step."""
    targets: dict[str, TargetCount] = field(default_factory=dict)
    """By kind."""
    unscaled: dict[str, deque[int]] = field(default_factory=dict)
    """By kind, how many more services were ready than scalers reported, in the last updates."""
    unserved: int = 0
    """Number of updates in a row in which a scaler's workers were ready, and no worker served the model."""

    def fixed(self, kind: str, ready: int, pools: _Pools) -> int:
        """Return how many services no scaler runs: the least number lately.

        A service that has just joined, or is about to leave, is not in its scaler's report for a moment.
        """
        known = self.unscaled.setdefault(kind, deque(maxlen=_LAGGING_UPDATES))
        known.append(max(0, ready - sum(pool.ready for _, pool in pools)))
        return min(known)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelWork:
    """The jobs of a model at the time of a forecast."""

    work: Work
    workers: int
    """Number of workers that accept jobs."""
    asking: Mapping[str, int]
    """How many of them lack a stage, by stage."""
    images: int
    """Images of the jobs that wait."""
    controlnet_jobs: int
    """Jobs with ControlNets that run, and those that would run if each worker began one more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forecast:
    """The services of one kind for a model: those that are there, and those that its work needs."""

    kind: str
    supply: Supply
    need: Need
    pools: _Pools
    fixed: int = 0
    """Number of services that no scaler runs."""

    def bounded(self, count: int) -> int:
        """Return a number of services within the bounds of the scalers, if there are any."""
        if not self.pools:
            return count
        states = self._states()
        least = sum(min(pool.minimum, pool.maximum) for pool in states)
        return min(max(count, self.fixed + least), self.fixed + sum(pool.maximum for pool in states))

    @property
    def known(self) -> int:
        """Number of services that no scaler runs, and of those that scalers run or start, joined or not."""
        return self.fixed + sum(pool.count for pool in self._states())

    def share_out(self, count: int) -> list[int]:
        """Return how many of `count` services each pool should run."""
        return share_out(count - self.fixed, self._states())

    def _states(self) -> list[PoolState]:
        return [
            PoolState(
                minimum=pool.minimum,
                maximum=max(0, pool.maximum - pool.failed),
                count=pool.ready + len(pool.starting_s),
            )
            for _, pool in self.pools
        ]


class FleetDemand:
    """Decides how many services each model needs, from `begin` on. Call `update` each second.

    Attributes:
        demand: The result of the last update, by kind and model; empty unless this gateway schedules.
    """

    def __init__(
        self,
        *,
        config: ScalingConfig,
        fleet: Fleet,
        queue: JobQueue,
        snapshot: FleetSnapshot,
        dispatcher: Dispatcher,
        clock: Clock,
    ) -> None:
        self.demand: tuple[Demand, ...] = ()
        self._config = config
        self._fleet = fleet
        self._queue = queue
        self._snapshot = snapshot
        self._dispatcher = dispatcher
        self._clock = clock
        self._models: dict[str, _ModelState] = {}
        self._arrived: Counter[tuple[str, ResourceRequest, int]] = Counter()
        """Jobs by model, needs and number of images."""
        self._targets: dict[Member, list[PoolTarget]] = {}
        self._grace_until: float | None = None
        """Time until which no target is below what runs; None while this gateway does not schedule."""

    def begin(self, *, grace_s: float) -> None:
        """Begin anew when this gateway has read the jobs that it schedules.

        Args:
            grace_s: Seconds within which scalers and workers that were there before have joined again. Until then, and
                for as long as services are kept, no running service is stopped.
        """
        self._models.clear()
        self._arrived.clear()
        self._grace_until = self._clock.monotonic() + grace_s

    def end(self) -> None:
        """Compute nothing and tell scalers nothing any more, because another gateway schedules."""
        self.demand, self._targets, self._grace_until = (), {}, None

    def note_arrival(self, job: Job) -> None:
        """Count a job that was accepted."""
        self._arrived[job.bare.model, self._snapshot.resource_request(job), job.num_images] += 1

    def targets(self, member: Member) -> Sequence[PoolTarget]:
        """Return how many services each pool of a scaler should run; nothing before the first forecast."""
        return self._targets.get(member, ())

    def update(self) -> None:
        """Forecast the work of all models, and tell the scalers how many services they should run.

        Does nothing unless this gateway schedules: only then are the jobs that wait in its queue.
        """
        if self._grace_until is None:
            return
        now = self._clock.monotonic()
        pools = self._pools()
        served = {model for member in self._fleet.services(kinds.WORKER) for model in member.served}
        names = served | {model for _, model in pools} | set(self._queue.models())
        self._models = {name: self._models.get(name) or _ModelState() for name in names}
        self._note_arrivals(now)
        demand: list[Demand] = []
        targets: dict[Member, list[PoolTarget]] = defaultdict(list)
        for name in sorted(names):
            state = self._models[name]
            work = self._work(name, state, now)
            self._warn_if_unserved(name, state, pools.get((kinds.WORKER, name), ()))
            for each in self._forecasts(name, state, work, pools):
                desired = each.bounded(self._target(state, each, now))
                demand.append(_message(name, each, desired, work.work))
                for (member, pool), share in zip(each.pools, each.share_out(desired), strict=True):
                    idle = self._idle(each.kind, name) if share < pool.ready else ()
                    targets[member].append(PoolTarget(kind=each.kind, model=name, count=share, idle=idle))
        self.demand = tuple(demand)
        for member, of_member in targets.items():
            if self._targets.get(member) != of_member:
                member.wake.set()
        self._targets = dict(targets)

    def _warn_if_unserved(self, model: str, state: _ModelState, pools: _Pools) -> None:
        """Log once that a pool's workers serve other models, as they do if its model is not named as in requests."""
        workers = self._fleet.services(kinds.WORKER)
        named = [scaler.name for scaler, pool in pools if pool.ready]
        if not named or any(worker.is_starting or model in worker.served for worker in workers):
            state.unserved = 0
            return
        state.unserved += 1
        if state.unserved == _LAGGING_UPDATES:
            served = sorted({name for worker in workers for name in worker.served})
            facts = {"model": model, "scalers": named, "served": served}
            _log.warning(
                "workers of a scaler's pool are ready, but none serves its model: check pools.model", extra=facts
            )

    def _target(self, state: _ModelState, forecast: _Forecast, now: float) -> int:
        need, target = forecast.need, state.targets.get(forecast.kind)
        if target is None:
            target = state.targets[forecast.kind] = TargetCount(max(forecast.supply.count, forecast.known), now)
        if self._grace_until is not None and now < self._grace_until:
            need = Need(least=max(need.least, forecast.known), most=max(need.most, forecast.known))
        return target.update(need, now, hold_s=max(self._config.keep_s, forecast.supply.start_s))

    def _forecasts(
        self, model: str, state: _ModelState, work: _ModelWork, pools: Mapping[tuple[str, str], _Pools]
    ) -> Iterator[_Forecast]:
        """Yield the forecasts of a model's workers, and of its other services of which scalers run some."""
        of_workers = pools.get((kinds.WORKER, model), ())
        supply = _supply(work.workers, of_workers, self._fleet.start_s(model) or self._config.start_s)
        need = services_needed(work.work, supply, wait_s=self._config.wait_s)
        fixed = state.fixed(kinds.WORKER, work.workers, of_workers)
        yield _Forecast(kind=kinds.WORKER, supply=supply, need=need, pools=of_workers, fixed=fixed)
        for stage in kinds.STAGES:
            if of_stage := pools.get((stage, model), ()):
                yield self._stage_forecast(stage, model, state, work, of_stage)
        of_servers = pools.get((kinds.CONTROLNET, model), ())
        if of_servers:
            servers = self._controlnet_servers(model)
            start_s = max((server.load.start_s for server in servers), default=0.0) or self._config.start_s
            most = self._config.controlnet_jobs
            need = Need(
                least=math.ceil(work.controlnet_jobs / most),
                most=math.ceil(work.controlnet_jobs / (_IDLE_SHARE * most)),
            )
            supply = _supply(len(servers), of_servers, start_s)
            fixed = state.fixed(kinds.CONTROLNET, len(servers), of_servers)
            yield _Forecast(kind=kinds.CONTROLNET, supply=supply, need=need, pools=of_servers, fixed=fixed)

    def _stage_forecast(self, stage: str, model: str, state: _ModelState, work: _ModelWork, pools: _Pools) -> _Forecast:
        """Return the forecast of a model's workers with one role: as many as their requests keep busy.

        A job makes one request to encode, and one to decode each image, if a worker without the role draws it. Workers
        with and without the role are expected to draw equally many. Those that wait should be done within `wait_s`.
        """
        present = self._stage_workers(stage, model)
        now, is_encode = self._clock.monotonic(), stage == kinds.ENCODE
        waiting = work.work.waiting if is_encode else work.images
        arriving = work.work.arriving if is_encode else state.images.per_s(now)
        share = work.asking[stage] / work.workers if work.workers else 1.0
        busy = share * _request_s(present) * max(arriving, waiting / self._config.wait_s)
        least = 1 if share else 0
        start_s = max((member.load.start_s for member in present), default=0.0) or self._config.start_s
        return _Forecast(
            kind=stage,
            supply=_supply(len(present), pools, start_s),
            need=Need(least=math.ceil(busy) or least, most=math.ceil(busy / _IDLE_SHARE) or least),
            pools=pools,
            fixed=state.fixed(stage, len(present), pools),
        )

    def _stage_workers(self, stage: str, model: str) -> list[Member]:
        return [
            member
            for member in self._fleet.services(stage)
            if not member.load.draining and any(served.name == model for served in member.registration.models)
        ]

    def _own(self, state: WorkerState, worker: Member, model: str) -> WorkerState:
        """Return the state of a worker without the seconds in which others encode and decode for it."""
        elsewhere_s = sum(_request_s(self._stage_workers(stage, model)) for stage in worker.asks)
        return replace(state, fixed_s=max(0.0, state.fixed_s - elsewhere_s)) if elsewhere_s else state

    def _idle(self, kind: str, model: str) -> Sequence[str]:
        """Return the names of a model's workers or ControlNet servers that have nothing to do."""
        idle: list[Member] = []
        if kind == kinds.CONTROLNET:
            servers = self._controlnet_servers(model)
            idle = [server for server in servers if not any(net.sessions for net in server.load.hosted)]
        elif kind == kinds.WORKER:
            busy = {worker for worker, link in self._dispatcher.connections.items() if link.jobs}
            idle = [one for one in self._fleet.serving(model) if one not in busy and not one.load.running]
        return sorted(member.name for member in idle if not member.load.draining)[:_MAX_IDLE]

    def _pools(self) -> Mapping[tuple[str, str], _Pools]:
        """Return the pools of all scalers, by kind and model."""
        pools: dict[tuple[str, str], list[tuple[Member, Pool]]] = defaultdict(list)
        for member in self._fleet.services(kinds.SCALE):
            for pool in member.load.pools:
                pools[pool.kind, pool.model].append((member, pool))
        return pools

    def _note_arrivals(self, now: float) -> None:
        for (model, request, images), count in self._arrived.items():
            state = self._models.get(model)
            if state is not None:
                state.jobs.note(count, now)
                state.seconds.note(count * _seconds(state.costs, request), now)
                state.images.note(count * images, now)
        self._arrived.clear()

    def _work(self, model: str, state: _ModelState, now: float) -> _ModelWork:
        workers = [worker for worker in self._fleet.serving(model) if not worker.load.draining]
        members = {worker.name: worker for worker in workers}
        states = [self._own(state, members[state.worker], model) for state in self._snapshot.workers(workers)]
        measured = next((worker for worker in states if not worker.unmeasured), None)
        if measured is not None:
            state.costs = BatchCosts(measured)
        waiting, images, controlnet_jobs = Counter[ResourceRequest](), 0, 0
        for job in self._queue.unordered(model):
            waiting[self._snapshot.resource_request(job)] += 1
            images += job.num_images
            controlnet_jobs += bool(job.controlnets)
        # While one asks for a model of which no worker has run yet, no job can be accepted.
        jobs = waiting.total() or int(self._fleet.is_wanted(model))
        work = Work(
            waiting=jobs,
            waiting_s=sum(count * _seconds(state.costs, request) for request, count in waiting.items())
            or jobs * _UNKNOWN_JOB_S,
            running_s=tuple(_running_s(state.costs, worker) for worker in states if worker.running or worker.finishing),
            arriving=state.jobs.per_s(now),
            arriving_s=state.seconds.per_s(now),
        )
        connections = (self._dispatcher.connections.get(worker) for worker in workers)
        running = sum(bool(job.controlnets) for connection in connections if connection for job in connection.jobs)
        jobs = running + min(controlnet_jobs, len(workers))
        asking = Counter(stage for worker in workers for stage in worker.asks)
        return _ModelWork(work=work, workers=len(workers), asking=asking, images=images, controlnet_jobs=jobs)

    def _controlnet_servers(self, model: str) -> list[Member]:
        base = self._fleet.last_seen(model).base
        return [
            server
            for server in self._fleet.services(kinds.CONTROLNET)
            if not server.load.draining
            and any(not item.base or not base or item.base == base for item in server.hosts(kinds.CONTROLNET).items)
        ]


def _seconds(costs: BatchCosts | None, request: ResourceRequest) -> float:
    return _UNKNOWN_JOB_S if costs is None else costs.seconds(request)


def _request_s(stage_workers: Sequence[Member]) -> float:
    return max((member.load.fixed_s for member in stage_workers), default=0.0)


def _running_s(costs: BatchCosts | None, worker: WorkerState) -> float:
    return sum(_seconds(costs, request) for request in worker.running) + worker.finishing * worker.fixed_s / 2


def _supply(ready: int, pools: _Pools, start_s: float) -> Supply:
    ages_s = (age_s for _, pool in pools for age_s in pool.starting_s)
    return Supply(
        ready=ready,
        starting_s=tuple(max(start_s - age_s, _LATE_SHARE * age_s) for age_s in ages_s),
        start_s=start_s,
    )


def _message(model: str, forecast: _Forecast, desired: int, work: Work) -> Demand:
    supply = forecast.supply
    return Demand(
        kind=forecast.kind,
        model=model,
        desired=desired,
        ready=supply.ready,
        starting=len(supply.starting_s),
        waiting=work.waiting,
        waiting_s=work.waiting_s,
        arriving_s=work.arriving_s,
        start_s=supply.start_s,
    )
