"""The gateway's add-on for recorded activations: messages to attempts and stores, costs and savings of templates.

A template is an edited image whose activations are recorded. The activations themselves go directly between workers and
stores. The gateway identifies a template by a hash of what it was made from (`JobRequest.edit_source`), because it does
not decode the image.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import Counter

from bottega import kinds
from bottega.addons.edits.front import pin_edit
from bottega.addons.interface.gateway_addon import (
    NO_COSTS,
    NO_SAVINGS,
    AddOn,
    AddOnContext,
    AddOnMetrics,
    ExpectedSavings,
    FleetView,
    JobCosts,
    PrefetchReason,
    Release,
    SecondsByWorker,
    WorkerCosts,
)
from bottega.addons.interface.gateway_addon import (
    Resolution as Resolution,
)
from bottega.addons.interface.prefetch import GrpcPrefetchClient, PrefetchClient, ServicePrefetcher
from bottega.addons.interface.store_link import MAX_SERVICES
from bottega.addons.interface.views import Access, AddOnJob, Member
from bottega.clocks import Clock
from bottega.errors import RecordingNotKept, Violation
from bottega.planning import Shape, rounded_share
from bottega.rpc.channel import PLAINTEXT, Channels, Target
from bottega.v1 import worker_pb2
from bottega.v1.activations_pb2 import (
    TEMPLATE_TIER_DISK,
    TEMPLATE_TIER_MEMORY,
    ActivationsOrder,
    PrefetchTemplatesRequest,
    PrefetchTemplatesResponse,
)
from bottega.v1.activations_pb2_grpc import ActivationServiceStub
from bottega.v1.generation_pb2 import FIDELITY_EXACT, GenerationSpec, Provenance

if TYPE_CHECKING:
    from bottega.v1.activations_pb2_grpc import ActivationServiceAsyncStub

# After 30 s a store may have evicted or dropped what it reported.
_STALE_S = 30.0
# Limit on the sources of one call in activations.proto.
_MAX_SOURCES = 64
# Templates of stores that are remembered. InstGenIE's largest user had a thousand templates for 34 million edits.
_MAX_TEMPLATES = 16_384
# Speed of a disk that a store has not measured yet.
_DISK_BYTES_PER_S = 1e9
_STORED = frozenset({TEMPLATE_TIER_MEMORY, TEMPLATE_TIER_DISK})
# Kinds of edits that are remembered: there are 32 for each number of rows and size of pictures.
_MAX_KINDS = 256

_Kind = tuple[int, Shape, float]
"""Batch rows of a job, the shape of their latents, and the share of tokens that is computed."""
_TurnCost = tuple[float, float]
"""Seconds that loading adds to one forward pass, and seconds that the pass saves compared to computing all tokens."""


def create(context: AddOnContext) -> ActivationsAddOn:
    """Return the add-on for a gateway."""
    return ActivationsAddOn(context.fleet, context.metrics, context.clock, context.channels)


class ActivationsAddOn(AddOn):
    """The gateway's add-on for recorded activations."""

    def __init__(self, fleet: FleetView, metrics: AddOnMetrics, clock: Clock, channels: Channels = PLAINTEXT) -> None:
        self._fleet = fleet
        self._edits = Counter(
            "bottega_edit_attempts",
            "Attempts at edits that may use recorded activations, by where these were: in the assigned worker,"
            " in the memory or on the disk of a store, or nowhere.",
            ("template",),
            registry=metrics.registry,
        )
        self._clock = clock
        self._residences = Residences()
        self._costs = LoadingCosts()
        # Workers that report that they compute all tokens of every edit.
        self._unmasked: set[str] = set()
        self._prefetcher = ServicePrefetcher(
            kinds.ACTIVATIONS, functools.partial(self._connect, channels=channels), metrics.prefetches
        )

    def check(self, spec: GenerationSpec) -> Iterator[Violation]:
        """Yield a violation if an edit must be exact, but allows to compute only the masked part."""
        if spec.fidelity == FIDELITY_EXACT and spec.techniques.masked_blocks:
            rule = "must not be true with fidelity EXACT, which computes all"
            yield Violation(field="spec.techniques.masked_blocks", description=rule)

    async def resolve(self, spec: GenerationSpec, access: Access) -> None:
        """Raise RecordingNotKept if the request names a recording that an earlier edit used.

        Every edit of an image changes its recording, and earlier states are not kept.
        """
        if not spec.techniques.HasField("recording"):
            return
        recording = spec.techniques.recording
        text = (
            f"this edit reused recording {recording}, which has changed since, so the picture cannot be redrawn; remove"
            " techniques.recording to draw a new edit"
        )
        raise RecordingNotKept(text, metadata={"recording": recording})

    def job_completed(self, job: AddOnJob, provenance: Provenance) -> None:
        """Write into the provenance which recording an edit reused, or that it reused none."""
        pin_edit(provenance.parameters, provenance.mask.recording)

    def costs(self, job: AddOnJob) -> JobCosts | None:
        """Return the costs of an edit, which depend on its template, its share of computed tokens, and its size."""
        request = job.request
        if not request.edit_source:
            return None
        evaluations = job.steps.total * request.evaluations_per_step
        key = request.edit_source, request.computed_share, request.shape, job.rows, evaluations
        return JobCosts(key=key, at=functools.partial(self.worker_costs, job))

    def worker_costs(self, job: AddOnJob, workers: Mapping[str, Member]) -> WorkerCosts:
        """Return the share of tokens that an edit computes at each worker, and the seconds that loading adds.

        An edit computes all tokens if no service has its template, or at workers that cannot compute only masked ones.
        """
        template, share = job.request.edit_source, job.request.computed_share
        if not template or share >= 1.0:
            return NO_COSTS
        having = self._residences.workers_with(template)
        now = self._clock.monotonic()
        stored = self._residences.stored(template, now)
        if stored is None:
            return WorkerCosts(shares={name: share for name in workers if name in having})
        # Workers that compute all tokens load nothing either.
        free = having | self._unmasked if self._unmasked else having
        seconds = self._costs.seconds_at(job, workers, disk_s=stored.disk_s(now), having=free)
        shares = dict.fromkeys(self._unmasked.intersection(workers), 1.0)
        return WorkerCosts(load_s=SecondsByWorker(workers, seconds), shares=shares, share=share)

    def expected_savings(self, job: AddOnJob) -> ExpectedSavings:
        """Return the share of tokens that an edit computes if any service has its template, according to its mask."""
        template = job.request.edit_source
        if not template or self._residence(template) == "nowhere":
            return NO_SAVINGS
        return ExpectedSavings(computed_share=job.request.computed_share)

    def prefetch(self, jobs: Sequence[AddOnJob], reason: PrefetchReason) -> None:
        """Ask the stores to load the jobs' templates, which may have been evicted while the jobs waited.

        For a job that has just arrived, ask only if no store has answered lately. If a store has the template, it is
        loaded only when the job is near the front of the queue, because loading it sooner would evict the templates of
        earlier jobs. Also ask for the template of a refused job, because until a store has answered, similar edits are
        expected to compute all tokens.
        """
        templates = [job.request.edit_source for job in jobs if job.request.edit_source]
        if reason is PrefetchReason.ARRIVED:
            templates = [template for template in templates if not self._is_known(template)]
        for store in self._fleet.services(kinds.ACTIVATIONS) if templates else ():
            self._prefetcher.request(store, templates)

    def prepare_attempt(self, job: AddOnJob, worker: Member, request: worker_pb2.RunAttemptRequest) -> Release | None:
        """Write the message about activations into an attempt, and ask the stores to load an edit's template.

        The stores count the template as used.
        """
        template = job.request.edit_source
        if not template and not job.bare.keep_for_editing:
            return None
        order = ActivationsOrder(tenant=job.request.tenant, source=template)
        request.addons[kinds.ACTIVATIONS] = order.SerializeToString()
        if template:
            self.prefetch([job], PrefetchReason.NEXT)
            self._edits.labels(self._residence(template, worker.name)).inc()
        return None

    def member_changed(self, member: Member, *, lost: bool = False) -> None:
        """Record which templates a worker has in memory, and its step times. Drop those of a lost worker or store."""
        if lost:
            self._forget(member)
        elif member.is_worker:
            self._costs.forget(member.name)
            self._residences.note_worker(member)
            if member.load.mask_tokens.token_elements:
                self._unmasked.discard(member.name)
            else:
                self._unmasked.add(member.name)

    def _forget(self, member: Member) -> None:
        if member.is_worker:
            self._residences.forget_worker(member.name)
            self._costs.forget(member.name)
            self._unmasked.discard(member.name)
        elif member.kind == kinds.ACTIVATIONS:
            self._residences.forget_store(member.registration.address)
            self._prefetcher.remove(member)

    async def close(self) -> None:
        await self._prefetcher.close()

    def _is_known(self, template: str) -> bool:
        """Return whether a store has answered lately that it has the template."""
        now = self._clock.monotonic()
        stored = self._residences.stored(template, now)
        return stored is not None and now - stored.asked_at <= _STALE_S

    def _residence(self, template: str, worker: str = "") -> str:
        """Return the nearest place of a template, as the metric names it: for one worker, or for any if it is empty."""
        having = self._residences.workers_with(template)
        if having and (not worker or worker in having):
            return "worker"
        now = self._clock.monotonic()
        stored = self._residences.stored(template, now)
        if stored is None:
            return "nowhere"
        return "disk" if stored.disk_s(now) else "memory"

    def _connect(self, target: Target, channels: Channels) -> PrefetchClient:
        return GrpcPrefetchClient(
            target,
            channels,
            lambda channel, sources, deadline_s: self._prefetch(
                target.address, ActivationServiceStub(channel), sources, deadline_s
            ),
        )

    async def _prefetch(
        self, address: str, store: ActivationServiceAsyncStub, sources: Sequence[str], deadline_s: float
    ) -> None:
        """Let a store load the templates of these sources into memory, in this order, and note where they are."""
        stores = [member.name for member in self._fleet.services(kinds.ACTIVATIONS)[:MAX_SERVICES]]
        for first in range(0, len(sources), _MAX_SOURCES):
            part = sources[first : first + _MAX_SOURCES]
            request = PrefetchTemplatesRequest(sources=part, stores=stores)
            self._note_response(address, await store.PrefetchTemplates(request, timeout=deadline_s))

    def _note_response(self, store: str, response: PrefetchTemplatesResponse) -> None:
        self._residences.note_response(store, response, self._clock.monotonic())


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTemplate:
    """A template in a store, according to the store's last response."""

    disk_bytes: int
    """Bytes of the template that were on disk but not in memory."""
    disk_bytes_per_s: float
    asked_at: float
    """Time of the request to the store, on the monotonic clock."""

    def disk_s(self, now: float) -> float:
        """Return the seconds until all of it is in the store's memory. Loading began when the store was asked."""
        return max(0.0, self.disk_bytes / self.disk_bytes_per_s - (now - self.asked_at))


