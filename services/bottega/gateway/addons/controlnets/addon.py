"""ControlNets as an add-on: which workers may have a job, which servers an attempt is given, what these load ahead.

Reads who hosts what from the fleet, and counts the sessions that were given out.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from bottega import kinds
from bottega.clocks import Clock
from bottega.errors import BottegaError, NoControlNet, Violation
from bottega.gateway.addons.addon import NO_COSTS, PREFETCHED_JOBS, AddOn, AddOnContext, Resolution, WorkerCosts
from bottega.gateway.addons.controlnets.client import GrpcControlNetClient
from bottega.gateway.addons.controlnets.hosts import ControlNetHosts, nobody_hosts
from bottega.gateway.addons.controlnets.ranking import ServerCandidate, best_first
from bottega.gateway.addons.prefetch import PrefetchClient, ServicePrefetcher
from bottega.gateway.fleet.members import Member
from bottega.gateway.fleet.registry import Fleet
from bottega.gateway.jobs.job import Job
from bottega.gateway.metrics import GatewayMetrics
from bottega.gateway.tenants.access import Access
from bottega.rpc.channel import Target
from bottega.rules import check_controlnets
from bottega.v1 import controlnet_pb2, hosted_pb2, image_pb2, worker_pb2
from bottega.v1.controlnet_pb2 import ControlNetPlacements
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.hosted_pb2 import Hosted, HostedState

# Servers that an attempt is given for one ControlNet; more failures than that are no accident.
_MOST_SERVERS = 8
# Of weights that come from a disk into memory: a guess, for comparing a worker that has them with one that has not.
_LOADED_BYTES_PER_S = 1e9


# As Diffusers has them: its pipeline for image-to-image with ControlNets differs from the other two.
_DEFAULTS: Mapping[str, float] = MappingProxyType(
    {"controlnet_conditioning_scale": 1.0, "control_guidance_start": 0.0, "control_guidance_end": 1.0}
)
_OF_IMAGE_TO_IMAGE: Mapping[str, float] = MappingProxyType({**_DEFAULTS, "controlnet_conditioning_scale": 0.8})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """One ControlNet of a job. servers: the best first; none where only workers have it themselves.

    similarity: as in controlnet_pb2.ControlNetHosts.
    """

    name: str
    digest: str
    servers: tuple[tuple[Member, ServerCandidate], ...]
    similarity: float | None


def create(context: AddOnContext) -> ControlNetAddOn:
    """The add-on that the manifest names."""
    return ControlNetAddOn(
        fleet=context.fleet,
        connect=functools.partial(GrpcControlNetClient, channels=context.channels),
        metrics=context.metrics,
        clock=context.clock,
    )


class ControlNetAddOn(AddOn):
    """All ControlNets of a gateway. connect: makes the client of a server."""

    adapter_kind = image_pb2.ADAPTER_KIND_CONTROLNET

    def __init__(
        self, *, fleet: Fleet, connect: Callable[[Target], PrefetchClient], metrics: GatewayMetrics, clock: Clock
    ) -> None:
        self._fleet = fleet
        self._clock = clock
        self._hosts = ControlNetHosts(grace_s=fleet.grace_s, clock=clock)
        self._prefetcher = ServicePrefetcher(kinds.CONTROLNET, connect, metrics)
        self._given: dict[str, tuple[tuple[str, str], ...]] = {}  # server and ControlNet, by job
        self._sessions: Counter[str] = Counter()
        self._nets: Counter[tuple[str, str]] = Counter()  # by server and ControlNet
        for state, number in HostedState.items()[1:]:
            name = state.removeprefix("HOSTED_STATE_").lower()
            metrics.controlnets.labels(name).set_function(functools.partial(self._hosts.count, number))

    def is_named(self, spec: GenerationSpec) -> bool:
        """Whether a request names a ControlNet."""
        return bool(spec.controlnets)

    def check(self, spec: GenerationSpec) -> Iterator[Violation]:
        """What is wrong with the ControlNets of a request, their images aside."""
        return check_controlnets(spec)

    async def resolve(self, spec: GenerationSpec, access: Access) -> Resolution:
        """Whether somebody hosts them depends on the model, and is checked with it."""
        names = tuple(self._full_name(net.name, access) for net in spec.controlnets)
        return ResolvedControlNets(names=names, access=access, hosts=self._hosts)

    async def adapters(self, access: Access, models: Sequence[image_pb2.Model]) -> Sequence[image_pb2.Adapter]:
        """Return the ControlNets that the caller may name, each version of them; its own come before those for all."""
        named = [name for name in self._hosts.names() if access.has_controlnet(name)]
        hidden = {access.short_name(name) for name in named if access.short_name(name) != name}
        return [
            image_pb2.Adapter(kind=self.adapter_kind, name=access.short_name(name), digest=digest, models=fitting)
            for name in named
            if name not in hidden
            for digest, fitting in self._hosts.versions(name, models).items()
        ]

    def complete_again(self, full: GenerationSpec, before: GenerationSpec) -> None:
        """The same names; their defaults are always the same."""
        _complete(full, [net.name for net in before.controlnets])

    def versions(self, spec: GenerationSpec, model: image_pb2.Model) -> Sequence[str] | None:
        """Of the weights of each, where all that host it have the same."""
        found = [self._hosts.version(net.name, model) for net in spec.controlnets]
        return found if all(found) else None

    def cost_key(self, job: Job) -> tuple[str, ...] | None:
        """The names of the ControlNets."""
        return job.controlnets or None

    def worker_costs(self, job: Job, workers: Mapping[str, Member]) -> WorkerCosts:
        """A ControlNet that no server hosts is only at the workers that have it themselves, and may have to load it."""
        costs = NO_COSTS
        for name in dict.fromkeys(job.controlnets):
            if any(True for _ in self._servers(job, name)):
                continue
            seconds = {worker.name: _load_s(net) for worker, net in self._workers(job, name)}
            eligible = frozenset(seconds) if costs.eligible is None else costs.eligible.intersection(seconds)
            load_s = {worker: costs.load_s.get(worker, 0.0) + seconds[worker] for worker in eligible}
            costs = WorkerCosts(load_s=load_s, eligible=eligible)
        return costs

    def unavailable(self, job: Job) -> NoControlNet | None:
        """The error of a job with a ControlNet that nobody hosts, nor did within the grace."""
        model = job.bare.model
        base = self._fleet.last_seen(model).base
        gone = [name for name in job.controlnets if not self._hosts.expected(name, model, base)]
        return nobody_hosts(dict.fromkeys(gone)) if gone else None

    def prefetch(self, jobs: Sequence[Job]) -> None:
        """Has servers load what is on their disks only."""
        for job in itertools.islice(jobs, PREFETCHED_JOBS):
            for choice in self._choices(job, None) if job.controlnets else ():
                for server, candidate in choice.servers[:1]:
                    if candidate.state == hosted_pb2.HOSTED_STATE_ON_DISK:
                        self._prefetcher.request(server, [choice.name])

    def prepare_attempt(self, job: Job, worker: Member, request: worker_pb2.RunAttemptRequest) -> None:
        """Says where the ControlNets are, one entry for each of the spec's."""
        if not job.controlnets:
            return
        choices = list(self._choices(job, worker))
        given = tuple((choice.servers[0][0].name, choice.name) for choice in choices if choice.servers)
        servers = tuple(server for server, _ in given)
        self._given[job.job_id] = given
        self._sessions.update(servers)
        self._nets.update(given)
        job.use_controlnets({choice.name: choice.digest for choice in choices if choice.digest}, servers=servers)
        placements = ControlNetPlacements(hosts=[_hosts(choice) for choice in choices])
        request.addons[kinds.CONTROLNET] = placements.SerializeToString()

    def end_attempt(self, job: Job) -> None:
        """The sessions of the attempt end."""
        given = self._given.pop(job.job_id, ())
        self._sessions.subtract(server for server, _ in given)
        self._nets.subtract(given)
        self._sessions += Counter()  # without those that have none
        self._nets += Counter()

    def back_off(self, job: Job, error: BottegaError) -> bool:
        """An attempt that reached no server: these servers are given nothing for a moment, else its worker is."""
        if not isinstance(error, NoControlNet):
            return False
        named = [name for name in error.metadata.get("servers", "").split(",") if name]
        for server in named or job.servers:
            self._fleet.back_off(server, kind=kinds.CONTROLNET)
        if not named and not job.servers:
            self._fleet.back_off(job.worker)
        return True

    def member_changed(self, member: Member) -> None:
        """A server or a worker may host others now."""
        self._hosts.update(member)

    def member_lost(self, member: Member) -> None:
        """Nothing is hosted there any more, nor prefetched."""
        self._hosts.remove(member)
        self._prefetcher.remove(member)

    async def close(self) -> None:
        """Prefetches nothing more."""
        await self._prefetcher.close()

    def _full_name(self, name: str, access: Access) -> str:
        """A tenant's own comes before the one for all."""
        own = access.own(name)
        return own if own and self._hosts.is_there(own) else name

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

    def _candidate(self, member: Member, net: Hosted, before: Counter[str]) -> ServerCandidate:
        # A report may lag behind what was given out, and may tell of other gateways' jobs.
        sessions = max(self._hosts.sessions(member), self._sessions[member.name])
        state = net.state
        if self._nets[member.name, net.name] and state == hosted_pb2.HOSTED_STATE_ON_DISK:
            state = hosted_pb2.HOSTED_STATE_LOADING  # or will be in a moment
        return ServerCandidate(
            server=member.name, digest=net.digest, state=state, sessions=sessions + before[member.name]
        )

    def _digest_at(self, worker: Member | None, job: Job, name: str) -> str:
        return next((net.digest for member, net in self._workers(job, name) if member is worker), "")

    def _servers(self, job: Job, name: str) -> Iterator[tuple[Member, Hosted]]:
        """ControlNet servers that take new sessions with it."""
        now = self._clock.monotonic()
        for member, net in self._hosts.hosts(name, self._fleet.last_seen(job.bare.model).base):
            if member.kind == kinds.CONTROLNET and not member.load.draining and member.backed_off_until <= now:
                yield member, net

    def _workers(self, job: Job, name: str) -> Iterator[tuple[Member, Hosted]]:
        """Workers of the job's model that have the ControlNet themselves."""
        for member, net in self._hosts.hosts(name, self._fleet.last_seen(job.bare.model).base):
            if member.serves(job.bare.model):
                yield member, net


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedControlNets(Resolution):
    """The ControlNets of a request. names: in full. access: of its caller."""

    names: Sequence[str]
    access: Access
    hosts: ControlNetHosts

    def check_model(self, model: image_pb2.Model) -> None:
        """Raises ControlNetNotFound, ControlNetUnusable or NoControlNet."""
        self.hosts.check(self.names, model, self.access)

    def complete(self, full: GenerationSpec) -> None:
        """Fills in full names, scales and spans."""
        _complete(full, self.names)


