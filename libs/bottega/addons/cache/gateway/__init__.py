"""The gateway's add-on for the approximate cache: permissions of attempts, named latents, and expected savings.

A request may name the cached latent that its picture starts from (`cache_entry`, a "pin"). Other latents are looked up
by the worker, because the similarity of prompts is known only after encoding.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from prometheus_client import Counter

from bottega import kinds
from bottega.addons.cache.starts import (
    LEAST_WORDS,
    has_enough_words,
    is_cacheable,
    is_switched_off,
    may_start,
    parse_start,
    pin_start,
    recorded_steps,
)
from bottega.addons.interface.gateway_addon import (
    NO_SAVINGS,
    AddOn,
    AddOnContext,
    AddOnMetrics,
    ExpectedSavings,
    FleetView,
    Resolution,
)
from bottega.addons.interface.views import Access, AddOnJob, Member
from bottega.errors import NoCache, Violation
from bottega.v1 import generation_pb2, worker_pb2
from bottega.v1.cache_pb2 import CacheDecision, CacheOrder, CacheStart
from bottega.v1.generation_pb2 import CacheUse, GenerationSpec, Provenance
from bottega.v1.worker_pb2 import AttemptDecisions

# Jobs whose key is remembered. The key of another job is computed again.
_MAX_JOBS = 4096
# A store comes back, or another one joins, within some seconds.
_RETRY_AFTER_S = 3.0
_SWITCH = "spec.techniques.approximate_cache"
_PIN = "spec.techniques.cache_entry"
# Pictures that a mean covers: prompts drift, and entries come and go.
_WINDOW = 64
# Pictures of a key before savings are expected: the mean of fewer is unreliable.
_MIN_PICTURES = 8
# Keys that are remembered. Each is a set of parameters that somebody uses.
_MAX_KEYS = 4096
# Fields that pictures starting from each other's latents may differ in, or that only concern delivery.
_NOT_IN_KEY = ("prompt", "seed", "num_images", "format", "quality", "techniques")

RateKey = bytes
"""Hash of the settings that requests share whose hit rate is measured together."""


def create(context: AddOnContext) -> CacheAddOn:
    """Return the add-on for a gateway."""
    return CacheAddOn(context.fleet, context.metrics)


class CacheAddOn(AddOn):
    """The gateway's add-on for the approximate cache."""

    # Another worker would not get the entry of a pin in time either.
    final_errors = (NoCache,)

    def __init__(self, fleet: FleetView, metrics: AddOnMetrics) -> None:
        self._fleet = fleet
        self._pictures = Counter(
            "bottega_cached_pictures",
            "Pictures of completed jobs that started from cached latents.",
            registry=metrics.registry,
        )
        self._saved_steps = Counter(
            "bottega_skipped_steps",
            "Denoising steps that cached latents saved completed jobs.",
            registry=metrics.registry,
        )
        self._rates = HitRates()
        self._keys: OrderedDict[str, RateKey] = OrderedDict()  # by job

    def check(self, spec: GenerationSpec) -> Iterator[Violation]:
        """Yield violations for settings that contradict a pin or `approximate_cache`."""
        return _check_cache(spec)

    def check_steps(self, spec: GenerationSpec, *, steps: int, strength: float | None) -> Iterator[Violation]:
        """Yield a violation if the pin names a step after which no latents are recorded."""
        return check_cached_step(spec, steps)

    async def resolve(self, spec: GenerationSpec, access: Access) -> Resolution | None:
        """Raise NoCache if the request has a pin and there is no cache. The worker looks for the entry itself."""
        if not _asks_for_cache(spec):
            return None
        if spec.techniques.cache_entry and not self._fleet.services(kinds.CACHE):
            text = f"there is no approximate cache that could have {spec.techniques.cache_entry}"
            raise NoCache(text, retry_after_s=_RETRY_AFTER_S)
        return ResolvedCache()

    def decide_again(self, decisions: AttemptDecisions, before: AddOnJob) -> None:
        """Make each picture start from the same cached latent as before, or from noise.

        A pin in the request itself needs no decision.
        """
        if before.provenance is None or before.bare.techniques.cache_entry or not may_start(before.bare):
            return
        starts = {start.image: _start(start) for start in before.provenance.cached_starts}
        decision = CacheDecision(starts=[starts.get(image, CacheStart()) for image in range(before.num_images)])
        decisions.by_kind[kinds.CACHE] = decision.SerializeToString()

    def expected_savings(self, job: AddOnJob) -> ExpectedSavings:
        """Return the steps that a job skips according to its decision or pin, else the mean of recent similar jobs."""
        return ExpectedSavings(skipped_steps=self._skipped_steps(job)) if _may_skip(job) else NO_SAVINGS

    def prepare_attempt(self, job: AddOnJob, worker: Member, request: worker_pb2.RunAttemptRequest) -> None:
        """Write into the attempt whether its pictures may start from cached latents, and may be recorded."""
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

    def job_completed(self, job: AddOnJob, provenance: Provenance) -> None:
        """Pin the latent from which the picture started in its parameters, and record how many steps were skipped.

        Several pictures get no pin: if some of them started from cached latents, each can only be drawn again by
        itself. Requests with a pin do not count, because they say nothing about other requests.
        """
        starts = provenance.cached_starts
        if not starts or provenance.parameters.num_images == 1:
            pin_start(provenance.parameters, starts[0].entry if starts else "")
        key = self._keys.pop(job.job_id, None)
        skipped = [0] * job.num_images
        for start in starts:
            if 0 <= start.image < job.num_images:
                skipped[start.image] = max(0, start.skipped_steps)
        started = {start.image for start in starts} & set(range(job.num_images))
        self._pictures.inc(len(started))
        self._saved_steps.inc(sum(skipped))
        if may_start(job.bare) and not job.bare.techniques.cache_entry:
            key = key or rate_key(job.bare, job.request.tenant)
            for steps in skipped:
                self._rates.record(key, steps)

    def _skipped_steps(self, job: AddOnJob) -> float:
        if job.bare.techniques.cache_entry:
            return parse_start(job.bare.techniques.cache_entry)[1] - 1  # one step may be made twice, with fresh noise
        decided = _decision_of(job)
        if decided is not None:
            return sum(start.step - 1 for start in decided.starts if start.entry)
        return job.num_images * self._rates.skipped_steps(self._key(job))

    def _key(self, job: AddOnJob) -> RateKey:
        key = self._keys.get(job.job_id)
        if key is None:
            key = self._keys[job.job_id] = rate_key(job.bare, job.request.tenant)
            while len(self._keys) > _MAX_JOBS:
                self._keys.popitem(last=False)
        return key


