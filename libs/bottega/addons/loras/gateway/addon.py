"""The gateway's add-on for LoRAs: it resolves names, decides how late LoRAs may be loaded, and estimates load times."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bottega import kinds
from bottega.adapter_rules import check_lateness, check_lora_steps, check_loras, waits_for_loras
from bottega.addons.interface.gateway_addon import (
    AddOn,
    AddOnContext,
    AddOnMetrics,
    FleetView,
    JobCosts,
    PrefetchReason,
    RequiredModel,
    Resolution,
    SecondsByWorker,
    WorkerCosts,
)
from bottega.addons.interface.prefetch import GrpcPrefetchClient, PrefetchClient, ServicePrefetcher
from bottega.addons.interface.views import Access, AddOnJob, Member
from bottega.addons.loras.gateway.resolver import LoraResolver
from bottega.errors import LoraUnusable, NoLora, Violation
from bottega.rpc.channel import PLAINTEXT, Channels, Target
from bottega.rules import refuse
from bottega.schedules import lists_steps
from bottega.v1 import generation_pb2, image_pb2
from bottega.v1.generation_pb2 import GenerationSpec, Lora, Provenance
from bottega.v1.image_pb2 import Adapter
from bottega.v1.lora_pb2 import PrefetchLorasRequest, StoredLora
from bottega.v1.lora_pb2_grpc import LoraServiceStub

# Share of the steps that a LoRA without a profile may be late. Katz's bound: 10 of 50.
_LATE_SHARE = 0.2
# Speed of a store's disk and of a link of 10 Gbit/s, which are about the same. A worker hashes at this speed, too.
_FETCHED_BYTES_PER_S = 1e9
# Size of a LoRA of unknown size: rank 16 in all attention layers of SDXL. Sizes are unknown after a restart.
_USUAL_BYTES = 100 << 20
# Sizes that are remembered. A production trace had 7,000 LoRAs (Katz, ATC'25).
_MAX_SIZES = 16_384
# Shares of a swap's time. Merging a set writes and computes every weight that it changes; restoring only writes them.
_INTO_SHARE = 2 / 3
_OUT_SHARE = 1 / 3

# Sorted pairs of digest and scale, so that the order of a request's LoRAs does not matter; empty without LoRAs.
_LoraSetKey = tuple[tuple[str, float], ...]


def create(context: AddOnContext) -> LoraAddOn:
    """Return the add-on for a gateway."""
    return LoraAddOn(context.fleet, context.metrics, context.channels, live_jobs=context.live_jobs)


class LoraAddOn(AddOn):
    """The gateway's add-on for LoRAs."""

    adapter_kind = image_pb2.ADAPTER_KIND_LORA
    model_field = "loras"
    # Another worker would not get the LoRAs either.
    final_errors = (NoLora,)

    def __init__(
        self,
        fleet: FleetView,
        metrics: AddOnMetrics,
        channels: Channels = PLAINTEXT,
        *,
        live_jobs: Callable[[], Iterable[AddOnJob]] = tuple,
    ) -> None:
        self._resolver = LoraResolver(
            fleet, channels, needed=lambda: (digest for job in live_jobs() for digest in job.loras)
        )

        def connect(target: Target) -> PrefetchClient:
            return GrpcPrefetchClient(
                target,
                channels,
                # The store also protects them from deletion for a while.
                lambda channel, digests, deadline_s: LoraServiceStub(channel).PrefetchLoras(
                    PrefetchLorasRequest(digests=digests), timeout=deadline_s
                ),
            )

        self._prefetcher = ServicePrefetcher(kinds.LORAS, connect, metrics.prefetches)
        self._sizes = LoraSizes()

    def check(self, spec: GenerationSpec) -> Iterator[Violation]:
        """Yield the violations in a request's LoRAs."""
        yield from check_loras(spec)
        yield from check_lateness(spec)

    def check_steps(self, spec: GenerationSpec, *, steps: int, strength: float | None) -> Iterator[Violation]:
        """Yield violations for LoRAs that would be used only after the last step, or later than the request allows."""
        return check_lora_steps(spec, steps, strength, waits=waits_for_loras(spec))

    async def resolve(self, spec: GenerationSpec, access: Access) -> Resolution | None:
        """Look up the LoRAs in the stores. Raise LoraNotFound, LoraUnusable or NoLora if that fails."""
        if not spec.loras:
            return None
        stored = await self._resolver.resolve(spec.loras, access)
        refuse(list(_check_embeddings(spec, stored)))
        self._sizes.record(stored)
        # All LoRAs of a request must have the same base model.
        required = RequiredModel(name=stored[0].base, needed_by=stored[0].name)
        return ResolvedLoras(stored=stored, required_model=required)

    async def adapters(self, access: Access, models: Sequence[image_pb2.Model]) -> Sequence[Adapter]:
        """Return the LoRAs that the caller may name. A tenant's own LoRA hides a shared one of the same name."""
        named = {lora.name: lora for lora in await self._resolver.list_all() if access.has_lora(lora.name)}
        hidden = {access.short_name(name) for name in named if access.short_name(name) != name}
        return [
            Adapter(
                kind=self.adapter_kind,
                name=access.short_name(name),
                digest=lora.digest,
                models=[model.name for model in models if model.name == lora.base],
                trigger_words=lora.trigger_words,
            )
            for name, lora in named.items()
            if name not in hidden
        ]

    def costs(self, job: AddOnJob) -> JobCosts:
        """Return the costs of a job's set of LoRAs, also if it is empty: restoring merged weights costs time, too."""
        return JobCosts(key=job.lora_set, at=functools.partial(self.worker_costs, job))

    def worker_costs(self, job: AddOnJob, workers: Mapping[str, Member]) -> WorkerCosts:
        """Return the seconds that workers need to fetch LoRAs and to change their weights."""
        return WorkerCosts(load_s=lora_costs(job.lora_set, workers, self._sizes))

    def prefetch(self, jobs: Sequence[AddOnJob], reason: PrefetchReason) -> None:
        """Ask the stores to load the LoRAs of a job that has arrived, because a worker will soon fetch them."""
        loras = [lora for job in jobs for lora in job.loras] if reason is PrefetchReason.ARRIVED else []
        for store in self._resolver.stores() if loras else ():
            self._prefetcher.request(store, loras)

    def job_completed(self, job: AddOnJob, provenance: Provenance) -> None:
        """Write the first step that used the LoRAs into the provenance's parameters; 0 for embeddings alone."""
        loras = provenance.parameters.loras
        for lora, use in zip(loras, provenance.loras, strict=False):
            lora.from_step = 0 if all(other.token for other in loras) else use.from_step

    def member_changed(self, member: Member, *, lost: bool = False) -> None:
        """Protect the LoRAs of live jobs from deletion as soon as there is a store. End prefetching from a lost one."""
        if lost:
            self._prefetcher.remove(member)
        elif member.kind == kinds.LORAS:
            self._resolver.start()

    async def close(self) -> None:
        await self._prefetcher.close()
        await self._resolver.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedLoras(Resolution):
    """The LoRAs of a request, as stores describe them."""

    stored: Sequence[StoredLora]
    required_model: RequiredModel | None = None

    def check_model(self, model: image_pb2.Model) -> None:
        """Raise LoraUnusable for a LoRA that was made for another base model."""
        for lora in self.stored:
            if lora.base != model.name:
                raise LoraUnusable(
                    f"{lora.name} was made for the base model {lora.base}, but the request is for {model.name}",
                    metadata={"lora": lora.name, "made_for": lora.base, "model": model.name},
                )

    def complete(self, full: GenerationSpec, steps: int) -> None:
        """Fill in digests, scales, and the latest steps at which LoRAs may be applied."""
        first = full.num_inference_steps - steps
        # LoRAs were profiled with the model's own steps, not with listed ones.
        late = _may_be_late(full) and not lists_steps(full)
        some_may_be_late = any(
            _is_late(lora, first) for lora, stored in zip(full.loras, self.stored, strict=True) if not stored.token
        )
        for lora, stored in zip(full.loras, self.stored, strict=True):
            _complete(lora, stored, latest_step=_latest_step(stored, steps) if late else 0)
        if some_may_be_late and not _may_be_late(full):
            # A fidelity of EXACT that nobody asked for is lowered, and the spec says so.
            full.techniques.bounded_lora_loading = True


