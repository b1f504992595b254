"""A worker's link to an activation store, for benches: one call at a time."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc

from bottega import kinds
from bottega.addons.edits.wire import messages
from bottega.addons.edits.wire.messages import CHUNK_BYTES, WORKER_LIMITS, ActivationMessage, ActivationMessageKind
from bottega.addons.edits.wire.pieces import SectionChunks
from bottega.addons.edits.wire.section import SectionLayout, owner
from bottega.transport import BytesMessage, Deadline, Incoming, Link, connect, kind_of, offer_from_wire
from bottega.v1.activations_pb2 import (
    RecordingHeader,
    SectionHeader,
    SectionInfo,
    SectionKey,
    SectionRequest,
    TemplateAnswer,
    TemplateQuestion,
)
from bottega.v1.link_pb2 import OpenLinkRequest
from bottega.v1.link_pb2_grpc import LinkServiceStub

MODEL_HASH = "ab" * 32
DTYPE = "float32"
# Of the latent, 8 by 8; all of the template is recorded.
_SIDE = 8
_WHOLE_MAP = b"\xff" * (_SIDE * _SIDE // 8)
_CALL_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateShape:
    """The size of every template of a bench."""

    sections: int
    tensors: int
    """Tensors of a section."""
    elements: int
    """Elements of a tensor, of float16."""

    @property
    def layout(self) -> SectionLayout:
        """The layout of each section."""
        return SectionLayout.of((f"blocks.{number}", (1, self.elements)) for number in range(self.tensors))

    @property
    def size_bytes(self) -> int:
        """Bytes of a template."""
        return self.sections * self.layout.size_bytes

    def headers(self, key: str) -> list[SectionHeader]:
        """Return headers of its sections, each a half of a timestep."""
        return [
            SectionHeader(
                recording=key[:32],
                key=key,
                section=SectionKey(timestep=float(number // 2), noise_level=1.0, half=number % 2),
                prompt="",
                map=_WHOLE_MAP,
                latent_height=_SIDE,
                latent_width=_SIDE,
            )
            for number in range(self.sections)
        ]

    def tensors_of(self, seed: str) -> list[bytes]:
        """Return the tensors of one section: noise."""
        chance = random.Random(seed)
        return [chance.randbytes(2 * self.elements) for _ in range(self.tensors)]


def key_of(number: int) -> str:
    """Return 64 hex digits by which a template is found."""
    return hashlib.sha256(f"template {number}".encode()).hexdigest()


def question_of(key: str) -> TemplateQuestion:
    """Return the question of an edit that would record."""
    return TemplateQuestion(key=key, would_record=True, source=key, model_hash=MODEL_HASH, dtype=DTYPE)


def recording_of(key: str) -> RecordingHeader:
    """Return the end of a template's recording, whose edits draw noise of their own."""
    return RecordingHeader(
        recording=key[:32],
        key=key,
        source=key,
        digest=key,
        model="bench",
        model_hash=MODEL_HASH,
        dtype=DTYPE,
        width=8 * _SIDE,
        height=8 * _SIDE,
        latent_height=_SIDE,
        latent_width=_SIDE,
    )


class DamagedSection(Exception):
    """A section's bytes are not those of its digest."""


class TemplateClient:
    """A link to the store at an address; use it in a `with` block."""

    def __init__(self, address: str) -> None:
        with grpc.insecure_channel(address) as channel:
            stub: LinkServiceStub = LinkServiceStub(channel)
            request = OpenLinkRequest(kind=kinds.ACTIVATIONS, worker="bench")
            offer = offer_from_wire(stub.OpenLink(request, timeout=_CALL_S).offer)
        self._link: Link = connect(offer, Deadline.after(_CALL_S), limits=WORKER_LIMITS)
        self._number = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._link.close()

    def ask(self, key: str) -> TemplateAnswer:
        """Return what the store has of a template."""
        self._number += 1
        self._send(messages.question_message(self._number, question_of(key)))
        with self._receive(ActivationMessageKind.ANSWER) as incoming:
            _, answer = messages.read_answer(incoming.layout, _views(incoming))
        return answer

    def record(self, key: str, shape: TemplateShape) -> None:
        """Record all of a template."""
        layout = shape.layout
        for number, header in enumerate(shape.headers(key)):
            self._send(messages.section_message(number, header, layout))
            chunks = SectionChunks(number, layout, shape.tensors_of(f"{key} {number}"))
            while not chunks.done:
                chunks.send(self._link, CHUNK_BYTES)
        self._send(messages.recording_message(recording_of(key), None))

    def fetch(self, section: SectionInfo, layout: SectionLayout, key: str) -> float:
        """Return the seconds until all of a section can be read here; then check its digest.

        Raises DamagedSection, and RuntimeError where it is refused.
        """
        self._number += 1
        request = SectionRequest(digest=section.digest)
        began_s = time.perf_counter()
        self._send(messages.fetch_message(self._number, request))
        got = bytearray(layout.size_bytes)
        left = layout.tensor_bytes
        whole: memoryview | None = None
        while left:
            with self._receive(ActivationMessageKind.WHOLE, ActivationMessageKind.CHUNK) as incoming:
                if kind_of(incoming.layout) == ActivationMessageKind.WHOLE:
                    whole, left = incoming.file, 0
                else:
                    views = _views(incoming)
                    _, chunk = messages.read_chunk(incoming.layout, views)
                    first = layout.offsets[chunk.tensor] + chunk.start
                    got[first : first + len(views[-1])] = views[-1]
                    left -= len(views[-1])
        seconds = time.perf_counter() - began_s
        if whole is None:
            got[layout.size_bytes - len(owner(key)) :] = owner(key)
        if hashlib.sha256(got if whole is None else whole).hexdigest() != section.digest:
            raise DamagedSection(section.digest)
        return seconds

    def _send(self, message: ActivationMessage | BytesMessage) -> None:
        self._link.send(message.layout, message.buffers, Deadline.after(_CALL_S))

    def _receive(self, *kinds: ActivationMessageKind) -> Incoming:
        """Return the next message, whole; of one of these kinds."""
        incoming = self._link.recv(Deadline.after(_CALL_S))
        incoming.wait_all(Deadline.after(_CALL_S))
        if ActivationMessageKind(kind_of(incoming.layout)) not in kinds:
            raise RuntimeError(f"the store has answered {kind_of(incoming.layout)}")
        return incoming


def _views(incoming: Incoming) -> Sequence[memoryview]:
    return [incoming.view(index) for index in range(len(incoming.layout.specs))]


def layouts_of(answer: TemplateAnswer) -> Mapping[int, SectionLayout]:
    """Return layouts by their places in the answer."""
    return {place: SectionLayout.from_wire(layout) for place, layout in enumerate(answer.layouts)}
