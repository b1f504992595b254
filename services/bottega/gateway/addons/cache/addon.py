"""The approximate cache as an add-on: what an attempt may ask its stores, what is pinned, what it is expected to save.

The stores themselves are asked by workers, over links: which entry is similar enough is known when a prompt is encoded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from google.protobuf.message import DecodeError

from bottega import kinds
from bottega.errors import BottegaError, NoCache, Violation
from bottega.gateway.addons.addon import AddOn, AddOnContext, Resolution
from bottega.gateway.addons.cache.hit_rates import HitRates, RateKey, rate_key
from bottega.gateway.addons.cache.requests import asks_for_cache, check_cache, check_cached_step, may_record
from bottega.gateway.fleet.members import Member
from bottega.gateway.fleet.registry import Fleet
from bottega.gateway.jobs.job import Job
from bottega.gateway.metrics import GatewayMetrics
from bottega.gateway.tenants.access import Access
from bottega.latents import is_cacheable, may_start, parse_start, pin_start
from bottega.v1 import generation_pb2, worker_pb2
from bottega.v1.cache_pb2 import CacheDecision, CacheOrder, CacheStart
from bottega.v1.generation_pb2 import CacheUse, GenerationSpec, Provenance
from bottega.v1.worker_pb2 import AttemptDecisions

# Jobs whose key is remembered; of others it is made again.
_MOST_JOBS = 4096
# A store comes back, or another one joins, within some seconds.
_RETRY_AFTER_S = 3.0


def create(context: AddOnContext) -> CacheAddOn:
    """The add-on that the manifest names."""
    return CacheAddOn(context.fleet, context.metrics)


class CacheAddOn(AddOn):
    """What a gateway does about cached latents."""

    def __init__(self, fleet: Fleet, metrics: GatewayMetrics) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._rates = HitRates()
        self._keys: OrderedDict[str, RateKey] = OrderedDict()  # by job

    def is_named(self, spec: GenerationSpec) -> bool:
        """Whether a request asks for cached latents by name, and not by its fidelity alone."""
        return asks_for_cache(spec)

    def check(self, spec: GenerationSpec) -> Iterator[Violation]:
        """What contradicts a pin, or the switch."""
        return check_cache(spec)

    def check_steps(self, spec: GenerationSpec, *, steps: int, strength: float | None) -> Iterator[Violation]:
        """Whether there is a latent after the step of a pin."""
        return check_cached_step(spec, steps)

    async def resolve(self, spec: GenerationSpec, access: Access) -> Resolution:
        """Whether the entry of a pin is still there its worker finds out. Raises NoCache where nobody could have it."""
        if spec.techniques.cache_entry and not self._fleet.services(kinds.CACHE):
            text = f"no approximate cache is here that could have {spec.techniques.cache_entry}"
            raise NoCache(text, retry_after_s=_RETRY_AFTER_S)
        return ResolvedCache()

    def decide_again(self, decisions: AttemptDecisions, before: Job) -> None:
        """Each picture starts from the same cached latent again; one that started from noise does so again.

        A pin of the request itself needs no decision.
        """
        if before.provenance is None or before.bare.techniques.cache_entry or not may_start(before.bare):
            return
        starts = {start.image: _decided(start) for start in before.provenance.cached_starts}
        decision = CacheDecision(starts=[starts.get(image, CacheStart()) for image in range(before.num_images)])
        decisions.by_kind[kinds.CACHE] = decision.SerializeToString()

    def expected_skipped_steps(self, job: Job) -> float:
        """By its decision or its pin, else by what requests like it have skipped of late."""
        if job.bare.techniques.cache_entry:
            return parse_start(job.bare.techniques.cache_entry)[1] - 1  # one step may be made twice, with fresh noise
        decided = _decision_of(job)
        if decided is not None:
            return sum(start.step - 1 for start in decided.starts if start.entry)
        if not may_start(job.bare) or _has_drawn(job):
            return 0.0
        return job.num_images * self._rates.skipped_steps(self._key(job))

    def prepare_attempt(self, job: Job, worker: Member, request: worker_pb2.RunAttemptRequest) -> None:
        """Says whether its pictures may start from cached latents, and may be recorded."""
        spec = job.bare
        order = CacheOrder(
            read=may_start(spec) and _may_start_from_latents(job),
            record=may_record(spec),
            tenant=job.request.tenant,
            fidelity=spec.fidelity,
            pin=spec.techniques.cache_entry,
            job=job.job_id,
        )
        if order.read or order.record:
            request.addons[kinds.CACHE] = order.SerializeToString()

    def pin_parameters(self, provenance: Provenance) -> None:
        """What makes the same picture again: what it started from, or that it started from noise.

        There is no pin of several pictures: where some of them started from cached latents, each is made again alone.
        """
        starts = provenance.cached_starts
        if not starts or provenance.parameters.num_images == 1:
            pin_start(provenance.parameters, starts[0].entry if starts else "")

    def job_completed(self, job: Job, provenance: Provenance) -> None:
        """Learn how many steps requests like this one skip. A pin says nothing about what other requests find."""
        key = self._keys.pop(job.job_id, None)
        skipped = [0] * job.num_images
        for start in provenance.cached_starts:
            if 0 <= start.image < job.num_images:
                skipped[start.image] = max(0, start.skipped_steps)
        started = {start.image for start in provenance.cached_starts} & set(range(job.num_images))
        self._metrics.cached_pictures.inc(len(started))
        self._metrics.skipped_steps.inc(sum(skipped))
        if may_start(job.bare) and not job.bare.techniques.cache_entry:
            key = key or rate_key(job.bare, job.request.tenant)
            for steps in skipped:
                self._rates.record(key, steps)

    def is_final(self, error: BottegaError) -> bool:
        """A pin that no store sends in time is not sent to another worker either."""
        return isinstance(error, NoCache)

    def _key(self, job: Job) -> RateKey:
        key = self._keys.get(job.job_id)
        if key is None:
            key = self._keys[job.job_id] = rate_key(job.bare, job.request.tenant)
            while len(self._keys) > _MOST_JOBS:
                self._keys.popitem(last=False)
        return key


class ResolvedCache(Resolution):
    """A request that asks for cached latents by name."""

    def complete(self, full: GenerationSpec) -> None:
        """An EXACT that only the seed stands for gives way, where pictures may start from latents at all.

        LoRAs that wait because of it still do.
        """
        if full.fidelity == generation_pb2.FIDELITY_EXACT and is_cacheable(full):
            full.fidelity = generation_pb2.FIDELITY_BALANCED


def _may_start_from_latents(job: Job) -> bool:
    """Whether some of its pictures do by its pin or its decision, or, as long as nothing is decided, may."""
    if job.bare.techniques.cache_entry:
        return True
    decided = _decision_of(job)
    return not _has_drawn(job) if decided is None else any(start.entry for start in decided.starts)


def _decision_of(job: Job) -> CacheDecision | None:
    """What earlier attempts have decided; None where that is nothing, or nothing that can be read."""
    if kinds.CACHE not in job.decisions.by_kind:
        return None
    try:
        return CacheDecision.FromString(job.decisions.by_kind[kinds.CACHE])
    except DecodeError:
        return None


def _decided(use: CacheUse) -> CacheStart:
    """Empty where a worker of another version names its entries otherwise."""
    try:
        entry, step = parse_start(use.entry)
    except ValueError:
        return CacheStart()
    return CacheStart(entry=entry, step=step, similarity=use.similarity, without_loras=use.without_loras)


def _has_drawn(job: Job) -> bool:
    """Whether an earlier attempt may have begun the pictures, from noise if it has decided nothing else.

    Not where all of them were returned by workers before they drew.
    """
    earlier = job.attempts - (1 if job.worker else 0)
    return job.steps.done > 0 or earlier > job.losses.returns