# Tokens that the embeddings of a request may add up to: those of the longest prompt.
_MAX_TOKENS = 1500
_EARLY = "for an embedding: its vectors are in the prompt, which is encoded before the first step"
_TEXTS = ("prompt", "prompt_2", "negative_prompt", "negative_prompt_2")


def _check_embeddings(spec: GenerationSpec, stored: Sequence[StoredLora]) -> Iterator[Violation]:
    """Yield violations for embeddings that would have no effect, or another one than in stock Diffusers."""
    texts = [*spec.prompts, *(getattr(spec, name) for name in _TEXTS)]
    tokens = dict[str, int]()
    for index, (lora, found) in enumerate(zip(spec.loras, stored, strict=True)):
        if not found.token:
            continue
        field, token = f"spec.loras[{index}]", found.token
        if lora.HasField("scale") and lora.scale != 1.0:
            rule = f"must be 1 for an embedding: weigh its token in a weighted prompt, such as ({token}:1.2)"
            yield Violation(field=f"{field}.scale", description=rule)
        if lora.measure_similarity:
            yield Violation(field=f"{field}.measure_similarity", description="must be false for an embedding")
        if lora.max_step > 0:
            yield Violation(field=f"{field}.max_step", description=f"must be absent or 0 {_EARLY}")
        # With LoRAs, all have the same `from_step`, which is theirs.
        if lora.from_step > 0 and all(other.token for other in stored):
            yield Violation(field=f"{field}.from_step", description=f"must be absent or 0 {_EARLY}")
        # In capitals, Diffusers reads the token of several vectors as its first vector.
        count = max((text if found.modules > 1 else text.lower()).count(token) for text in texts)
        if not count:
            rule = f"is an embedding whose token {token} is in no prompt: write it there, in small letters"
            yield Violation(field=f"{field}.name", description=rule)
        if other := next((known for known in tokens if known in token or token in known), None):
            rule = f"is an embedding whose token {token} cannot be told from {other}, that of another embedding"
            yield Violation(field=f"{field}.name", description=rule)
        tokens[token] = count * found.modules
    if sum(tokens.values()) > _MAX_TOKENS:
        rule = f"have {sum(tokens.values())} vectors in a prompt: at most {_MAX_TOKENS} are drawn"
        yield Violation(field="spec.loras", description=rule)


