"""The add-ons of a worker without text encoders or without a VAE decoder: stage workers encode or decode for it.

The engine needs nothing else for it: a job waits for its conditions as for other data of add-ons, and an add-on may
decode a finished image elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from bottega import kinds
from bottega.device.device import Span
from bottega.engine.addon import EngineAddOn, EngineAddOnContext, JobAddOn, add_counts
from bottega.engine.encode import Conditions
from bottega.engine.errors import not_finite, vae_not_finite
from bottega.engine.job import EngineJob, EngineOrder
from bottega.engine.request import Request
from bottega.engine.results import ImageDecoding
from bottega.engine.spans import TracedSpan
from bottega.errors import InternalError
from bottega.model.model import Model
from bottega.model.vae import DecodedAs
from bottega.model.weights import DTYPES
from bottega.v1.engine_pb2 import EngineBeat
from bottega.v1.fleet_pb2 import ServiceAddress
from bottega.worker.stages.client import StageCall, StageClient
from bottega.worker.stages.messages import DecodedPixels, EncodedPrompts, decode_message, encode_message

# How long an idle engine waits for an image that is decoded elsewhere. It is short because commands are read between
# turns.
_PAUSE_S = 0.05


def stage_addons(kinds_elsewhere: Sequence[str], context: EngineAddOnContext) -> Iterator[EngineAddOn]:
    """Yield the add-ons for the stages that other workers compute."""
    for kind in kinds_elsewhere:
        yield RemoteEncoding(context) if kind == kinds.ENCODE else RemoteDecoders(context)


def terms_of(model: Model) -> dict[str, str]:
    """Return what a worker and its stage workers must have in common: the weights and their data type."""
    return {"model_hash": model.digest, "dtype": model.dtype_name}


class _StageAddOn(EngineAddOn):
    """The part that both add-ons have in common: the connections to the stage workers."""

    def __init__(self, context: EngineAddOnContext) -> None:
        self.model = context.model
        self.client = StageClient(
            self.kind, offers=context.offers, counters=context.counters, terms=terms_of(context.model)
        )

    def set_services(self, services: Sequence[ServiceAddress]) -> None:
        self.client.set_services(services)

    def fill_beat(self, beat: EngineBeat) -> None:
        beat.links.open += self.client.linked
        add_counts(beat, self.kind, {"answered": self.client.answered, "lost": self.client.lost})


class RemoteEncoding(_StageAddOn):
    """The add-on of a worker without text encoders. Requests are made when jobs are submitted."""

    kind: ClassVar[str] = kinds.ENCODE

    def open(self, order: EngineOrder) -> JobAddOn:
        """Ask for the conditions of a job.

        Raises:
            InternalError: The gateway sent a job that needs the text encoders in this process.
        """
        spec = order.spec
        if spec.embeddings or spec.edit is not None or not all(lora.denoiser_only for lora in spec.loras):
            raise InternalError(
                "a job with LoRAs of text encoders, embeddings or a mask came to a worker without text encoders"
            )
        return RemoteConditions(self, self.client.call(lambda number: encode_message(number, spec, order.share)))

    def wait(self, parts: Sequence[JobAddOn], timeout_s: float) -> None:
        self.client.wait([part.call for part in parts if isinstance(part, RemoteConditions)], timeout_s)


class RemoteConditions(JobAddOn):
    """The conditions of one job, which another worker encodes."""

    def __init__(self, addon: RemoteEncoding, call: StageCall) -> None:
        self._addon = addon
        self.call = call
        self._asked_s, self._answered_s = time.monotonic(), 0.0

    def ready(self, now_s: float) -> bool:
        if self.conditions is None and self._addon.client.check(self.call):
            assert isinstance(self.call.answer, EncodedPrompts), "it answers a request to encode"
            self._answered_s = time.monotonic()
            self.conditions = _conditions(self.call.answer, self._addon.model)
        return self.conditions is not None

    def attach(self, job: EngineJob, conditions: Conditions, now_s: float) -> None:
        assert self.call.answer is not None, "it was ready"
        job.note_elsewhere("encode", self.call.answer.seconds)

    def spans(self) -> Iterable[TracedSpan]:
        if self.call.answer is None:
            return ()
        took_s = self._answered_s - self._asked_s
        return [_span("encode", kinds.ENCODE, self._asked_s, took_s, self.call.worker)]

    def close(self) -> None:
        self._addon.client.drop(self.call)


class RemoteDecoders(_StageAddOn):
    """The add-on of a worker without a VAE decoder."""

    kind: ClassVar[str] = kinds.DECODE

    def open(self, order: EngineOrder) -> JobAddOn:
        """Return the part of a job, which asks nothing before an image is finished."""
        return RemoteDecodings(self)


class RemoteDecodings(JobAddOn):
    """The images of one job, which other workers decode."""

    def __init__(self, addon: RemoteDecoders) -> None:
        self._addon = addon
        self._job: EngineJob | None = None
        self._decodings: list[RemoteDecoding] = []

    def attach(self, job: EngineJob, conditions: Conditions, now_s: float) -> None:
        self._job = job

    def decode(self, request: Request) -> ImageDecoding:
        assert self._job is not None, "its images are finished"
        decoding = RemoteDecoding(self._addon.client, self._job, request)
        self._decodings.append(decoding)
        return decoding

    def spans(self) -> Iterable[TracedSpan]:
        return [decoding.span for decoding in self._decodings if decoding.call.answer is not None]

    def close(self) -> None:
        for decoding in self._decodings:
            self._addon.client.drop(decoding.call)


class RemoteDecoding:
    """The decoding of a finished image of a job by another worker."""

    def __init__(self, client: StageClient, job: EngineJob, request: Request) -> None:
        self.job = job
        self.request = request
        latent = request.latent
        self.call = client.call(lambda number: decode_message(number, latent, job.order.share))
        self.elsewhere, self.paused, self.area = True, False, 0
        self.spans: Sequence[Span] = ()
        self._client = client
        self._latent_finite = bool(torch.isfinite(latent).all())
        self._asked_s, self._answered_s = time.monotonic(), 0.0

    @property
    def ready(self) -> bool:
        """Whether it was decoded, or never will be."""
        try:
            is_ready = self._client.check(self.call)
        except Exception:  # noqa: BLE001 - `take` raises it again, and the job fails
            is_ready = True
        if is_ready and not self._answered_s:
            self._answered_s = time.monotonic()
        return is_ready

    @property
    def seconds(self) -> float:
        """Seconds that the other worker has decoded."""
        return self._decoded().seconds

    @property
    def how(self) -> DecodedAs:
        """How the latent was decoded."""
        return self._decoded().how

    @property
    def span(self) -> TracedSpan:
        """Its time, from the request to the answer."""
        took_s = max(0.0, self._answered_s - self._asked_s)
        name = f"decode image {self.request.index}"
        return _span(name, kinds.DECODE, self._asked_s, took_s, self.call.worker)

    def enqueue(self, pause_due: Callable[[], bool] = lambda: False) -> None:
        """Do nothing, because the request was sent when the decoding began."""

    def wait(self) -> None:
        """Wait for the answer, for a moment."""
        self._client.wait([self.call], _PAUSE_S)

    def take(self) -> Tensor:
        """Return the pixels. Raise BottegaError if there are none."""
        spec = self.job.order.spec
        if not self._latent_finite:
            raise not_finite(spec.loras, spec.controlnets)
        decoded = self._decoded()
        if not decoded.finite:
            raise vae_not_finite("decoded a latent", DTYPES[decoded.how.dtype])
        if decoded.pixels.shape != (spec.height, spec.width, 3):
            raise InternalError(f"worker {self.call.worker} decoded an image to another size")
        return decoded.pixels

    def _decoded(self) -> DecodedPixels:
        self._client.check(self.call)
        assert isinstance(self.call.answer, DecodedPixels), "it answers a request to decode"
        return self.call.answer


def _conditions(encoded: EncodedPrompts, model: Model) -> Sequence[Conditions]:
    known: dict[int, Conditions] = {}
    for prompt in encoded.images:
        if id(prompt) not in known:
            known[id(prompt)] = prompt.conditions(model)
    return [known[id(prompt)] for prompt in encoded.images]


def _span(name: str, track: str, begin_s: float, seconds: float, worker: str) -> TracedSpan:
    return TracedSpan(name=name, track=track, begin_s=begin_s, seconds=seconds, service=worker)