def _complete(full: GenerationSpec, names: Sequence[str]) -> None:
    image_to_image = full.HasField("image") and not full.HasField("mask_image")
    values = _OF_IMAGE_TO_IMAGE if image_to_image else _DEFAULTS
    for net, full_name in zip(full.controlnets, names, strict=True):
        net.name = full_name
        for name, value in values.items():
            if not net.HasField(name):  # type: ignore[arg-type]
                setattr(net, name, value)


def _load_s(net: Hosted) -> float:
    return 0.0 if net.state == hosted_pb2.HOSTED_STATE_LOADED else net.size_bytes / _LOADED_BYTES_PER_S


def _hosts(choice: _Choice) -> controlnet_pb2.ControlNetHosts:
    servers = [
        controlnet_pb2.ControlNetServer(name=member.name, address=member.registration.address)
        for member, _ in choice.servers[:_MOST_SERVERS]
    ]
    return controlnet_pb2.ControlNetHosts(digest=choice.digest, servers=servers, similarity=choice.similarity)


def _similarity(hosted: Sequence[Hosted], worker: Member, spec: GenerationSpec) -> float | None:
    """The least that a profile of it says for the worker's model, of those that cover so many steps."""
    model_hash = next((model.model_hash for model in worker.models if model.name == spec.model), "")
    found = [
        profile.similarity
        for net in hosted
        for profile in net.profiles
        if profile.model_hash == model_hash and profile.num_inference_steps <= spec.num_inference_steps
    ]
    return min(found) if model_hash and found else None