class ResolvedCache(Resolution):
    """The resolution of a request with `approximate_cache` or `cache_entry`."""

    def complete(self, full: GenerationSpec, steps: int) -> None:
        """Lower the fidelity from EXACT to BALANCED if pictures may start from cached latents at all.

        EXACT here is only the default for a request with a seed; a request that sets it was refused. Lowering it does
        not change whether the job waits for its LoRAs.
        """
        if full.fidelity == generation_pb2.FIDELITY_EXACT and is_cacheable(full):
            full.fidelity = generation_pb2.FIDELITY_BALANCED


def may_record(spec: GenerationSpec) -> bool:
    """Return whether latents of a complete spec's first picture may be recorded. An exact picture may be, too."""
    return is_cacheable(spec) and not is_switched_off(spec) and not spec.techniques.cache_entry


def check_cached_step(spec: GenerationSpec, steps: int) -> Iterator[Violation]:
    """Yield a violation if the pin names a step after which pictures of `steps` steps have no recorded latent.

    Yields nothing for an invalid pin or number of steps, which other rules refuse.
    """
    try:
        _, step = parse_start(spec.techniques.cache_entry)
    except ValueError:
        return
    recorded = recorded_steps(steps) if steps > 0 else (step,)
    if step not in recorded:
        known = ", ".join(map(str, recorded)) or "none"
        rule = f"no latent is recorded after step {step} of {steps}; latents are recorded after: {known}"
        yield Violation(field=_PIN, description=rule)


def _asks_for_cache(spec: GenerationSpec) -> bool:
    return spec.techniques.approximate_cache or spec.techniques.HasField("cache_entry")