class Residences:
    """The places of templates: memory of workers, as they report, and stores, as they last responded."""

    def __init__(self) -> None:
        self._stored: OrderedDict[str, dict[str, StoredTemplate]] = OrderedDict()
        self._templates: dict[str, frozenset[str]] = {}  # by worker
        self._workers: dict[str, set[str]] = {}  # by template

    def workers_with(self, template: str) -> Set[str]:
        """Return the names of the workers that have a template in memory. The caller must not change the set."""
        return self._workers.get(template, frozenset())

    def stored(self, template: str, now: float) -> StoredTemplate | None:
        """Return the template at the store that will have it in memory first; None if no store has it."""
        found = self._stored.get(template)
        return min(found.values(), key=lambda stored: stored.disk_s(now)) if found else None

    def note_response(self, store: str, response: PrefetchTemplatesResponse, now: float) -> None:
        """Record the response of the store at an address, which loads the templates that it has."""
        speed = response.disk_bytes_per_s if response.disk_bytes_per_s > 0 else _DISK_BYTES_PER_S
        for template in response.templates:
            self._forget(store, template.source)
            if template.tier in _STORED:
                stored = StoredTemplate(disk_bytes=max(0, template.disk_bytes), disk_bytes_per_s=speed, asked_at=now)
                self._stored.setdefault(template.source, {})[store] = stored
                self._stored.move_to_end(template.source)
        while len(self._stored) > _MAX_TEMPLATES:
            self._stored.popitem(last=False)

    def note_worker(self, member: Member) -> None:
        """Record the templates in a worker's report."""
        self._set_worker(member.name, member.hosts(kinds.ACTIVATIONS).digests)

    def forget_worker(self, name: str) -> None:
        """Drop the templates of a lost worker."""
        self._set_worker(name, frozenset())
        self._templates.pop(name, None)

    def forget_store(self, store: str) -> None:
        """Drop the templates of the lost store at an address."""
        for template in list(self._stored):
            self._forget(store, template)

    def _set_worker(self, name: str, templates: frozenset[str]) -> None:
        before = self._templates.get(name, frozenset())
        self._templates[name] = templates
        for template in before - templates:
            self._workers[template].discard(name)
            if not self._workers[template]:
                del self._workers[template]
        for template in templates - before:
            self._workers.setdefault(template, set()).add(name)

    def _forget(self, store: str, template: str) -> None:
        known = self._stored.get(template)
        if known is not None and known.pop(store, None) is not None and not known:
            del self._stored[template]


