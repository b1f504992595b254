"""A simulated fleet whose jobs use ControlNets on servers, with the gateway's choice of servers or without it."""

from __future__ import annotations

import enum
import heapq
import random
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from bottega.addons.controlnets.gateway.ranking import ServerCandidate, best_first
from bottega.addons.controlnets.gateway.replicas import ReplicaPolicy
from bottega.addons.controlnets.gateway.server_loads import Copy
from bottega.v1.hosted_pb2 import HOSTED_STATE_LOADED, HOSTED_STATE_LOADING, HOSTED_STATE_ON_DISK
from load.bench.sdxl_costs import StageCosts
from load.replay.trace_shape import CONTROLNETS, LORAS

_STEPS, _ROWS = (20, 30, 50), 2
_LORA_SHARE, _IN_TIME = 0.05, 5.0
# Jobs that come, over what workers can draw if no ControlNet is late.
_LOAD = 0.6
# SDXL's ControlNet of 2.5 GB from a disk of 1 GB/s, and the ControlNets for which a server has memory.
_LOAD_S, _ROOM = 2.5, 4
# Seconds between two looks at everything, and between two of the policy.
_TICK_S, _LOOK_S = 0.25, 1.0
# Share of the run before the jobs that count, in which replicas are made.
_WARM_UP = 0.5
# The least busy servers of each state among which a job chooses: others are not chosen, as all servers are alike.
_COMPARED = 4