def _complete(lora: Lora, stored: StoredLora, *, latest_step: int) -> None:
    lora.name, lora.digest, lora.token = stored.name, stored.digest, stored.token
    lora.denoiser_only = not stored.token and not stored.text_bytes
    if not lora.HasField("scale"):
        lora.scale = 1.0
    if stored.token:
        lora.max_step = 0
    elif not lora.HasField("max_step"):
        lora.max_step = latest_step


def _is_late(lora: Lora, first: int) -> bool:
    """Return whether a LoRA's own fields allow steps without it. `first` is the request's first step."""
    return lora.from_step > first if lora.HasField("from_step") else lora.max_step > 0


def _may_be_late(spec: GenerationSpec) -> bool:
    """Return whether the request, or else its fidelity, allows steps without LoRAs."""
    if spec.techniques.HasField("bounded_lora_loading"):
        return spec.techniques.bounded_lora_loading
    return spec.fidelity in (generation_pb2.FIDELITY_BALANCED, generation_pb2.FIDELITY_FAST)


def _latest_step(stored: StoredLora, steps: int) -> int:
    """Return the bound in a LoRA's profile for the nearest number of steps, scaled to `steps` steps."""
    if not stored.bounds:
        return int(steps * _LATE_SHARE)
    nearest = min(stored.bounds, key=lambda bound: abs(bound.num_inference_steps - steps))
    return nearest.max_step * steps // max(1, nearest.num_inference_steps)


class LoraSizes:
    """The sizes of LoRAs by digest, as stores reported them."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[str, int] = OrderedDict()

    def record(self, loras: Iterable[StoredLora]) -> None:
        """Record the sizes of a request's LoRAs."""
        for lora in loras:
            self._sizes[lora.digest] = lora.size_bytes
            self._sizes.move_to_end(lora.digest)
        while len(self._sizes) > _MAX_SIZES:
            self._sizes.popitem(last=False)

    def fetch_s(self, digests: Iterable[str]) -> float:
        """Return the estimated seconds to fetch these LoRAs."""
        return sum(self._sizes.get(digest, _USUAL_BYTES) for digest in digests) / _FETCHED_BYTES_PER_S


def lora_costs(loras: _LoraSetKey, members: Mapping[str, Member], sizes: LoraSizes) -> Mapping[str, float]:
    """Return the seconds that workers need to apply a job's set, which may be empty.

    With these costs, the scheduler prefers workers that have the set in their weights, then workers that have the LoRAs
    in memory, among those that would finish at the same time.
    """
    if not loras:
        return SecondsByWorker(members.keys(), lambda worker: _restore_s(members[worker]))
    digests = frozenset(digest for digest, _ in loras)

    def seconds_at(worker: str) -> float:
        member = members[worker]
        return sizes.fetch_s(digests - member.hosts(kinds.LORAS).digests) + _swap_s(loras, member)

    # Of a thousand workers the scheduler compares a few.
    return SecondsByWorker(members.keys(), seconds_at)


def _restore_s(member: Member) -> float:
    """Return the seconds that a worker needs to restore its original weights; 0 if no set is merged."""
    hosted = member.hosts(kinds.LORAS)
    return _OUT_SHARE * hosted.switch_s if hosted.applied else 0.0


def _swap_s(loras: _LoraSetKey, member: Member) -> float:
    """Return the seconds that a worker needs to merge a set into its weights; 0 if it is merged already."""
    hosted = member.hosts(kinds.LORAS)
    if loras == hosted.applied:
        return 0.0
    share = (_OUT_SHARE if hosted.applied else 0.0) + _INTO_SHARE
    return share * hosted.switch_s
