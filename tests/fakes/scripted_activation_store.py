"""An activation store at the end of real links whose every answer is the test's; its sections lie in its memory."""

from __future__ import annotations

import contextlib
import hashlib
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bottega.addons.edits.wire import DrawnTensors, SectionLayout, messages
from bottega.addons.edits.wire.messages import ActivationMessage, ActivationMessageKind
from bottega.addons.edits.wire.pieces import SectionPieces
from bottega.addons.edits.wire.section import owner
from bottega.errors import BottegaError, DataLoss
from bottega.rpc.status import job_error_to_json
from bottega.transport import (
    Connection,
    Endpoints,
    Incoming,
    Link,
    LinkHandler,
    LinkServer,
    LinkServerSettings,
    Offer,
    WholeMessage,
    kind_of,
    read_number,
)
from bottega.v1.activations_pb2 import (
    AbandonHeader,
    ChunkHeader,
    RecordingHeader,
    SectionHeader,
    SectionInfo,
    SectionKey,
    SectionRequest,
    TemplateAnswer,
    TemplateQuestion,
)
from bottega.v1.fleet_pb2 import ServiceAddress
from bottega.v1.trace_pb2 import StoreTimes
from load.bench.throttle import Throttle
from tests.support.transport_backends import sealed_file

Reply = Callable[[int, TemplateQuestion], WholeMessage | None]
CHUNK_BYTES = 256


def chunk_message(
    number: int, *, tensor: int, start: int, data: bytes, times: StoreTimes | None = None
) -> ActivationMessage:
    """A chunk of a section with these bytes of one tensor, as a store writes it in place."""
    header = messages.chunk_header(number, tensor=tensor, start=start, times=times)
    return ActivationMessage(layout=messages.chunk_layout(len(data)), buffers=(*header, data))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Section:
    """One that the store has. tensors: by name, float16."""

    key: SectionKey
    tensors: Mapping[str, Tensor]
    template: str
    valid: Tensor
    prompt: str = ""

    @property
    def layout(self) -> SectionLayout:
        return SectionLayout.of((name, tensor.shape) for name, tensor in self.tensors.items())

    @property
    def data(self) -> bytes:
        made = bytearray(self.layout.size_bytes)
        for name, tensor in self.tensors.items():
            offset, size_bytes = self.layout.place(name)
            made[offset : offset + size_bytes] = tensor.numpy().tobytes()
        said = owner(self.template)
        made[-len(said) :] = said
        return bytes(made)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sent:
    """What a worker has sent to be recorded. tensors: of a section. drawn: of an end."""

    header: SectionHeader | RecordingHeader | AbandonHeader
    tensors: Mapping[str, Tensor]
    drawn: DrawnTensors | None = None


class _Coming:
    """A section of which chunks come."""

    def __init__(self, number: int, header: SectionHeader, layout: SectionLayout) -> None:
        self.number = number
        self.header = header
        self.pieces = SectionPieces(layout)
        self.data = [bytearray() for _ in layout.tensors]
        self._layout = layout

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {
            tensor.name: torch.frombuffer(data, dtype=torch.float16).reshape(tensor.shape)
            for tensor, data in zip(self._layout.tensors, self.data, strict=True)
        }


class ScriptedLink(LinkHandler):
    """One worker's."""

    def __init__(self, store: ScriptedStore, connection: Connection) -> None:
        self.connection = connection
        self._store = store
        self._coming: _Coming | None = None

    def on_message(self, connection: Connection, incoming: Incoming) -> None:
        layout, store = incoming.layout, self._store
        with incoming:
            views = connection.wait_all(incoming)
            match ActivationMessageKind(kind_of(layout)):
                case ActivationMessageKind.QUESTION:
                    number, question = messages.read_question(layout, views)
                    store.questions.put(question)
                    reply = store.reply(number, question)
                    if reply is not None:
                        connection.send(reply)
                case ActivationMessageKind.FETCH:
                    store.serve(self, *messages.read_fetch(layout, views))
                case ActivationMessageKind.CANCEL:
                    store.cancelled.put(read_number(layout, views))
                case ActivationMessageKind.SECTION:
                    self._coming = _Coming(*messages.read_section(layout, views))
                case ActivationMessageKind.CHUNK:
                    self._take(*messages.read_chunk(layout, views), views[-1])
                case ActivationMessageKind.RECORDING:
                    header = messages.read_recording(layout, views)
                    drawn = messages.read_drawn(layout, views, has_drawn=header.has_drawn)
                    store.sent.put(Sent(header=header, tensors={}, drawn=drawn))
                case ActivationMessageKind.ABANDON:
                    store.sent.put(Sent(header=messages.read_abandon(layout, views), tensors={}))

    def _take(self, number: int, chunk: ChunkHeader, data: memoryview) -> None:
        """Chunks of a section come in their order; when all have, it was sent."""
        coming = self._coming
        assert coming is not None
        assert (coming.number, coming.pieces.first) == (number, (chunk.tensor, chunk.start))
        self._store.chunks.put(len(data))
        for piece in coming.pieces.take(len(data)):
            coming.data[piece.tensor] += data[: piece.size_bytes]
            data = data[piece.size_bytes :]
        assert not data, "more than the section has"
        if coming.pieces.done:
            self._store.sent.put(Sent(header=coming.header, tensors=coming.tensors))
            self._coming = None

    def on_end(self, cause: BottegaError) -> None:
        self._store.ends.put(cause)