class Side(enum.Enum):
    """How the servers of ControlNets are chosen."""

    ONE_SERVER = 0
    """Each ControlNet stays at the server that has loaded it first."""
    RANKING = 1
    """By the gateway's ranking, by which a job may also let another server load a ControlNet."""
    REPLICAS = 2
    """By the ranking, and the gateway's policy makes replicas before jobs need them."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Job:
    number: int
    at_s: float
    nets: tuple[str, ...]
    turn_s: float
    alone_s: float
    steps_left: float
    """Steps of a turn that are left."""
    servers: tuple[_Server, ...] = ()
    begins_s: float = 0.0
    """When its prompt is encoded and its ControlNets are in memory."""
    ended_s: float | None = None


class _Server:
    """A ControlNet server with its sessions, and when each of its ControlNets is in memory."""

    def __init__(self, number: int) -> None:
        self.name = f"s{number:04}"
        self.sessions: Counter[str] = Counter()
        self.count = 0
        self.loaded_s: dict[str, float] = {}
        self.replicas: set[str] = set()
        """Its ControlNets that the policy made it load."""

    @property
    def idle_nets(self) -> list[str]:
        """Its ControlNets without sessions."""
        return [name for name in self.loaded_s if not self.sessions[name]]

    @property
    def has_room(self) -> bool:
        """Whether it can load another ControlNet."""
        return len(self.loaded_s) < _ROOM or bool(self.idle_nets)


def share_in_time(service: str, workers: int, costs: StageCosts, *, length_s: float, seed: int, side: Side) -> float:
    """Return the share of the jobs that end in time.

    Args:
        service: Service of Katz' trace, A or B.
        workers: Workers, and servers.
        costs: Seconds of forward passes.
        length_s: Seconds of the run.
        seed: Seed of the jobs.
        side: How servers are chosen.
    """
    jobs = list(_jobs(service, workers, costs, length_s, seed))
    _Fleet(workers, costs, side=side).run(jobs, length_s)
    judged = [
        job.ended_s is not None and job.ended_s - job.at_s <= _IN_TIME * job.alone_s
        for job in jobs
        if job.at_s >= _WARM_UP * length_s and (job.ended_s is not None or length_s - job.at_s > _IN_TIME * job.alone_s)
    ]
    return sum(judged) / len(judged)


def _jobs(service: str, workers: int, costs: StageCosts, length_s: float, seed: int) -> Iterator[_Job]:
    chance = random.Random(f"replicas {service} {workers} {seed}")
    nets, loras = CONTROLNETS[service].draw(chance, least=0), LORAS[service].draw(chance, least=0)
    at_s, number = 0.0, 0
    mean_s = sum(costs.stages_s(sum(_STEPS) // len(_STEPS), _ROWS, 1.0 + _LORA_SHARE))
    while True:
        at_s += chance.expovariate(_LOAD * workers / mean_s)
        if at_s >= length_s:
            return
        steps, slowdown = chance.choice(_STEPS), 1.0 + _LORA_SHARE * len(next(loras))
        yield _Job(
            number=number,
            at_s=at_s,
            nets=tuple(f"net{rank}" for rank in next(nets)),
            turn_s=_ROWS * costs.row_s * slowdown,
            alone_s=sum(costs.stages_s(steps, _ROWS, slowdown)),
            steps_left=float(steps),
        )
        number += 1


class _Fleet:
    """Workers that each draw one job at a time, and as many servers."""

    def __init__(self, workers: int, costs: StageCosts, *, side: Side) -> None:
        self._idle = workers
        self._encode_s, _, self._decode_s = costs.stages_s(0, _ROWS)
        self._turn_s, self._forward_s = _ROWS * costs.row_s, _ROWS * costs.controlnet_s
        self._servers = [_Server(number) for number in range(workers)]
        self._by_name = {server.name: server for server in self._servers}
        self._hosts: dict[str, list[_Server]] = {}
        self._side = side
        self._policy = ReplicaPolicy()
        self._now_s = 0.0

    def run(self, jobs: list[_Job], length_s: float) -> None:
        """Draw the jobs until the run ends."""
        coming, waiting, running, ending = deque(jobs), deque[_Job](), list[_Job](), list[float]()
        while self._now_s < length_s:
            while coming and coming[0].at_s <= self._now_s:
                waiting.append(coming.popleft())
            while ending and ending[0] <= self._now_s:
                heapq.heappop(ending)
                self._idle += 1
            while waiting and self._idle:
                self._idle -= 1
                self._begin(waiting[0])
                running.append(waiting.popleft())
            if self._side is Side.REPLICAS and self._now_s % _LOOK_S == 0:
                self._look()
            for job in running:
                self._advance(job)
                if job.ended_s is not None:
                    heapq.heappush(ending, job.ended_s)
                    self._count_sessions(job, -1)
            running = [job for job in running if job.ended_s is None]
            self._now_s += _TICK_S

    def _begin(self, job: _Job) -> None:
        job.begins_s = self._now_s + self._encode_s
        for name in job.nets:
            server = self._choose(job, name)
            job.begins_s = max(job.begins_s, self._load(server, name))
            job.servers = (*job.servers, server)
            server.sessions[name] += 1
            server.count += 1

    def _advance(self, job: _Job) -> None:
        """Advance a job by one tick. A step takes at least one forward pass for each session of its busiest server."""
        step_s = max([job.turn_s, *(server.count * self._forward_s for server in job.servers)])
        left_s = min(_TICK_S, self._now_s + _TICK_S - job.begins_s)
        if left_s <= 0.0:
            return
        if job.steps_left * step_s <= left_s:
            job.ended_s = self._now_s + _TICK_S - left_s + job.steps_left * step_s + self._decode_s
        job.steps_left -= left_s / step_s

    def _count_sessions(self, job: _Job, by: int) -> None:
        for server, name in zip(job.servers, job.nets, strict=True):
            server.sessions[name] += by
            server.count += by

    def _choose(self, job: _Job, name: str) -> _Server:
        """Return the server for a job's ControlNet."""
        hosts = self._hosts.get(name, [])
        if hosts and self._side is Side.ONE_SERVER:
            return hosts[0]
        compared = [
            *heapq.nsmallest(_COMPARED, (each for each in hosts if each.loaded_s[name] <= self._now_s), key=_by_count),
            *heapq.nsmallest(_COMPARED, (each for each in hosts if each.loaded_s[name] > self._now_s), key=_by_count),
        ]
        free = [each for each in self._servers if name not in each.loaded_s and each.has_room]
        compared += [min(free, key=_by_count)] if free else []
        candidates = [[self._candidate(server, name)] for server in compared]
        first = best_first(
            candidates, name=name, job_id=str(job.number), steps=round(job.steps_left), turn_s=job.turn_s
        )[0]
        return self._by_name[first.server]

    def _candidate(self, server: _Server, name: str) -> ServerCandidate:
        ready_s = server.loaded_s.get(name)
        loading = ready_s is not None and ready_s > self._now_s
        in_memory = HOSTED_STATE_LOADING if loading else HOSTED_STATE_LOADED
        return ServerCandidate(
            server=server.name,
            digest=name,
            state=HOSTED_STATE_ON_DISK if ready_s is None else in_memory,
            load_s=_LOAD_S if ready_s is None else max(0.0, ready_s - self._now_s),
            own_s=self._forward_s,
            others_s=server.count * self._forward_s,
        )

    def _load(self, server: _Server, name: str) -> float:
        """Load a ControlNet, unless it is there; return when it is in memory."""
        if name not in server.loaded_s:
            if len(server.loaded_s) >= _ROOM:
                self._evict(server, server.idle_nets[0])
            server.loaded_s[name] = self._now_s + _LOAD_S
            self._hosts.setdefault(name, []).append(server)
        return server.loaded_s[name]

    def _evict(self, server: _Server, name: str) -> None:
        del server.loaded_s[name]
        server.replicas.discard(name)
        self._hosts[name].remove(server)

    def _look(self) -> None:
        """Let servers load and evict what the policy of replicas decides."""
        nets = {name: self._copies(name) for name, hosts in self._hosts.items() if hosts}
        for change in self._policy.decide(nets, self._turn_s, self._now_s):
            server = self._by_name[change.server]
            if change.load:
                self._load(server, change.name)
                server.replicas.add(change.name)
            elif change.name in server.loaded_s and not server.sessions[change.name]:
                self._evict(server, change.name)

    def _copies(self, name: str) -> list[Copy]:
        """Return a ControlNet at its servers, and at the least busy ones that have memory for it."""
        free = (each for each in self._servers if name not in each.loaded_s and len(each.loaded_s) < _ROOM)
        servers = [*self._hosts[name], *heapq.nsmallest(1 + len(self._hosts[name]), free, key=_by_count)]
        return [
            Copy(
                candidate=self._candidate(server, name),
                loaded=name in server.loaded_s,
                fits=name not in server.loaded_s,
                sessions=server.sessions[name],
                pinned=False,
                copied=name in server.replicas,
            )
            for server in servers
        ]


def _by_count(server: _Server) -> tuple[int, int]:
    return server.count, len(server.loaded_s)
