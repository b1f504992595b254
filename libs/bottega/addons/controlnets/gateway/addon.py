"""The gateway's add-on for ControlNets: chooses workers and servers for jobs, and asks servers to load and evict.

The fleet's reports say who hosts which ControlNet, and what its forward passes take. The add-on itself counts the
sessions that it assigns.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from prometheus_client import Gauge

from bottega import kinds
from bottega.adapter_rules import check_controlnets, check_union_images, refused_mode
from bottega.addons.controlnets.gateway.hosts import ControlNetHosts, nobody_hosts
from bottega.addons.controlnets.gateway.ranking import ServerCandidate, best_first, pair_server, seconds_to_load
from bottega.addons.controlnets.gateway.replicas import Replicas
from bottega.addons.controlnets.gateway.server_loads import Lineup, ServerLoads
from bottega.addons.interface.gateway_addon import (
    NO_COSTS,
    PREFETCHED_JOBS,
    AddOn,
    AddOnContext,
    AddOnMetrics,
    FleetView,
    JobCosts,
    PrefetchReason,
    Release,
    Resolution,
    WorkerCosts,
)
from bottega.addons.interface.prefetch import GrpcPrefetchClient, PrefetchClient, ServicePrefetcher
from bottega.addons.interface.views import Access, AddOnJob, Member
from bottega.clocks import Clock
from bottega.errors import BottegaError, NoControlNet, Violation
from bottega.rpc.channel import Target
from bottega.rules import refuse
from bottega.schedules import lists_steps
from bottega.v1 import controlnet_pb2, hosted_pb2, image_pb2, worker_pb2
from bottega.v1.controlnet_pb2 import ControlNetPlacements
from bottega.v1.controlnet_pb2_grpc import ControlNetServiceStub
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.hosted_pb2 import Hosted, HostedState

# Diffusers' defaults. Those of its pipeline for image-to-image with ControlNets differ from the other two.
_DEFAULTS: Mapping[str, float] = MappingProxyType(
    {"controlnet_conditioning_scale": 1.0, "control_guidance_start": 0.0, "control_guidance_end": 1.0}
)
_IMAGE_TO_IMAGE_DEFAULTS: Mapping[str, float] = MappingProxyType({**_DEFAULTS, "controlnet_conditioning_scale": 0.8})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """The servers that may run one ControlNet of a job."""

    name: str
    digest: str
    servers: tuple[tuple[Member, ServerCandidate], ...]
    """Servers, best first; empty if only workers host the ControlNet."""
    pair_server: str
    """Name of the server for the half of guidance that another worker of a pair computes; empty for the first one."""
    similarity: float | None
    """Cosine between residuals of adjacent steps, from the ControlNet's profile; None if unknown."""


Connect = Callable[[Target], PrefetchClient]
"""Makes the client of a server."""


def create(context: AddOnContext) -> ControlNetAddOn:
    """Return the add-on for a gateway."""

    def asking(request: Callable[[Sequence[str]], controlnet_pb2.PrefetchRequest]) -> Connect:
        return lambda target: GrpcPrefetchClient(
            target,
            context.channels,
            lambda channel, names, deadline_s: ControlNetServiceStub(channel).Prefetch(
                request(names), timeout=deadline_s
            ),
        )

    return ControlNetAddOn(
        fleet=context.fleet,
        connect=asking(lambda names: controlnet_pb2.PrefetchRequest(names=names)),
        connect_to_copy=asking(lambda names: controlnet_pb2.PrefetchRequest(names=names, copies=True)),
        connect_to_evict=asking(lambda names: controlnet_pb2.PrefetchRequest(unneeded=names)),
        metrics=context.metrics,
        clock=context.clock,
    )


