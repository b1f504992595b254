"""LoRAs as an add-on: what their names stand for, when they may come late, and what a worker lacks of a job's set."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bottega import kinds
from bottega.errors import BottegaError, LoraUnusable, NoLora, Violation
from bottega.gateway.addons.addon import AddOn, AddOnContext, RequiredModel, Resolution, WorkerCosts
from bottega.gateway.addons.loras import defaults
from bottega.gateway.addons.loras.client import GrpcLoraClient
from bottega.gateway.addons.loras.costs import LoraSizes, lora_costs
from bottega.gateway.addons.loras.resolver import LoraResolver
from bottega.gateway.addons.prefetch import ServicePrefetcher
from bottega.gateway.fleet.members import Member
from bottega.gateway.fleet.registry import Fleet
from bottega.gateway.jobs.job import Job
from bottega.gateway.metrics import GatewayMetrics
from bottega.gateway.tenants.access import Access
from bottega.lora.set_key import LoraSetKey
from bottega.rpc.channel import PLAINTEXT, Channels
from bottega.rules import check_lateness, check_lora_steps, check_loras, waits_for_loras
from bottega.v1 import image_pb2
from bottega.v1.generation_pb2 import GenerationSpec, Provenance
from bottega.v1.image_pb2 import Adapter
from bottega.v1.lora_pb2 import StoredLora


def create(context: AddOnContext) -> LoraAddOn:
    """The add-on that the manifest names."""
    return LoraAddOn(context.fleet, context.metrics, context.channels)


class LoraAddOn(AddOn):
    """All LoRAs of a gateway."""

    adapter_kind = image_pb2.ADAPTER_KIND_LORA

    def __init__(self, fleet: Fleet, metrics: GatewayMetrics, channels: Channels = PLAINTEXT) -> None:
        self._resolver = LoraResolver(fleet, channels)
        self._prefetcher = ServicePrefetcher(kinds.LORAS, functools.partial(GrpcLoraClient, channels=channels), metrics)
        self._sizes = LoraSizes()

    def is_named(self, spec: GenerationSpec) -> bool:
        """Whether a request names a LoRA."""
        return bool(spec.loras)

    def may_require_model(self, spec: GenerationSpec) -> bool:
        """A request that names LoRAs and no model is for their base."""
        return bool(spec.loras)

    def check(self, spec: GenerationSpec) -> Iterator[Violation]:
        """What is wrong with the LoRAs of a request."""
        yield from check_loras(spec)
        yield from check_lateness(spec)

    def check_steps(self, spec: GenerationSpec, *, steps: int, strength: float | None) -> Iterator[Violation]:
        """Yield which LoRAs would go in after the last step, or too late for what the caller says."""
        return check_lora_steps(spec, steps, strength, waits=waits_for_loras(spec))

    async def resolve(self, spec: GenerationSpec, access: Access) -> Resolution:
        """What the stores have. Raises LoraNotFound, LoraUnusable, NoLora."""
        stored = await self._resolver.resolve(spec.loras, access)
        self._sizes.record(stored)
        return ResolvedLoras(stored=stored)

    async def adapters(self, access: Access, models: Sequence[image_pb2.Model]) -> Sequence[Adapter]:
        """Return the LoRAs that the caller may name; its tenant's own come before those for all."""
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

    def complete_again(self, full: GenerationSpec, before: GenerationSpec) -> None:
        """The same weights, and at the latest at the same step."""
        if before.loras:
            del full.loras[:]
            full.loras.extend(before.loras)

    def cost_key(self, job: Job) -> LoraSetKey:
        """The set; a job without LoRAs costs something too, where a worker has some in its weights."""
        return job.lora_set

    def worker_costs(self, job: Job, workers: Mapping[str, Member]) -> WorkerCosts:
        """What workers have to fetch, and to change in their weights."""
        return WorkerCosts(load_s=lora_costs(job.lora_set, workers, self._sizes))

    def job_queued(self, job: Job) -> None:
        """Has the stores load what a worker will fetch soon."""
        for store in self._resolver.stores() if job.loras else ():
            self._prefetcher.request(store, job.loras)

    def pin_parameters(self, provenance: Provenance) -> None:
        """The step at which each went in."""
        for lora, use in zip(provenance.parameters.loras, provenance.loras, strict=False):
            lora.from_step = use.from_step

    def is_final(self, error: BottegaError) -> bool:
        """Another worker would not get them either."""
        return isinstance(error, NoLora)

    def start(self, live_jobs: Callable[[], Iterable[Job]]) -> None:
        """From now on no store deletes what a job needs."""
        self._resolver.start(lambda: (digest for job in live_jobs() for digest in job.loras))

    def member_lost(self, member: Member) -> None:
        """Nothing is prefetched from a store that is lost."""
        self._prefetcher.remove(member)

    async def close(self) -> None:
        """Ends every call to a store."""
        await self._prefetcher.close()
        await self._resolver.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedLoras(Resolution):
    """The LoRAs of a request, as the stores have them."""

    stored: Sequence[StoredLora]

    @property
    def required_model(self) -> RequiredModel | None:
        """The base of the first; all of them must be for the same."""
        return RequiredModel(name=self.stored[0].base, needed_by=self.stored[0].name)

    def check_model(self, model: image_pb2.Model) -> None:
        """Raises LoraUnusable naming a LoRA that was made for another base than this model."""
        for lora in self.stored:
            if lora.base != model.name:
                raise LoraUnusable(
                    f"{lora.name} was made for the base model {lora.base}, and the request is for {model.name}",
                    metadata={"lora": lora.name, "made_for": lora.base, "model": model.name},
                )

    def complete(self, full: GenerationSpec) -> None:
        """Fills in weights, scales, and the steps at which they go in at the latest."""
        defaults.complete_loras(full, self.stored)