def _check_cache(spec: GenerationSpec) -> Iterator[Violation]:
    # An EXACT that only follows from a seed is lowered later.
    exact = spec.fidelity == generation_pb2.FIDELITY_EXACT
    if exact and spec.techniques.approximate_cache:
        rule = "must not be true with fidelity EXACT, under which no picture starts from a cached latent"
        yield Violation(field=_SWITCH, description=rule)
    if spec.keep_for_editing and _asks_for_cache(spec):
        rule = "must be false if pictures may start from a cached latent, because they skip the steps before it"
        yield Violation(field="spec.keep_for_editing", description=rule)
    if not spec.techniques.HasField("cache_entry"):
        return
    if is_switched_off(spec):
        yield Violation(field=_SWITCH, description="must not be false with techniques.cache_entry")
    if exact:
        rule = "must not be EXACT with techniques.cache_entry: a picture that starts from a cached latent is not exact"
        yield Violation(field="spec.fidelity", description=rule)
    if spec.num_images > 1 or len(spec.prompts) > 1:
        rule = "must be 1 with techniques.cache_entry: a cached latent is for one picture; draw each with its own seed"
        yield Violation(field="spec.num_images", description=rule)
    if not has_enough_words(spec.prompt):
        rule = f"must have {LEAST_WORDS} different words with techniques.cache_entry: fewer cannot be compared reliably"
        yield Violation(field="spec.prompt", description=rule)
    if spec.prompt_syntax == generation_pb2.PROMPT_SYNTAX_WEIGHTED:
        rule = "must be plain with techniques.cache_entry: weighted prompts never start from a cached latent"
        yield Violation(field="spec.prompt_syntax", description=rule)
    present = {field.name for field, _ in spec.ListFields()}
    for name in ("prompt_2", "image", "timesteps", "sigmas"):
        if name in present:
            rule = "must be absent with techniques.cache_entry: such pictures never start from a cached latent"
            yield Violation(field=f"spec.{name}", description=rule)


def _may_skip(job: AddOnJob) -> bool:
    """Return whether a job may skip steps: by its pin or decision or, before any drawing, by its spec."""
    if job.bare.techniques.cache_entry or _decision_of(job) is not None:
        return True
    return may_start(job.bare) and not _has_drawn(job)


def _may_start_from_latents(job: AddOnJob) -> bool:
    """Return whether pictures start from latents by pin or decision, or may do so because nothing is decided."""
    if job.bare.techniques.cache_entry:
        return True
    decided = _decision_of(job)
    return not _has_drawn(job) if decided is None else any(start.entry for start in decided.starts)


def _decision_of(job: AddOnJob) -> CacheDecision | None:
    """Return the decision of earlier attempts; None if there is none that can be decoded."""
    if kinds.CACHE not in job.decisions.by_kind:
        return None
    try:
        return CacheDecision.FromString(job.decisions.by_kind[kinds.CACHE])
    except DecodeError:
        return None


def _start(use: CacheUse) -> CacheStart:
    """Convert a use of the cache to a start; an empty one if the entry's name has another version's format."""
    try:
        entry, step = parse_start(use.entry)
    except ValueError:
        return CacheStart()
    return CacheStart(entry=entry, step=step, similarity=use.similarity, without_loras=use.without_loras)


def _has_drawn(job: AddOnJob) -> bool:
    """Return whether an earlier attempt may have begun to draw. Without a decision, it then began from noise.

    False if workers returned all earlier attempts before they drew.
    """
    earlier = job.attempts - (1 if job.worker else 0)
    return job.steps.done > 0 or earlier > job.losses.returns


def rate_key(bare: GenerationSpec, tenant: str) -> RateKey:
    """Return the key under which a request's hit rate is measured: a hash of the settings that must match.

    It is coarser than the key in the cache, because it omits control images.

    Args:
        bare: The complete spec, without input images.
        tenant: The request's tenant.
    """
    common = GenerationSpec()
    common.CopyFrom(bare)
    for name in _NOT_IN_KEY:
        common.ClearField(name)  # type: ignore[arg-type]
    digest = hashlib.blake2b(tenant.encode(), digest_size=16)
    digest.update(b"\0" + common.SerializeToString(deterministic=True))
    return digest.digest()


@dataclass(slots=True)
class _Savings:
    """The mean number of steps that recent pictures skipped."""

    pictures: int = 0
    """Number of pictures in the mean, at most _WINDOW."""
    skipped: float = 0.0

    def record(self, skipped: int) -> None:
        """Add a picture. From _WINDOW pictures on, the weight of older ones decays."""
        self.pictures = min(self.pictures + 1, _WINDOW)
        self.skipped += (skipped - self.skipped) / self.pictures


class HitRates:
    """The mean number of steps that recent pictures skipped, by key. Pictures that started from noise count as 0."""

    def __init__(self) -> None:
        self._savings: OrderedDict[RateKey, _Savings] = OrderedDict()

    def record(self, key: RateKey, skipped: int) -> None:
        """Add a picture that was allowed to start from a cached latent."""
        self._savings.setdefault(key, _Savings()).record(skipped)
        self._savings.move_to_end(key)
        while len(self._savings) > _MAX_KEYS:
            self._savings.popitem(last=False)

    def skipped_steps(self, key: RateKey) -> float:
        """Return the number of steps that a picture is expected to skip; 0 until enough pictures were recorded."""
        savings = self._savings.get(key)
        return savings.skipped if savings is not None and savings.pictures >= _MIN_PICTURES else 0.0