class LoadingCosts:
    """Estimates the seconds that loading a template adds to an edit at each worker.

    A worker loads while it computes, and computes what would arrive too late, so loading never costs more than it
    saves. Costs are cached for each kind of edit until a worker's next report, because the scheduler asks about many
    jobs each time it looks at the queue.
    """

    def __init__(self) -> None:
        self._kinds: dict[_Kind, dict[str, _TurnCost]] = {}

    def seconds_at(
        self, job: AddOnJob, workers: Mapping[str, Member], *, disk_s: float, having: Set[str] = frozenset()
    ) -> Callable[[str], float]:
        """Return a function that returns, for a worker's name, the seconds that loading adds to the job there.

        Args:
            job: The edit.
            workers: Workers by name.
            disk_s: Seconds until the template is in the store's memory.
            having: Names of workers that have the template in memory, and need not load it.
        """
        kind = (job.rows, job.request.shape, rounded_share(job.request.computed_share))
        costs, turns = self._costs_of(kind), job.steps.total * job.request.evaluations_per_step / job.num_images

        def seconds(name: str) -> float:
            if name in having:
                return 0.0
            known = costs.get(name)
            if known is None:
                known = costs[name] = _turn_cost(workers[name], *kind)
            longer_s, saved_s = known
            return min(turns * longer_s + disk_s, turns * saved_s)

        return seconds

    def forget(self, name: str) -> None:
        """Drop the cached costs of a worker that has reported, or is lost."""
        for costs in self._kinds.values():
            costs.pop(name, None)

    def _costs_of(self, kind: _Kind) -> dict[str, _TurnCost]:
        """Return the cached costs of a kind of edit, by worker."""
        costs = self._kinds.get(kind)
        if costs is None:
            if len(self._kinds) >= _MAX_KINDS:
                self._kinds.clear()
            costs = self._kinds[kind] = {}
        return costs


def _turn_cost(member: Member, rows: int, shape: Shape, share: float) -> _TurnCost:
    masked_rows = rows * member.fractions.fraction(shape, share)
    full_s, masked_s = member.times.seconds(shape, rows), member.times.seconds(shape, masked_rows)
    if full_s is None or masked_s is None:
        return 0.0, 0.0
    loading_s = member.planned.seconds(shape, masked_rows) or 0.0
    return max(0.0, loading_s - masked_s), max(0.0, full_s - masked_s)
