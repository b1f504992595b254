"""Where the ControlNets of jobs run: who may take a job for their sake, which servers it gets, what to load ahead.

Reads the fleet and keeps count of what was given out; calls nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bottega import kinds
from bottega.errors import NoControlNet
from bottega.gateway.addons.controlnets.ranking import ServerCandidate, best_first
from bottega.gateway.clock import Clock
from bottega.gateway.fleet.hosted import nobody_hosts
from bottega.gateway.fleet.members import Member
from bottega.gateway.fleet.registry import Fleet
from bottega.gateway.jobs.job import Job
from bottega.v1 import controlnet_pb2, worker_pb2
from bottega.v1.controlnet_pb2 import HostedControlNet
from bottega.v1.generation_pb2 import GenerationSpec

# Servers that an attempt is told of for one ControlNet; more failures than that are no accident.
_MOST_SERVERS = 8
# Of weights that come from a disk into memory: a guess, for comparing a worker that has them with one that has not.
_LOADED_BYTES_PER_S = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """One ControlNet of a job. servers: the best first; none where only workers have it at hand.

    similarity: see worker_pb2.ControlNetHosts.
    """

    name: str
    digest: str
    servers: tuple[tuple[Member, ServerCandidate], ...]
    similarity: float | None


class ControlNetPlacement:
    """Knows of every attempt which servers it was given, from `place` to `release`."""

    def __init__(self, *, fleet: Fleet, clock: Clock) -> None:
        self._fleet = fleet
        self._clock = clock
        self._given: dict[str, tuple[tuple[str, str], ...]] = {}
        self._sessions: Counter[str] = Counter()
        self._nets: Counter[tuple[str, str]] = Counter()  # by server and ControlNet

    def takers(self, job: Job) -> Mapping[str, float] | None:
        """Workers that may take a job, with the seconds that they need to load what no server hosts; None is any.

        The same for all jobs of a model with the same ControlNets.
        """
        takers: dict[str, float] | None = None
        for name in dict.fromkeys(job.controlnets):
            if any(True for _ in self._servers(job, name)):
                continue
            alone = {worker.name: _load_s(net) for worker, net in self._workers(job, name)}
            if takers is None:
                takers = alone
            else:
                takers = {worker: takers[worker] + alone[worker] for worker in takers.keys() & alone.keys()}
        return takers

    def missing(self, job: Job) -> NoControlNet | None:
        """Why a job waits in vain for its ControlNets; None where it does not."""
        model = job.bare.model
        base = self._fleet.base(model)
        gone = [name for name in job.controlnets if not self._fleet.hosting.expected(name, model, base)]
        return nobody_hosts(dict.fromkeys(gone)) if gone else None

    def place(self, job: Job, worker: Member) -> list[worker_pb2.ControlNetHosts]:
        """What an attempt at that worker is told of where its ControlNets are, one for each of the spec's."""
        if not job.controlnets:
            return []
        choices = list(self._choices(job, worker))
        given = tuple((choice.servers[0][0].name, choice.name) for choice in choices if choice.servers)
        servers = tuple(server for server, _ in given)
        self._given[job.job_id] = given
        self._sessions.update(servers)
        self._nets.update(given)
        job.use_controlnets({choice.name: choice.digest for choice in choices if choice.digest}, servers=servers)
        return [_hosts(choice) for choice in choices]

    def release(self, job: Job) -> None:
        """The attempt is over."""
        given = self._given.pop(job.job_id, ())
        self._sessions.subtract(server for server, _ in given)
        self._nets.subtract(given)
        self._sessions += Counter()  # without those that have none
        self._nets += Counter()

    def cold(self, job: Job) -> Iterator[tuple[Member, str]]:
        """ControlNets that the job will need and that are on the disk only, each with the server that would get it."""
        for choice in self._choices(job, None):
            for server, candidate in choice.servers[:1]:
                if candidate.state == controlnet_pb2.HOSTED_STATE_ON_DISK:
                    yield server, choice.name

    def let_rest(self, job: Job, error: NoControlNet) -> None:
        """An attempt has found no server to go on with: those are given nothing for a moment, else the worker is."""
        named = [name for name in error.metadata.get("servers", "").split(",") if name]
        for server in named or job.servers:
            self._fleet.let_rest(server, kind=kinds.CONTROLNET)
        if not named and not job.servers:
            self._fleet.let_rest(job.worker)

    def _choices(self, job: Job, worker: Member | None) -> Iterator[_Choice]:
        """For each ControlNet of a job. The sessions of those before it count for the next."""
        before: Counter[str] = Counter()
        versions = dict(job.versions)
        for name in job.controlnets:
            hosts = list(self._servers(job, name))
            servers = {member.name: member for member, _ in hosts}
            candidates = [self._candidate(member, net, before) for member, net in hosts]
            ranked = best_first(candidates, name=name, job_id=job.job_id, digest=versions.get(name, ""))
            if ranked:
                before[ranked[0].server] += 1
            versions[name] = ranked[0].digest if ranked else self._digest_at(worker, job, name)
            chosen = tuple((servers[candidate.server], candidate) for candidate in ranked)
            hosted = [net for _, net in hosts if net.digest == versions[name]]
            similarity = _similarity(hosted, worker, job.bare) if worker is not None else None
            yield _Choice(name=name, digest=versions[name], servers=chosen, similarity=similarity)

    def _candidate(self, member: Member, net: HostedControlNet, before: Counter[str]) -> ServerCandidate:
        # A report may lag behind what was given out, and may tell of other gateways' jobs.
        sessions = max(self._fleet.hosting.sessions(member), self._sessions[member.name])
        state = net.state
        if self._nets[member.name, net.name] and state == controlnet_pb2.HOSTED_STATE_ON_DISK:
            state = controlnet_pb2.HOSTED_STATE_LOADING  # or will be in a moment
        return ServerCandidate(
            server=member.name, digest=net.digest, state=state, sessions=sessions + before[member.name]
        )

    def _digest_at(self, worker: Member | None, job: Job, name: str) -> str:
        return next((net.digest for member, net in self._workers(job, name) if member is worker), "")

    def _servers(self, job: Job, name: str) -> Iterator[tuple[Member, HostedControlNet]]:
        """ControlNet servers that take new sessions with it."""
        now = self._clock.monotonic()
        for member, net in self._fleet.hosting.hosts(name, self._fleet.base(job.bare.model)):
            if member.kind == kinds.CONTROLNET and not member.load.draining and member.rests_until <= now:
                yield member, net

    def _workers(self, job: Job, name: str) -> Iterator[tuple[Member, HostedControlNet]]:
        """Workers of the job's model with its weights at hand."""
        for member, net in self._fleet.hosting.hosts(name, self._fleet.base(job.bare.model)):
            if member.serves(job.bare.model):
                yield member, net


def _load_s(net: HostedControlNet) -> float:
    return 0.0 if net.state == controlnet_pb2.HOSTED_STATE_LOADED else net.size_bytes / _LOADED_BYTES_PER_S


def _hosts(choice: _Choice) -> worker_pb2.ControlNetHosts:
    servers = [
        worker_pb2.ControlNetServer(name=member.name, address=member.registration.address)
        for member, _ in choice.servers[:_MOST_SERVERS]
    ]
    return worker_pb2.ControlNetHosts(digest=choice.digest, servers=servers, similarity=choice.similarity)


def _similarity(hosted: Sequence[HostedControlNet], worker: Member, spec: GenerationSpec) -> float | None:
    """The least that a profile of it says for the worker's model, of those that cover so many steps."""
    model_hash = next((model.model_hash for model in worker.models if model.name == spec.model), "")
    found = [
        profile.similarity
        for net in hosted
        for profile in net.profiles
        if profile.model_hash == model_hash and profile.num_inference_steps <= spec.num_inference_steps
    ]
    return min(found) if model_hash and found else None
