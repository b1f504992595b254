"""The engine add-on for LoRAs: they are requested when a job arrives. All images of a job use them from one step on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from google.protobuf.message import DecodeError

from bottega import kinds, rules
from bottega.addons.loras.engine import (
    TEXT_ENCODERS,
    UNET,
    LoraAtScale,
    LoraHandle,
    LoraRef,
    LoraSet,
    LoraSource,
    LoraWeights,
    SetKey,
    WholeLayer,
    has_mixed_alphas,
    is_only_low_rank,
    left_out_by_stock,
)
from bottega.addons.loras.engine.embeddings import PromptEmbeddings, TokenVectors
from bottega.addons.loras.engine.lora_set import RemoteLoras, loras_part, read_loras
from bottega.addons.loras.engine.patching import patch_probe
from bottega.addons.loras.engine.similarity import LatentMeter
from bottega.addons.loras.engine.unmerged import STACKED_BYTES
from bottega.addons.loras.wire.canonical import TOKEN_EMBEDDING
from bottega.engine.addon import EngineAddOn, JobAddOn, add_counts
from bottega.engine.encode import Conditions
from bottega.engine.events import EngineRecord, LoraRecord
from bottega.engine.job import EngineJob, EngineOrder, new_requests
from bottega.engine.parallel.remote_rows import OffloadedPart
from bottega.engine.request import Request
from bottega.engine.spans import MAX_SPANS, StoreWork, TracedSpan
from bottega.engine.spec import EmbeddingSpec, LoraSpec, ResolvedSpec
from bottega.errors import BottegaError, InvalidRequest, LoraUnusable, NoLora, Unavailable, Violation
from bottega.model.model import Model
from bottega.model.rows import Embeds, Half, Row
from bottega.v1.engine_pb2 import EngineBeat
from bottega.v1.fleet_pb2 import ServiceAddress
from bottega.v1.lora_pb2 import LoraDecision

# Name of the stage of waiting for LoRAs and of merging them.
LORAS = "loras"


class EngineLoras(EngineAddOn):
    """The engine's add-on for LoRAs.

    Args:
        model: The model that LoRAs change.
        source: Provides LoRAs; None if the worker has no LoRAs.
        patches, merges_half, pristine_on_host, stacked_bytes: See LoraWeights.
        timeout_s: Seconds that a job waits for its LoRAs.
        clock: Monotonic time in seconds.
    """

    kind = kinds.LORAS

    def __init__(
        self,
        model: Model,
        source: LoraSource | None,
        *,
        patches: bool = True,
        merges_half: bool = False,
        pristine_on_host: bool = False,
        stacked_bytes: int = STACKED_BYTES,
        timeout_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.weights = LoraWeights(
            model,
            patches=patches,
            merges_half=merges_half,
            pristine_on_host=pristine_on_host,
            stacked_bytes=stacked_bytes,
        )
        self.row_weights = self.weights
        self.probes = {"patch": patch_probe}
        self.embeddings = PromptEmbeddings(model)
        self._model = model
        self._source = source
        self._timeout_s = timeout_s
        self._clock = clock
        self._parts: dict[Request, JobLoras] = {}
        self._events = Counter(hits=0, misses=0)

    @property
    def counts(self) -> Mapping[str, int]:
        """Counts of requested LoRAs: `hits` were in this process's memory, `misses` had to be fetched from a store."""
        return self._events

    def fill_beat(self, beat: EngineBeat) -> None:
        """Add the counts, and the measured cost of merging other LoRAs, to the engine's periodic report."""
        add_counts(beat, self.kind, self.counts)
        if self.weights.swap_s is not None:
            beat.switch_times.add(kind=self.kind, seconds=self.weights.swap_s)
        beat.metrics.add(
            name="bottega_worker_lora_swaps",
            text="Number of times that LoRAs were merged into the UNet's weights or removed from them.",
            value=self.weights.swaps,
            counts=True,
        )
        beat.metrics.add(
            name="bottega_worker_lora_pristine_bytes",
            text="Bytes of the copies from which weights are restored.",
            value=self.weights.pristine_bytes,
        )

    def set_services(self, services: Sequence[ServiceAddress]) -> None:
        """Set the LoRA stores that are in the fleet now."""
        if self._source is not None:
            self._source.set_stores(services)

    def open(self, order: EngineOrder) -> JobAddOn | None:
        """Request the LoRAs of a job. Raise Unavailable if this worker has no source of LoRAs."""
        spec = order.spec
        return self.ask(spec.loras, spec.embeddings, bound=spec.lora_bound, step=spec.lora_step)

    def ask(
        self,
        specs: Sequence[LoraSpec],
        embeddings: Sequence[EmbeddingSpec] = (),
        *,
        bound: int = 0,
        step: int | None = None,
    ) -> JobLoras | None:
        """Request the LoRAs and embeddings of a job, or return None if it has none.

        Raises Unavailable if this worker has no source of LoRAs.

        Args:
            specs: The LoRAs.
            embeddings: The embeddings.
            bound: The first step that must not be made without the LoRAs.
            step: The step from which they are used, if an earlier attempt has decided it; else None.
        """
        if not specs and not embeddings:
            return None
        if self._source is None:
            raise Unavailable("this worker has no LoRAs")
        since_s = self._clock()
        refs = [LoraRef(name=spec.name, digest=spec.digest) for spec in specs]
        refs += [LoraRef(name=spec.name, digest=spec.digest) for spec in embeddings]
        handles = tuple(self._source.begin(ref) for ref in refs)
        for handle in handles:
            self._events["hits" if _is_ready(handle) else "misses"] += 1
        return JobLoras(
            addon=self,
            source=self._source,
            specs=tuple(specs),
            embeddings=tuple(embeddings),
            refs=tuple(refs),
            handles=handles,
            since_s=since_s,
            timeout_s=self._timeout_s,
            bound=bound,
            step=step,
        )

    def open_remote(self, part: OffloadedPart, halves: Mapping[Half, Embeds]) -> JobAddOn:
        """Request the LoRAs of another worker's job, for which this worker computes rows.

        The other worker decides for each row from which step the LoRAs are used.
        """
        loras = self.ask(read_loras(part), step=0)
        assert loras is not None, "a part names at least one"
        return RemoteLoras(loras)

    def before_prompt(self, part: JobAddOn | None) -> None:
        """Make the text encoders use this job's LoRAs and embeddings. Raise LoraUnusable if one does not fit."""
        self.embeddings.restore()
        text = part.text_set() if isinstance(part, JobLoras) else None
        seconds = self.weights.put_in_text(text)
        if isinstance(part, JobLoras) and text is not None:
            part.note_patch("into the text encoders", seconds)
            part.changes_prompt = True
        if isinstance(part, JobLoras) and part.embeddings:
            part.tokenizers = self.embeddings.put(part.token_vectors())
            part.changes_prompt = True

    def wait(self, parts: Sequence[JobAddOn], timeout_s: float) -> None:
        """Wait until more of the jobs' LoRAs has arrived or one has failed, or until the time-out."""
        if self._source is not None:
            handles = [handle for part in parts if isinstance(part, JobLoras) for handle in part.handles]
            self._source.settle(handles, timeout_s)

    def before_group(self, requests: Sequence[Request], step_s: float) -> bool:
        """Merge LoRAs into the UNet's weights, or restore the weights, whichever is best for all running requests."""
        if not self.weights.patched and not any(request.loras_now or request.key.weights for request in requests):
            return False
        seconds = self.weights.choose(
            [request.loras_now for request in requests],
            steps=max(request.evaluations_left for request in requests),
            step_s=step_s,
        )
        patched = self.weights.patched
        # The time is charged to each job whose set was merged. Restoring the weights is charged to no job.
        for part in {self._parts[request] for request in requests if request.loras_now is not None}:
            if part.loras is patched and seconds:
                part.note_patch("into the weights", seconds)
        moved = [request for request in requests if request.share_weights(self._weights_of(request))]
        return bool(moved)

    def _weights_of(self, request: Request) -> SetKey:
        """Return the set of LoRAs for `GroupKey.weights`, with which requests must agree to share a forward pass.

        It is the set that is merged into the weights. A set that changes norms is never computed for some rows alone,
        so that a request with one has its own set as the key, even where it is not merged.
        """
        loras = request.loras_now
        return loras.key if loras is not None and loras.changes_norms else self.weights.patched_key

    def after_forward(self, rows: Sequence[Row], seconds: float, plain_s: float | None, *, masked: bool) -> bool:
        """Measure the cost of unmerged LoRAs from the time of a forward pass without masked rows."""
        return masked or self.weights.observe_forward([row.loras for row in rows], seconds, plain_s)

    def warm_up(self, row: Row, predict: Callable[[Sequence[Row]], object]) -> None:
        """Measure the costs of unmerged and merged LoRAs with a LoRA that changes nothing."""
        if self._source is None:
            return
        probe = self.weights.probe()
        for _ in range(3):
            predict([replace(row, loras=probe)])
        self.weights.measure_swap()

    def now_s(self) -> float:
        """Return the time on the add-on's clock."""
        return self._clock()

    def attach(self, part: JobLoras, requests: Sequence[Request]) -> None:
        """Associate these requests with their job's LoRAs, until `detach`."""
        self._parts |= dict.fromkeys(requests, part)

    def detach(self, requests: Sequence[Request]) -> None:
        """Drop requests that have ended. Unknown ones are ignored."""
        for request in requests:
            self._parts.pop(request, None)

    def shadows(self, order: EngineOrder, conditions: Conditions) -> Sequence[Request]:
        """Return additional requests without LoRAs in the UNet, if the order asks to measure a LoRA's effect."""
        return (
            new_requests(self._model, order, [conditions] * order.spec.num_images) if order.spec.loras_measured else ()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnlikeStock:
    """How stock Diffusers' loader may read a LoRA differently."""

    mixed_alphas: bool
    left_out: tuple[str, ...]
    low_rank: bool
    """Whether it has low-rank factors and nothing else."""
    ignored: int
    """Number of layers that were left out when it was added."""


@dataclass(slots=True, kw_only=True, eq=False)
class JobLoras(JobAddOn):
    """The LoRAs and embeddings of one job."""

    addon: EngineLoras
    source: LoraSource
    specs: tuple[LoraSpec, ...]
    embeddings: tuple[EmbeddingSpec, ...] = ()
    refs: tuple[LoraRef, ...]
    """Names and digests of the LoRAs, then of the embeddings."""
    handles: tuple[LoraHandle, ...]
    """Handles in the order of `refs`; empty once all have been used."""
    since_s: float
    """Time at which the LoRAs were requested."""
    timeout_s: float
    """Seconds that the job waits for the LoRAs."""
    bound: int = 0
    """The first step that must not be made without the LoRAs."""
    step: int | None = None
    """The step from which the LoRAs are used; None until it is decided."""
    arrived: bool = False
    """Whether all have arrived."""
    loras: LoraSet | None = None
    """The LoRAs as one set of factors; None until all have arrived, and for a job of embeddings alone."""
    wait_s: float = 0.0
    """Seconds that the job waited for its LoRAs."""
    patch_s: float = 0.0
    """Seconds spent on merging; 0 if the weights already had the LoRAs, or if they were never merged."""
    _requests: Sequence[Request] = ()
    _meter: LatentMeter = field(default_factory=LatentMeter)
    _load_s: tuple[float, ...] = ()
    _works: tuple[StoreWork | None, ...] = ()
    _unlike_stock: tuple[_UnlikeStock, ...] = ()
    _patches: list[TracedSpan] = field(default_factory=list)
    _waits: list[TracedSpan] = field(default_factory=list)
    _waiting_since_s: float | None = None

    def __post_init__(self) -> None:
        # Checkpoints do not record how a LoRA is measured.
        self.resumable = not any(spec.measured for spec in self.specs)

    def ready(self, now_s: float) -> bool:
        """Return whether the text encoders' layers have arrived. Raise NoLora after the time-out."""
        ready = self._all_arrived([handle.text_ready for handle in self.handles], now_s)
        self._note_wait(not ready, now_s)
        return ready

    def text_set(self) -> LoraSet | None:
        """Return the factors for the text encoders; None if they are not changed. Raise LoraUnusable."""
        made = self.addon.weights.text_set(self._scaled(TEXT_ENCODERS))
        return made if any(made.changes(name) for name in TEXT_ENCODERS) else None

    def token_vectors(self) -> list[TokenVectors]:
        """Return the vectors of the embeddings. Raise LoraUnusable for a LoRA in the place of an embedding."""
        found = []
        for spec, handle in zip(self.embeddings, self.handles[len(self.specs) :], strict=True):
            layers = {name: handle.layers(name).get(TOKEN_EMBEDDING) for name in TEXT_ENCODERS}
            vectors = {
                name: layer.vectors
                for name, layer in layers.items()
                if isinstance(layer, WholeLayer) and layer.vectors is not None
            }
            if not vectors:
                raise LoraUnusable(f"{spec.name} is no embedding", metadata={"lora": spec.name})
            found.append(TokenVectors(token=spec.token, vectors=vectors))
        return found

    def attach(self, job: EngineJob, conditions: Conditions, now_s: float) -> None:
        """Set the job's requests, and the step that an earlier attempt decided. Raise InvalidRequest."""
        self.addon.embeddings.restore()
        self._requests = job.requests
        if kinds.LORAS in job.pinned:
            self.step = _pinned_step(job.pinned[kinds.LORAS], job.order.spec)
        job.extra = self.addon.shadows(job.order, conditions)
        self._meter = LatentMeter(job.extra)
        self.addon.attach(self, job.requests)

    def update(self, now_s: float) -> None:
        """Make the requests use the LoRAs once all have arrived.

        All images use them from the same step: the one that an earlier attempt decided, or the first that none of them
        has begun. Raises the BottegaError of LoRAs that cannot be fetched or used, such as LoraUnusable or NoLora.
        """
        if self.arrived:
            return
        if self._all_arrived([handle.ready for handle in self.handles], now_s):
            self.arrived = True
            self.loras = self.addon.weights.unet_set(self._scaled((UNET,))) if self.specs else None
            if self.step is None:
                self.step = max(request.next_step for request in self._requests)
            for request in self._requests:
                request.loras, request.loras_from = self.loras, self.step
            self.decision = LoraDecision(step=self.step).SerializeToString()
            self._unlike_stock = tuple(_unlike_stock(handle) for handle in self.handles[: len(self.specs)])
            self._release()
        under_way = [request for request in self._requests if not request.done]
        self._note_wait(bool(under_way) and all(map(self.blocks, under_way)), now_s)

    def blocks(self, request: Request) -> bool:
        """Return whether the request waits for the LoRAs: it has reached `bound`, or it is a shadow that measures them.

        The request's present step counts, because a cached latent may have moved it since the last update.
        """
        last = self.bound if self.step is None else self.step
        return not self.arrived and (request.step >= last or request in self._meter.shadows)

    def note_patch(self, what: str, seconds: float) -> None:
        """Record that merging the LoRAs took `seconds` and has just ended. `what` names the weights, for the trace."""
        self.patch_s += seconds
        if len(self._patches) < MAX_SPANS:
            begin_s = self.addon.now_s() - seconds
            self._patches.append(TracedSpan(name=what, track="LoRAs into weights", begin_s=begin_s, seconds=seconds))

    def spans(self) -> Iterator[TracedSpan]:
        """Yield trace spans of loading each LoRA, of the stores' work for it, of merging, and of waiting."""
        for ref, load_s, work in zip(self.refs, self._load_s, self._works, strict=False):
            track = f"LoRA {ref.name}"
            yield TracedSpan(name=f"load {ref.name}", track=track, begin_s=self.since_s, seconds=load_s)
            if work is not None:
                yield from (span for span in work.spans(track) if span.begin_s >= self.since_s)
        yield from self._patches
        yield from self._waits

    def after_step(self, request: Request) -> None:
        """Compare the latents with and without LoRAs, if the job measures that."""
        self._meter.observe(request)

    def offload(self) -> OffloadedPart | None:
        """Return the message with which a second worker fetches the LoRAs itself."""
        return loras_part(self.specs) if self.specs else None

    def active_in(self, row: Row) -> int:
        """Return 1 if the batch row uses the LoRAs, else 0."""
        return int(row.loras is not None)

    def report(self, record: EngineRecord) -> EngineRecord:
        """Add the use of each LoRA to the record, if the LoRAs were used."""
        record = replace(record, seconds={**record.seconds, LORAS: self.wait_s + self.patch_s})
        if self.step is None or not self.arrived:
            return record
        rounds = [self.addon.weights.rounds_as_stock(low_rank=unlike.low_rank) for unlike in self._unlike_stock]
        loras = tuple(
            LoraRecord(
                name=spec.name,
                digest=spec.digest,
                scale=spec.scale,
                from_step=self.step,
                load_s=load_s,
                wait_s=self.wait_s,
                patch_s=self.patch_s,
                mixed_alphas=unlike.mixed_alphas,
                stock_may_leave_out=unlike.left_out,
                rounded_otherwise=not rounds_as_stock,
                ignored_layers=unlike.ignored,
                similarities=self._meter.similarities if spec.measured else (),
            )
            for spec, load_s, unlike, rounds_as_stock in zip(
                self.specs, self._load_s[: len(self.specs)], self._unlike_stock, rounds, strict=True
            )
        )
        embeddings = tuple(
            LoraRecord(
                name=spec.name,
                digest=spec.digest,
                scale=1.0,
                from_step=self.step,
                token=spec.token,
                load_s=load_s,
                wait_s=self.wait_s,
                patch_s=0.0,
            )
            for spec, load_s in zip(self.embeddings, self._load_s[len(self.specs) :], strict=True)
        )
        exact = self.step <= record.begin_step and all(rounds)
        return replace(record, loras=(*loras, *embeddings), exact=record.exact and exact)

    def close(self) -> None:
        """Release the handles and drop the requests."""
        self.addon.embeddings.restore()  # if the prompt could not be encoded
        self._release()
        self.addon.detach(self._requests)

    def _release(self) -> None:
        if self.handles:
            self._load_s = tuple(handle.load_s for handle in self.handles)
            self._works = tuple(handle.work for handle in self.handles)
            self.source.close(self.handles)
            self.handles = ()

    def _scaled(self, components: Sequence[str]) -> list[LoraAtScale]:
        return [
            LoraAtScale(digest=spec.digest, scale=spec.scale, layers={name: handle.layers(name) for name in components})
            for spec, handle in zip(self.specs, self.handles, strict=False)
        ]

    def _all_arrived(self, arrived: Sequence[bool], now_s: float) -> bool:
        if all(arrived):
            return True
        if now_s - self.since_s > self.timeout_s:
            late = [ref.name for ref, ready in zip(self.refs, arrived, strict=True) if not ready]
            raise NoLora(
                f"LoRA {', '.join(late)} did not arrive within {self.timeout_s:g} s; is the LoRA store slow, or down?",
                metadata={"loras": ",".join(late)},
            )
        return False

    def _note_wait(self, waits: bool, now_s: float) -> None:
        """Begin a wait, or end and record it."""
        if waits and self._waiting_since_s is None:
            self._waiting_since_s = now_s
        elif not waits and self._waiting_since_s is not None:
            waited_s = now_s - self._waiting_since_s
            self.wait_s += waited_s
            self._waits.append(
                TracedSpan(name="waiting for LoRAs", track="waits", begin_s=self._waiting_since_s, seconds=waited_s)
            )
            self._waiting_since_s = None


def _unlike_stock(handle: LoraHandle) -> _UnlikeStock:
    components = {name: handle.layers(name) for name in (UNET, *TEXT_ENCODERS)}
    return _UnlikeStock(
        mixed_alphas=any(has_mixed_alphas(layers) for layers in components.values()),
        left_out=tuple(what for name, layers in components.items() for what in left_out_by_stock(name, layers)),
        low_rank=all(is_only_low_rank(layers) for layers in components.values()),
        ignored=handle.ignored,
    )


def _is_ready(handle: LoraHandle) -> bool:
    try:
        return handle.ready
    except BottegaError:  # raised again when the LoRA is needed
        return False


def _pinned_step(decision: bytes, spec: ResolvedSpec) -> int:
    """Return the step that an earlier attempt decided. Raise InvalidRequest if it is not one of the spec's steps."""
    try:
        step = LoraDecision.FromString(decision).step
    except DecodeError:
        raise InvalidRequest(f"decisions[{kinds.LORAS}] is not a LoraDecision") from None
    if not 0 <= step < spec.num_inference_steps:
        field = f"decisions[{kinds.LORAS}].step"
        rules.refuse([Violation(field=field, description="must be the number of one of the request's steps, from 0")])
    return step
