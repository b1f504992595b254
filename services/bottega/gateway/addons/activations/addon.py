"""Recorded activations as an add-on: what attempts and stores are told of templates, and what templates cost or save.

The activations themselves go between workers and stores, over links. The gateway knows a template by what it was made
of (JobRequest.template) before any worker has decoded the image.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from bottega import kinds
from bottega.clocks import Clock
from bottega.errors import RecordingNotKept
from bottega.gateway.addons.activations.client import GrpcActivationsClient
from bottega.gateway.addons.activations.costs import LoadingCosts
from bottega.gateway.addons.activations.residences import Residences
from bottega.gateway.addons.addon import NO_COSTS, AddOn, AddOnContext, Resolution, SecondsByWorker, WorkerCosts
from bottega.gateway.addons.prefetch import ServicePrefetcher
from bottega.gateway.fleet.members import Member
from bottega.gateway.fleet.registry import Fleet
from bottega.gateway.jobs.job import Job
from bottega.gateway.metrics import GatewayMetrics
from bottega.gateway.tenants.access import Access
from bottega.masked_blocks import pin_edit
from bottega.rpc.channel import PLAINTEXT, Channels
from bottega.v1 import worker_pb2
from bottega.v1.activations_pb2 import ActivationsOrder, PrefetchTemplatesResponse
from bottega.v1.generation_pb2 import GenerationSpec, Provenance

# After which a store may have driven out of its memory, or dropped, what it said that it has.
_STALE_S = 30.0


def create(context: AddOnContext) -> ActivationsAddOn:
    """The add-on that the manifest names."""
    return ActivationsAddOn(context.fleet, context.metrics, context.clock, context.channels)


class ActivationsAddOn(AddOn):
    """What a gateway does about the templates of edits."""

    def __init__(self, fleet: Fleet, metrics: GatewayMetrics, clock: Clock, channels: Channels = PLAINTEXT) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._clock = clock
        self._residences = Residences()
        self._costs = LoadingCosts()
        # Workers that compute all of every edit, as they report.
        self._unmasked: set[str] = set()
        self._prefetcher = ServicePrefetcher(
            kinds.ACTIVATIONS, lambda target: GrpcActivationsClient(target, channels, self._note_answer), metrics
        )

    def is_named(self, spec: GenerationSpec) -> bool:
        """Return whether a request asks for what an edit took from a recording."""
        return spec.techniques.HasField("recording")

    async def resolve(self, spec: GenerationSpec, access: Access) -> Resolution:
        """Raise RecordingNotKept: a recording changes with every edit of its image, and no earlier state is kept."""
        recording = spec.techniques.recording
        text = (
            f"this edit reused recording {recording}, which has changed since, so the picture cannot be redrawn; remove"
            " techniques.recording to draw a new edit"
        )
        raise RecordingNotKept(text, metadata={"recording": recording})

    def pin_parameters(self, provenance: Provenance) -> None:
        """Write what an edit took from others, or that it took nothing."""
        pin_edit(provenance.parameters, provenance.mask.recording)

    def cost_key(self, job: Job) -> Hashable:
        """Its template, and what of it is computed."""
        request = job.request
        if not request.template:
            return None
        return request.template, request.computed_share, request.shape, job.rows, job.steps.total

    def worker_costs(self, job: Job, workers: Mapping[str, Member]) -> WorkerCosts:
        """Where the template is, the job computes a part of its tokens; where it has to be loaded, that takes longer.

        Where it is nowhere, an edit computes all, and so it does at a worker that masks nothing.
        """
        template, share = job.request.template, job.request.computed_share
        if not template or share >= 1.0:
            return NO_COSTS
        having = self._residences.workers_with(template)
        now = self._clock.monotonic()
        stored = self._residences.stored(template, now)
        if stored is None:
            return WorkerCosts(shares={name: share for name in workers if name in having})
        # Nothing is loaded either by those that compute all.
        free = having | self._unmasked if self._unmasked else having
        seconds = self._costs.of(job, workers, disk_s=stored.disk_s(now), having=free)
        shares = dict.fromkeys(self._unmasked.intersection(workers), 1.0)
        return WorkerCosts(load_s=SecondsByWorker(workers, seconds), shares=shares, share=share)

    def expected_share(self, job: Job) -> float:
        """What its mask leaves to compute, where somebody has its template."""
        template = job.request.template
        if not template or self._residence(template) == "nowhere":
            return 1.0
        return job.request.computed_share

    def job_refused(self, job: Job) -> None:
        """Asks the stores for its template: until somebody asks, it counts as an edit that computes all."""
        self.prefetch([job])

    def job_queued(self, job: Job) -> None:
        """Asks the stores for its template where nobody knows whether they have it, or nobody has asked of late.

        Else it is loaded when the job is one of the first of its queue, or runs: sooner it would drive theirs out.
        """
        now = self._clock.monotonic()
        stored = self._residences.stored(job.request.template, now)
        if stored is None or now - stored.asked_at > _STALE_S:
            self.prefetch([job])

    def prefetch(self, jobs: Sequence[Job]) -> None:
        """The same for these, once more: what has waited for long may have been driven out again."""
        templates = [job.request.template for job in jobs if job.request.template]
        for store in self._fleet.services(kinds.ACTIVATIONS) if templates else ():
            self._prefetcher.request(store, templates)

    def prepare_attempt(self, job: Job, worker: Member, request: worker_pb2.RunAttemptRequest) -> None:
        """Says whose it is, of an edit and of a picture that is recorded for edits to come; and how an edit's template
        is asked for: stores load it, and count it as used.
        """
        template = job.request.template
        if not template and not job.bare.keep_for_editing:
            return
        order = ActivationsOrder(tenant=job.request.tenant, source=template)
        request.addons[kinds.ACTIVATIONS] = order.SerializeToString()
        if template:
            self.prefetch([job])
            self._metrics.edits.labels(self._residence(template, worker.name)).inc()

    def member_changed(self, member: Member) -> None:
        """A worker says what it has in its memory, and what turns take."""
        if member.is_worker:
            self._costs.forget(member.name)
            self._residences.note_worker(member)
            if member.load.mask_tokens.token_elements:
                self._unmasked.discard(member.name)
            else:
                self._unmasked.add(member.name)

    def member_lost(self, member: Member) -> None:
        """What it had is gone."""
        if member.is_worker:
            self._residences.forget_worker(member.name)
            self._costs.forget(member.name)
            self._unmasked.discard(member.name)
        elif member.kind == kinds.ACTIVATIONS:
            self._residences.forget_store(member.registration.address)
            self._prefetcher.remove(member)

    async def close(self) -> None:
        """Ends every call to a store."""
        await self._prefetcher.close()

    def _residence(self, template: str, worker: str = "") -> str:
        """Where the nearest of it is, as the metric says it. worker: empty is any."""
        having = self._residences.workers_with(template)
        if having and (not worker or worker in having):
            return "worker"
        now = self._clock.monotonic()
        stored = self._residences.stored(template, now)
        if stored is None:
            return "nowhere"
        return "disk" if stored.disk_s(now) else "memory"

    def _note_answer(self, store: str, answer: PrefetchTemplatesResponse) -> None:
        self._residences.note_answer(store, answer, self._clock.monotonic())
