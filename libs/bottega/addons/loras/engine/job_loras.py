"""The LoRAs of one job in an engine: they are requested when it arrives, and all its images use them from one step on.

`LatentMeter` measures how much they change its latents at each step, by denoising its images a second time without
them. The second request is called a shadow. It has the same prompt, encoded with the same text encoders, and the same
seed and sampler. It only lacks the LoRAs in the denoising network, like an image whose LoRAs have not arrived.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from bottega import kinds, rules
from bottega.addons.loras.engine import (
    LoraAtScale,
    LoraHandle,
    LoraRef,
    LoraSet,
    LoraSource,
    WholeLayer,
    is_only_low_rank,
    left_out_by_stock,
    stock_merges_alphas,
)
from bottega.addons.loras.engine.embeddings import TokenVectors
from bottega.addons.loras.engine.lora_set import loras_part
from bottega.addons.loras.wire.module_parts import COMPONENTS, DENOISERS, TEXT_ENCODERS, TOKEN_EMBEDDING
from bottega.device.device import PausableWork, Span
from bottega.engine.addon import JobAddOn
from bottega.engine.encode import Conditions
from bottega.engine.events import EngineRecord
from bottega.engine.job import EngineJob
from bottega.engine.parallel.remote_rows import OffloadedPart
from bottega.engine.request import Request
from bottega.engine.spans import MAX_SPANS, StoreWork, TracedSpan
from bottega.engine.spec import EmbeddingSpec, LoraSpec, ResolvedSpec
from bottega.errors import BottegaError, InvalidRequest, LoraUnusable, NoLora, Violation
from bottega.model.rows import Row
from bottega.v1.generation_pb2 import LoraUse
from bottega.v1.lora_pb2 import LoraDecision

if TYPE_CHECKING:
    from bottega.addons.loras.engine.addon import EngineLoras

# Name of the stage of waiting for LoRAs and of merging them.
LORAS = "loras"


class LatentMeter:
    """The similarities of a job's latents with and without its LoRAs.

    The latents of whichever request is ahead are kept, at most one for each step.

    Args:
        shadows: One for each image, with the image's index. Without shadows, nothing is measured.
    """

    def __init__(self, shadows: Iterable[Request] = ()) -> None:
        self.shadows = tuple(shadows)
        self._ahead: dict[tuple[int, int], Tensor] = {}
        self._cosines: dict[int, list[Tensor]] = {}

    @property
    def done(self) -> bool:
        """Whether all shadows are done; True without shadows."""
        return all(shadow.done for shadow in self.shadows)

    @property
    def similarities(self) -> tuple[float, ...]:
        """Cosine between the latents with and without LoRAs after each step; for several images, the lowest.

        It waits for the device, so read it after the job has ended.
        """
        return tuple(min(float(cosine) for cosine in self._cosines[step]) for step in sorted(self._cosines))

    def observe(self, request: Request) -> None:
        """Record the latent of an image or a shadow after a step."""
        if not (self.shadows and request.between_steps):
            return
        key = (request.index, request.step)
        other = self._ahead.pop(key, None)
        if other is None:
            self._ahead[key] = request.latent  # the next step makes a new tensor
            return
        self._cosines.setdefault(request.step, []).append(_cosine(request.latent, other))


def _cosine(one: Tensor, other: Tensor) -> Tensor:
    """Return the cosine as a scalar on the device; 0 if one of the tensors is zero."""
    one, other = one.flatten().double(), other.flatten().double()
    lengths = torch.linalg.vector_norm(one) * torch.linalg.vector_norm(other)
    return torch.where(lengths > 0, (one @ other) / lengths, 0.0).clamp(-1.0, 1.0)


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
    """The LoRAs as one set of factors; None until they are made, and for a job of embeddings alone."""
    wait_s: float = 0.0
    """Seconds that the job waited for its LoRAs."""
    patch_s: float = 0.0
    """Seconds spent on merging; 0 if the weights already had the LoRAs, or if they were never merged."""
    _text: LoraSet | None = None
    making: PausableWork[LoraSet] | None = None
    """The making of `loras`, which other jobs may share; None before it begins and after it."""
    _uncharged: list[Span] = field(default_factory=list)
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
        self.prepares_prompt = bool(self.specs)

    def ready(self, now_s: float) -> bool:
        """Return whether the layers for the text encoders have arrived. Raise NoLora after the time-out."""
        ready = self._all_arrived([handle.text_ready for handle in self.handles], now_s)
        self._note_wait(not ready, now_s)
        return ready

    def prepare_prompt(self) -> Generator[None, None, None]:
        """Make the factors for the text encoders. Raise LoraUnusable."""
        self._text = yield from self.addon.weights.text_set_in_pieces(self._scaled(TEXT_ENCODERS))

    def take_text_set(self) -> LoraSet | None:
        """Return the factors for the text encoders, and forget them; None if they are not changed."""
        made, self._text = self._text, None
        return made if made is not None and any(made.changes(name) for name in TEXT_ENCODERS) else None

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
        self._requests, self._uncharged = job.requests, job.uncharged
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
        if self._all_arrived([handle.ready for handle in self.handles], now_s) and self._make_loras(now_s):
            self.arrived = True
            if self.step is None:
                self.step = max(request.next_step for request in self._requests)
            for request in self._requests:
                request.loras, request.loras_from = self.loras, self.step
            self.decision = LoraDecision(step=self.step).SerializeToString()
            self._unlike_stock = tuple(
                _unlike_stock(handle, self.addon.pipeline) for handle in self.handles[: len(self.specs)]
            )
            self._release()
        under_way = [request for request in self._requests if not request.done]
        self._note_wait(bool(under_way) and all(map(self.blocks, under_way)), now_s)

    def _make_loras(self, now_s: float) -> bool:
        """Go on with making the factors for the denoising network. Return whether they are made, or there are none."""
        if not self.specs:
            return True
        if self.making is None or self.making.failed:
            self.making = self.addon.making(self._scaled(DENOISERS))
        count = len(self.making.spans)
        try:
            self.addon.go_on(self.making, now_s)
        finally:
            self._uncharged += self.making.spans[count:]
        self.loras = self.making.result
        if self.loras is not None:
            self.making = None
        return self.loras is not None

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

    def report(self, record: EngineRecord) -> None:
        """Add the use of each LoRA to the record, if the LoRAs were used."""
        record.seconds[LORAS] = self.wait_s + self.patch_s
        if self.step is None or not self.arrived:
            return
        rounds = [self.addon.weights.rounds_as_stock(low_rank=unlike.low_rank) for unlike in self._unlike_stock]
        record.provenance.loras.extend(
            LoraUse(
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
        record.provenance.loras.extend(
            LoraUse(
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
        record.exact &= self.step <= record.provenance.begin_step and all(rounds)

    def close(self) -> None:
        """Release the handles and drop the requests."""
        self.addon.embeddings.restore()  # if the prompt could not be encoded
        self._release()
        self.making = self._text = None
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


def _unlike_stock(handle: LoraHandle, pipeline: Any) -> _UnlikeStock:
    components = {name: handle.layers(name) for name in COMPONENTS}
    return _UnlikeStock(
        mixed_alphas=any(stock_merges_alphas(pipeline, layers) for layers in components.values()),
        left_out=tuple(
            what for name, layers in components.items() for what in left_out_by_stock(pipeline, name, layers)
        ),
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