class ScriptedStore(LinkServer[ScriptedLink]):
    """reply: to each question; None says nothing. fetched: what it does with a request; by default it sends what is
    wanted. folder: for a socket, by which workers are given files; without one they are sent chunks. ends: why links
    have ended. chunks: bytes of each that a worker has sent. relay: between workers and it, from the next link on."""

    def __init__(self, name: str, *, folder: Path | None = None) -> None:
        self.name = name
        self.sections: dict[str, Section] = {}
        self.reply: Reply = self.answer
        self.fetched: Callable[[ScriptedLink, int, SectionRequest], None] = self.send
        self.questions: queue.SimpleQueue[TemplateQuestion] = queue.SimpleQueue()
        self.requests: queue.SimpleQueue[SectionRequest] = queue.SimpleQueue()
        self.cancelled: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.sent: queue.SimpleQueue[Sent] = queue.SimpleQueue()
        self.chunks: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.relay: Throttle | None = None
        self.ends: queue.SimpleQueue[BottegaError] = queue.SimpleQueue()
        self.header = TemplateAnswer(record=True)
        self.drawn: DrawnTensors | None = None
        unix = None if folder is None else folder / f"{name}.sock"
        endpoints = Endpoints(unix_path=unix) if unix is not None else Endpoints(tcp=("127.0.0.1", 0))
        super().__init__(endpoints, service=name, settings=LinkServerSettings(limits=messages.STORE_LIMITS))

    def offer(self, worker: str, link_id: str, *, caller: str) -> Offer:
        made = super().offer(worker, link_id, caller=caller)
        if self.relay is None:
            return made
        assert made.tcp is not None
        self.relay.target = made.tcp.port
        return replace(made, tcp=replace(made.tcp, port=self.relay.port))

    @property
    def address(self) -> ServiceAddress:
        """As the fleet tells of it."""
        return ServiceAddress(name=self.name, address=self.name)

    def put(self, recording: str, *sections: Section, drawn: DrawnTensors | None = None, **fields: object) -> None:
        """From now on it answers with these. fields: of the answer."""
        self.sections = {section.digest: section for section in sections}
        self.header, self.drawn = answer(recording, sections, drawn, **fields), drawn

    def answer(self, number: int, _question: TemplateQuestion) -> WholeMessage:
        return messages.answer_message(number, self.header, self.drawn)

    def serve(self, link: ScriptedLink, number: int, request: SectionRequest) -> None:
        self.requests.put(request)
        self.fetched(link, number, request)

    def send(self, link: ScriptedLink, number: int, request: SectionRequest) -> None:
        section = self.sections.get(request.digest)
        if section is None:
            self.refuse(link, number, request)
            return
        assert link.connection.link is not None
        if link.connection.link.passes_files:
            self.send_file(link, number, section.data)
        else:
            for place in request.tensors:
                self.send_tensor(link, number, section, place)

    def refuse(self, link: ScriptedLink, number: int, _request: SectionRequest) -> None:
        link.connection.send(messages.refused_message(number, job_error_to_json(DataLoss("it is damaged"))))

    def send_tensor(self, link: ScriptedLink, number: int, section: Section, place: int) -> None:
        data = list(section.tensors.values())[place].numpy().tobytes()
        for start in range(0, len(data), CHUNK_BYTES):
            chunk = chunk_message(number, tensor=place, start=start, data=data[start : start + CHUNK_BYTES])
            link.connection.send(chunk)

    def send_file(self, link: ScriptedLink, number: int, data: bytes) -> None:
        """Whole, in the store's own memory."""

        def send(to: Link) -> None:
            with sealed_file(data) as file:
                link.connection.send_now(to, messages.whole_message(number, StoreTimes()), file=file)

        link.connection.post(send)

    def say(self, message: WholeMessage) -> None:
        (link,) = self.handlers
        link.connection.send(message)

    def new_handler(self, connection: Connection) -> ScriptedLink:
        return ScriptedLink(self, connection)


def answer(
    recording: str, sections: Sequence[Section], drawn: DrawnTensors | None = None, **fields: object
) -> TemplateAnswer:
    """As a store makes it; each section has a layout and a map of its own."""
    height, width = sections[0].valid.shape
    made = TemplateAnswer(
        recording=recording,
        latent_height=height,
        latent_width=width,
        sections=[
            SectionInfo(key=each.key, digest=each.digest, layout=place, map=place, prompt=each.prompt)
            for place, each in enumerate(sections)
        ],
        layouts=[each.layout.to_wire() for each in sections],
        maps=[np.packbits(each.valid.numpy()).tobytes() for each in sections],
        has_drawn=drawn is not None,
    )
    made.MergeFrom(TemplateAnswer(**fields))  # type: ignore[arg-type]  # a test's own
    return made


@contextlib.contextmanager
def closing(*stores: ScriptedStore) -> Iterator[None]:
    """They are closed in the end."""
    try:
        yield
    finally:
        for store in stores:
            store.close()
