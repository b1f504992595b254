"""The connection of a worker's engine to one approximate cache: sends queries and recordings, and receives responses.

The connection is opened as soon as the cache is known, so that the first query finds it open, and again after a loss.
LatentStores keeps the queries and recordings. Tensors are converted to messages and back here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bottega import kinds
from bottega.addons.cache import wire
from bottega.addons.cache.engine import JobRecording, LatentQuestion, LatentReply
from bottega.addons.cache.engine.recorder import latents_in_order
from bottega.addons.cache.wire import CacheMessageKind, starts_message
from bottega.addons.interface.store_link import StoreLink
from bottega.device_links.tensor_messages import DTYPES, tensor_at
from bottega.engine.spec import ResolvedSpec
from bottega.errors import BottegaError, NoSharedMemory, TooLarge
from bottega.model.schedulers import KARRAS
from bottega.rules import LAST_SIGMAS, SPACINGS
from bottega.store_times import check_times
from bottega.transport import (
    Connection,
    Incoming,
    Layout,
    Limits,
    Link,
    LinkClientSettings,
    LinkCounters,
    OfferSource,
    kind_of,
)
from bottega.v1 import generation_pb2
from bottega.v1.cache_pb2 import CacheAnswer, CacheRecording, CacheStarts
from bottega.v1.fleet_pb2 import ServiceAddress

if TYPE_CHECKING:
    from bottega.addons.cache.worker.addon import LatentStores

_log = logging.getLogger(__name__)

# The largest answer: eight latents of an image of 4096 x 4096 pixels are 8 MiB in single precision.
_ANSWER_BYTES = 64 << 20
_SLOTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLinkSettings(LinkClientSettings):
    """The settings of a connection that receives responses of a cache."""

    limits: Limits = field(default_factory=lambda: Limits(slots=_SLOTS, slot_bytes=_ANSWER_BYTES))
    retry_s: float = 1.0


class CacheStoreLink(StoreLink):
    """A connection to one cache. Any thread may call it."""

    def __init__(
        self,
        store: ServiceAddress,
        *,
        owner: LatentStores,
        offers: OfferSource,
        settings: CacheLinkSettings,
        counters: LinkCounters,
    ) -> None:
        self._owner = owner
        self._records = False
        super().__init__(
            store, kind=kinds.CACHE, title="an approximate cache", offers=offers, settings=settings, counters=counters
        )
        self.start()

    def ask(self, number: int, question: LatentQuestion) -> bool:
        """Send a query. Return False if the connection is not open."""
        connection = self._connection
        return connection is not None and connection.send(question_of(number, question))

    def report(self, starts: CacheStarts) -> None:
        """Report how many steps latents of this cache have saved. Do nothing if the connection is not open."""
        connection = self._connection
        if connection is not None:
            connection.send(starts_message(starts))

    def record(self) -> None:
        """Send recordings when no query is pending. Do nothing if the connection is not open."""
        connection = self._connection
        if connection is not None:
            connection.post(self._begin_recording)

    def on_open(self, connection: Connection) -> None:
        super().on_open(connection)
        self._owner.on_link(self)

    def on_message(self, connection: Connection, incoming: Incoming) -> None:
        with incoming:
            if kind_of(incoming.layout) != CacheMessageKind.ANSWER:
                raise ValueError(f"a cache must not send a {kind_of(incoming.layout)[:40]} message")
            number, answer = answer_of(incoming.layout, connection.wait_all(incoming))
        self._owner.on_answer(self, number, answer)

    def on_end(self, cause: BottegaError) -> None:
        super().on_end(cause)
        self._owner.on_lost(self)

    @property
    def idle_s(self) -> float | None:
        """0 while recordings wait to be sent, after any queries; None otherwise."""
        return 0.0 if self._records else None

    def send_idle(self, link: Link) -> None:
        recording = self._owner.next_recording(self)
        self._records = recording is not None
        connection = self._connection
        if recording is None or connection is None:
            return
        try:
            connection.send_now(link, recording)
        except (NoSharedMemory, TooLarge) as error:  # nothing was sent, and the link goes on
            _log.warning("latents are not recorded", extra={"service": self.store.name, "text": error.message})

    def _begin_recording(self, _link: Link) -> None:
        self._records = True


_HEADER_SPECS = 2


def question_of(number: int, question: LatentQuestion) -> wire.CacheMessage:
    """Return the message of a query."""
    return wire.question_message(number, question.header, _bytes(question.embedding))


def answer_of(layout: Layout, views: Sequence[memoryview]) -> tuple[int, LatentReply]:
    """Return the number of the query, and a copy of the response. Raise ValueError if the message breaks a rule."""
    number, header = wire.read_header(layout, views, CacheAnswer)
    check_times(header.times)
    wire.check_latents(layout, _HEADER_SPECS, len(header.hits))
    latents = [tensor_at(layout, views, index).clone() for index in range(_HEADER_SPECS, len(layout.specs))]
    return number, LatentReply(header=header, latents=tuple(latents))


def recording_of(recording: JobRecording, *, model_name: str) -> wire.CacheMessage:
    """Return the message of a recording.

    This waits for the device and scales down the image, so it must not be called in the engine's thread.
    """
    latents = latents_in_order(recording)
    picture = recording.small_picture()
    height, width, _ = picture.shape
    return wire.recording_message(
        CacheRecording(
            key=recording.key,
            plain_key=recording.plain_key,
            model_hash=recording.model_hash,
            parameters=parameters_of(recording.spec, model_name=model_name),
            steps=[step for step, _ in latents],
        ),
        embedding=_bytes(recording.embedding),
        picture=(wire.picture_spec(height, width), _bytes(picture)),
        latents=[
            (wire.latent_spec(place, DTYPES[latent.dtype], tuple(latent.shape)), _bytes(latent))
            for place, (_, latent) in enumerate(latents)
        ],
    )


def parameters_of(spec: ResolvedSpec, *, model_name: str) -> generation_pb2.GenerationSpec:
    """Return the spec of an image for display, without input images."""
    pb = generation_pb2
    return pb.GenerationSpec(
        model=model_name,
        prompt=spec.prompt,
        negative_prompt=spec.negative_prompt,
        negative_prompt_2=spec.negative_prompt_2,
        clip_skip=spec.clip_skip,
        max_sequence_length=spec.max_sequence_length,
        num_inference_steps=spec.num_inference_steps,
        guidance_scale=spec.guidance_scale,
        guidance_rescale=spec.guidance_rescale,
        true_cfg_scale=spec.true_cfg_scale if spec.true_cfg_scale > 1.0 else None,
        cfg_normalization=spec.cfg_normalization or None,
        cfg_truncation=spec.cfg_truncation if spec.cfg_truncation < 1.0 else None,
        width=spec.width,
        height=spec.height,
        seed=spec.seed,
        num_images=spec.num_images,
        sampler=pb.Sampler.Value(f"SAMPLER_{spec.sampler.name}"),
        use_karras_sigmas=spec.use_karras_sigmas if spec.sampler in KARRAS else None,
        use_exponential_sigmas=spec.schedule.use_exponential_sigmas,
        use_beta_sigmas=spec.schedule.use_beta_sigmas,
        timestep_spacing=SPACINGS[spacing]
        if (spacing := spec.schedule.timestep_spacing)
        else pb.TIMESTEP_SPACING_UNSPECIFIED,
        final_sigmas_type=LAST_SIGMAS[last]
        if (last := spec.schedule.final_sigmas_type)
        else pb.FINAL_SIGMAS_TYPE_UNSPECIFIED,
        loras=[
            *(pb.Lora(name=lora.name, digest=lora.digest, scale=lora.scale) for lora in spec.loras),
            *(pb.Lora(name=each.name, digest=each.digest, scale=1.0, token=each.token) for each in spec.embeddings),
        ],
        controlnets=[
            pb.ControlNet(
                name=control.name,
                controlnet_conditioning_scale=control.controlnet_conditioning_scale,
                control_guidance_start=control.control_guidance_start,
                control_guidance_end=control.control_guidance_end,
                guess_mode=control.guess_mode,
                control_mode="" if control.control_mode is None else str(control.control_mode),
            )
            for control in spec.controlnets
        ],
    )


def _bytes(tensor: Tensor) -> memoryview:
    data: memoryview = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return data