class ControlNetAddOn(AddOn):
    """The gateway's add-on for ControlNets.

    Args:
        fleet: The connected services.
        connect: Makes the client of a server that prefetches.
        connect_to_copy: Makes the client of a server that loads what other servers have too much to do with.
        connect_to_evict: Makes the client of a server that evicts what it is asked for, unless it is used or pinned.
        metrics: Metrics of the gateway's add-ons.
        clock: The clock.
    """

    adapter_kind = image_pb2.ADAPTER_KIND_CONTROLNET

    def __init__(
        self,
        *,
        fleet: FleetView,
        connect: Connect,
        connect_to_copy: Connect,
        connect_to_evict: Connect,
        metrics: AddOnMetrics,
        clock: Clock,
    ) -> None:
        self._fleet = fleet
        self._clock = clock
        self._hosts = ControlNetHosts(grace_s=fleet.grace_s, clock=clock)
        self._prefetcher = ServicePrefetcher(kinds.CONTROLNET, connect, metrics.prefetches)
        self._copier = ServicePrefetcher(kinds.CONTROLNET, connect_to_copy, metrics.prefetches)
        self._evictor = ServicePrefetcher(kinds.CONTROLNET, connect_to_evict, metrics.prefetches)
        self._loads = ServerLoads(self._hosts)
        self._replicas = Replicas(fleet, self._loads, copier=self._copier, evictor=self._evictor, clock=clock)
        hosted = Gauge(
            "bottega_controlnets",
            "ControlNets that servers host, by state; each counts for each of its servers.",
            ("state",),
            registry=metrics.registry,
        )
        for state, number in HostedState.items()[1:]:
            name = state.removeprefix("HOSTED_STATE_").lower()
            hosted.labels(name).set_function(functools.partial(self._hosts.count, number))

    def check(self, spec: GenerationSpec) -> Iterator[Violation]:
        """Yield the violations in a request's ControlNets, except in their images."""
        return check_controlnets(spec)

    async def resolve(self, spec: GenerationSpec, access: Access) -> Resolution | None:
        """Return the ControlNets by full names. `check_model` checks whether services host them for the model."""
        if not spec.controlnets:
            return None
        names = tuple(self._full_name(net.name, access) for net in spec.controlnets)
        modes = tuple(net.control_mode or None for net in spec.controlnets)
        return ResolvedControlNets(names=names, modes=modes, access=access, hosts=self._hosts)

    async def adapters(self, access: Access, models: Sequence[image_pb2.Model]) -> Sequence[image_pb2.Adapter]:
        """Return all versions of the ControlNets that the caller may name.

        A tenant's own ControlNet hides a shared one of the same name.
        """
        named = [name for name in self._hosts.names() if access.has_controlnet(name)]
        hidden = {access.short_name(name) for name in named if access.short_name(name) != name}
        return [
            image_pb2.Adapter(
                kind=self.adapter_kind,
                name=access.short_name(name),
                digest=digest,
                models=fitting,
                control_modes=self._hosts.modes_of(name, digest),
            )
            for name in named
            if name not in hidden
            for digest, fitting in self._hosts.versions(name, models).items()
        ]

    def versions(self, spec: GenerationSpec, model: image_pb2.Model) -> Sequence[str] | None:
        """Return the digests of the ControlNets; None if services host different versions of one."""
        found = [self._hosts.version(net.name, model) for net in spec.controlnets]
        return found if all(found) else None

    def costs(self, job: AddOnJob) -> JobCosts | None:
        """Return the costs of a job with ControlNets, which are equal for equal names."""
        at = functools.partial(self.worker_costs, job)
        return JobCosts(key=job.controlnets, at=at) if job.controlnets else None

    def worker_costs(self, job: AddOnJob, workers: Mapping[str, Member]) -> WorkerCosts:
        """Return which workers can run the ControlNets that no server hosts, and the seconds to load them."""
        costs = NO_COSTS
        for name in dict.fromkeys(job.controlnets):
            if any(True for _ in self._servers(job, name)):
                continue
            seconds = {worker.name: seconds_to_load(net) for worker, net in self._workers(job, name)}
            eligible = frozenset(seconds) if costs.eligible is None else costs.eligible.intersection(seconds)
            load_s = {worker: costs.load_s.get(worker, 0.0) + seconds[worker] for worker in eligible}
            costs = WorkerCosts(load_s=load_s, eligible=eligible)
        return costs

    def unavailable(self, job: AddOnJob) -> NoControlNet | None:
        """Return an error if one of a job's ControlNets has had no host for longer than the grace period; else None."""
        model = job.bare.model
        base = self._fleet.last_seen(model).base
        gone = [name for name in job.controlnets if not self._hosts.expected(name, model, base)]
        return nobody_hosts(dict.fromkeys(gone)) if gone else None

    def prefetch(self, jobs: Sequence[AddOnJob], reason: PrefetchReason) -> None:
        """Ask servers to load ControlNets of the next jobs that are only on the servers' disks."""
        if reason is not PrefetchReason.NEXT:
            return
        for job in itertools.islice(jobs, PREFETCHED_JOBS):
            for choice in self._choices(job, None) if job.controlnets else ():
                for server, candidate in choice.servers[:1]:
                    if candidate.state == hosted_pb2.HOSTED_STATE_ON_DISK:
                        self._prefetcher.request(server, [choice.name])

    def prepare_attempt(self, job: AddOnJob, worker: Member, request: worker_pb2.RunAttemptRequest) -> Release | None:
        """Write the servers of each ControlNet into the attempt, and count the new sessions until it ends."""
        if not job.controlnets:
            return None
        choices = list(self._choices(job, worker))
        assigned = tuple((choice.servers[0][0].name, choice.name) for choice in choices if choice.servers)
        servers = tuple(server for server, _ in assigned)
        self._loads.assign(assigned)
        shape = job.request.shape
        self._replicas.attempt_begins(shape, worker.times.seconds(shape, job.rows))
        job.use_controlnets({choice.name: choice.digest for choice in choices if choice.digest}, servers=servers)
        placements = ControlNetPlacements(hosts=[_hosts(choice) for choice in choices])
        request.addons[kinds.CONTROLNET] = placements.SerializeToString()
        return functools.partial(self._loads.release, assigned)

    def back_off(self, job: AddOnJob, error: BottegaError) -> bool:
        """Back off the servers that an attempt could not reach, or its worker if it had no servers."""
        if not isinstance(error, NoControlNet):
            return False
        named = [name for name in error.metadata.get("servers", "").split(",") if name]
        for server in named or job.servers:
            self._fleet.back_off(server, kind=kinds.CONTROLNET)
        if not named and not job.servers:
            self._fleet.back_off(job.worker)
        return True

    def start(self) -> None:
        """Look for copies that an earlier scheduler has made."""
        self._replicas.start()

    def member_changed(self, member: Member, *, lost: bool = False) -> None:
        """Update the ControlNets that a server or a worker hosts. A lost one hosts none."""
        if lost:
            self._hosts.remove(member)
            self._prefetcher.remove(member)
            self._copier.remove(member)
            self._evictor.remove(member)
            self._replicas.forget(member.name)
            self._loads.forget(member)
        else:
            self._hosts.update(member)
            if member.kind == kinds.CONTROLNET:
                self._loads.note_report(member)
            self._replicas.member_changed(member)

    async def close(self) -> None:
        self._replicas.close()
        await self._prefetcher.close()
        await self._copier.close()
        await self._evictor.close()

    def _full_name(self, name: str, access: Access) -> str:
        """Return the full name of the tenant's own ControlNet if there is one, else the name itself."""
        own = access.own(name)
        return own if own and self._hosts.is_there(own) else name

    def _choices(self, job: AddOnJob, worker: Member | None) -> Iterator[_Choice]:
        """Yield the choice for each ControlNet of a job, with the earlier ones counted as load of their servers."""
        ahead_s: dict[str, float] = {}  # seconds in each step, by server
        versions, shape = dict(job.versions), job.request.shape
        steps = max(1, job.steps.total // job.num_images)
        turn_s = worker.times.seconds(shape, job.rows) if worker is not None else None
        now, base = self._clock.monotonic(), self._fleet.last_seen(job.bare.model).base
        for name in job.controlnets:
            lineup = self._loads.lineup(name, base, shape=shape, rows=job.rows)
            groups, accepts = lineup.groups(ahead_s), functools.partial(self._accepts, lineup, now)
            ranked = best_first(
                groups,
                name=name,
                job_id=job.job_id,
                digest=versions.get(name, ""),
                steps=steps,
                turn_s=turn_s,
                accepts=accepts,
            )
            if ranked:
                ahead_s[ranked[0].server] = ahead_s.get(ranked[0].server, 0.0) + ranked[0].own_s
            versions[name] = ranked[0].digest if ranked else self._digest_at(worker, job, name)
            chosen = tuple((lineup.members[candidate.server], candidate) for candidate in ranked)
            hosted = [group for group in groups if next(iter(group)).digest == versions[name]]
            found = [candidate for group in hosted if (candidate := next(filter(accepts, group), None)) is not None]
            similarity = _similarity(found, worker, job.bare) if worker is not None else None
            second = ""
            if len(ranked) > 1 and job.rows > job.num_images:
                choose = functools.partial(pair_server, name=name, job_id=job.job_id, steps=steps, turn_s=turn_s)
                second = choose(ranked[0], groups, accepts=accepts)
            yield _Choice(
                name=name,
                digest=versions[name],
                servers=chosen,
                pair_server=second,
                similarity=similarity,
            )

    def _digest_at(self, worker: Member | None, job: AddOnJob, name: str) -> str:
        return next((net.digest for member, net in self._workers(job, name) if member is worker), "")

    def _servers(self, job: AddOnJob, name: str) -> Iterator[tuple[Member, Hosted]]:
        """Yield the ControlNet servers that host a ControlNet and accept new sessions."""
        now = self._clock.monotonic()
        for member, net in self._hosts.hosts(name, self._fleet.last_seen(job.bare.model).base):
            if member.kind == kinds.CONTROLNET and not member.draining and member.backed_off_until <= now:
                yield member, net

    def _accepts(self, lineup: Lineup, now: float, candidate: ServerCandidate) -> bool:
        """Return whether a server accepts new sessions."""
        member = lineup.members[candidate.server]
        return not member.draining and member.backed_off_until <= now

    def _workers(self, job: AddOnJob, name: str) -> Iterator[tuple[Member, Hosted]]:
        """Yield the workers of the job's model that can run the ControlNet themselves."""
        for member, net in self._hosts.hosts(name, self._fleet.last_seen(job.bare.model).base):
            if member.serves(job.bare.model):
                yield member, net


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedControlNets(Resolution):
    """The ControlNets of a request."""

    names: Sequence[str]
    """Full names, in the request's order."""
    modes: Sequence[str | None]
    """Control modes, by name or number, in the request's order; None where the request gives none."""
    access: Access
    """What the caller may name."""
    hosts: ControlNetHosts

    def check_model(self, model: image_pb2.Model) -> None:
        """Raise if the model cannot use the ControlNets.

        Raises:
            ControlNetNotFound, ControlNetUnusable, NoControlNet: See ControlNetHosts.check.
            InvalidRequest: A union has no such mode, or a mode is missing or not needed.
        """
        self.hosts.check(self.names, model, self.access)
        given = [(name, mode is not None) for name, mode in zip(self.names, self.modes, strict=True)]
        violations = [*check_union_images(given, model.base)]
        for index, (name, mode) in enumerate(zip(self.names, self.modes, strict=True)):
            modes = self.hosts.modes(name, model)
            if modes is not None and (why := refused_mode(self.access.short_name(name), mode, modes, model.base)):
                violations.append(Violation(field=f"spec.controlnets[{index}].control_mode", description=why))
        refuse(violations)

    def complete(self, full: GenerationSpec, steps: int) -> None:
        """Fill in full names, scales, and the first and last steps."""
        image_to_image = full.HasField("image") and not full.HasField("mask_image")
        values = _IMAGE_TO_IMAGE_DEFAULTS if image_to_image else _DEFAULTS
        for net, full_name in zip(full.controlnets, self.names, strict=True):
            net.name = full_name
            for name, value in values.items():
                if not net.HasField(name):  # type: ignore[arg-type]
                    setattr(net, name, value)


def _hosts(choice: _Choice) -> controlnet_pb2.ControlNetHosts:
    servers = [
        controlnet_pb2.ControlNetServer(name=member.name, address=member.registration.address)
        for member, _ in choice.servers
    ]
    listed = any(server.name == choice.pair_server for server in servers)
    return controlnet_pb2.ControlNetHosts(
        digest=choice.digest,
        servers=servers,
        similarity=choice.similarity,
        pair_server=choice.pair_server if listed else "",
    )


def _similarity(hosted: Sequence[ServerCandidate], worker: Member, spec: GenerationSpec) -> float | None:
    """Return the lowest similarity among profiles for the worker's model with at most the spec's number of steps.

    Residuals of adjacent steps may differ more if the request lists its own steps: it has no profile.
    """
    if lists_steps(spec):
        return None
    model_hash = next((model.model_hash for model in worker.models if model.name == spec.model), "")
    found = [
        similarity
        for candidate in hosted
        for profiled_hash, steps, similarity in candidate.profiles
        if profiled_hash == model_hash and steps <= spec.num_inference_steps
    ]
    return min(found) if model_hash and found else None
