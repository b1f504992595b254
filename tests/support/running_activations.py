"""An activation store on a real gRPC server in the test's own event loop, and workers' links to it: what they record,
ask for and fetch. What a template's sections hold follows from its seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from bottega import kinds
from bottega.activations.__main__ import build
from bottega.activations.config import ActivationsConfig
from bottega.activations.server import ActivationServer
from bottega.addons.edits.wire import DrawnTensors, SectionLayout, messages
from bottega.addons.edits.wire.messages import CHUNK_BYTES, WORKER_LIMITS, ActivationMessageKind
from bottega.addons.edits.wire.pieces import SectionChunks
from bottega.errors import BottegaError
from bottega.rpc.channel import open_channel
from bottega.rpc.server import Server
from bottega.rpc.server_config import LimitedLinksConfig, ServerConfig
from bottega.rpc.status import from_job_error
from bottega.transport import Deadline, Limits, Link, WholeMessage, connect, kind_of, offer_from_wire, read_number
from bottega.v1 import activations_pb2 as pb
from bottega.v1 import activations_pb2_grpc, link_pb2_grpc
from bottega.v1.error_pb2 import JobError
from bottega.v1.link_pb2 import LinkOffer, OpenLinkRequest
from tests.support.running_gateway import Running as RunningGateway
from tests.support.waiting import eventually

PATIENCE_S = 20.0
MODEL_HASH = "ab" * 32
HEIGHT, WIDTH = 6, 8
"""Of latents."""

SMALL = SectionLayout.of((f"down_blocks.0.{number}", (1, 8, 16)) for number in range(3))
"""A section that is sent, within a host, too: it is not worth mapping."""

LARGE = SectionLayout.of((f"down_blocks.0.{number}", (1, 256, 256)) for number in range(3))
"""One that workers of the same host map."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A template as its worker records it. seed: what its tensors follow from, and its names, where not said."""

    seed: int = 0
    steps: int = 2
    layout: SectionLayout = SMALL
    id: str = ""
    key: str = ""
    source: str = ""
    drawn: bool = True

    def __post_init__(self) -> None:
        named = hashlib.sha256(str(self.seed).encode()).hexdigest()
        object.__setattr__(self, "id", self.id or named[:32])
        object.__setattr__(self, "key", self.key or named)
        object.__setattr__(self, "source", self.source or named[::-1])

    @property
    def keys(self) -> list[pb.SectionKey]:
        """Of its sections, as its steps use them."""
        timesteps = [900.0 - 10 * step for step in range(self.steps)]
        return [
            pb.SectionKey(timestep=timestep, noise_level=2.0 ** (timestep / 100), half=half)
            for timestep in timesteps
            for half in (0, 1)
        ]

    @property
    def map(self) -> bytes:
        return b"\xff" * (HEIGHT * WIDTH // 8)

    def tensors(self, place: int) -> list[bytes]:
        """Of the section in that place."""
        chance = random.Random(f"{self.key} {self.seed} {place}")
        return [chance.randbytes(tensor.size_bytes) for tensor in self.layout.tensors]

    def drawn_tensors(self) -> DrawnTensors | None:
        if not self.drawn:
            return None
        chance, size = random.Random(self.seed), 4 * HEIGHT * WIDTH * 4
        return DrawnTensors(
            shape=(1, 4, HEIGHT, WIDTH), image_latent=chance.randbytes(size), noise=chance.randbytes(size)
        )

    def question(self, **fields: Any) -> pb.TemplateQuestion:
        asked = {"key": self.key, "source": self.source, "model_hash": MODEL_HASH, "dtype": "float32"}
        return pb.TemplateQuestion(**{**asked, **fields})

    def section(self, place: int, **fields: Any) -> pb.SectionHeader:
        """Of the section in that place."""
        said: dict[str, Any] = {"recording": self.id, "key": self.key, "section": self.keys[place], "prompt": "0f" * 32}
        said |= {"map": self.map, "latent_height": HEIGHT, "latent_width": WIDTH}
        return pb.SectionHeader(**{**said, **fields})

    def header(self, **fields: Any) -> pb.RecordingHeader:
        said: dict[str, Any] = {"recording": self.id, "key": self.key, "source": self.source, "digest": self.key}
        said |= {"model": "miniature", "model_hash": MODEL_HASH, "dtype": "float32", "seed": self.seed}
        said |= {"width": WIDTH * 8, "height": HEIGHT * 8, "latent_height": HEIGHT, "latent_width": WIDTH}
        return pb.RecordingHeader(**{**said, "has_drawn": self.drawn, **fields})


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a store has answered."""

    header: pb.TemplateAnswer
    drawn: DrawnTensors | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A section as it came. shared: whether its memory was given; else `tensors` has what was asked for, by place."""

    shared: bool
    tensors: dict[int, bytes]
    order: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A store that serves, and stubs to call it."""

    server: Server
    activations: ActivationServer
    stub: activations_pb2_grpc.ActivationServiceAsyncStub
    links: link_pb2_grpc.LinkServiceAsyncStub

    async def call(self, method: str, **fields: Any) -> Any:
        """What ActivationService answers to a request of these fields."""
        request = getattr(pb, f"{method}Request")(**fields)
        return await getattr(self.stub, method)(request, timeout=PATIENCE_S)

    async def templates(self) -> list[pb.Template]:
        return list((await self.call("ListStoredTemplates", limit=1000)).templates)

    async def open_link(self, worker: str = "w") -> LinkOffer:
        request = OpenLinkRequest(kind=kinds.ACTIVATIONS, worker=worker)
        return (await self.links.OpenLink(request, timeout=PATIENCE_S)).offer

    async def link(self, worker: str = "w", *, limits: Limits = WORKER_LIMITS) -> Link:
        offer = offer_from_wire(await self.open_link(worker))
        return await asyncio.to_thread(connect, offer, Deadline.after(PATIENCE_S), limits=limits)

    async def fill(self, *templates: Recorded) -> None:
        """Has it record these; returns when they are there."""
        with await self.link("recorder") as link:
            for template in templates:
                await asyncio.to_thread(record_template, link, template)
            ids = {template.id for template in templates}

            async def are_there() -> bool:
                return ids <= {template.id for template in await self.templates()}

            await eventually(are_there)


def config(**overrides: object) -> ActivationsConfig:
    """Of a store on free ports that joins no fleet."""
    server = ServerConfig(listen="127.0.0.1:0", metrics_listen="127.0.0.1:0", drain_grace_s=2.0)
    settings = ActivationsConfig(
        gateway="", server=server, links=LimitedLinksConfig(socket=None), min_free_bytes=0, budget_bytes=256 << 20
    )
    return replace(settings, **overrides)  # type: ignore[arg-type]  # the test's own names


@contextlib.asynccontextmanager
async def running(folder: Path, settings: ActivationsConfig | None = None) -> AsyncIterator[Running]:
    """A store whose state is in that folder."""
    server, activations = build(settings or config(), folder)
    await server.start()
    channel = open_channel(server.address)
    try:
        await activations.start()
        stub = activations_pb2_grpc.ActivationServiceStub(channel)
        links = link_pb2_grpc.LinkServiceStub(channel)
        yield Running(server=server, activations=activations, stub=stub, links=links)
    finally:
        await channel.close()
        await server.stop()
        await activations.stop()


@contextlib.asynccontextmanager
async def joined_store(
    gateway: RunningGateway, folder: Path, *, name: str = "activations", **overrides: object
) -> AsyncIterator[Running]:
    """A store that has joined a gateway's fleet."""
    async with running(folder, config(gateway=gateway.fleet_address, name=name, **overrides)) as store:
        await gateway.until_joined(name)
        yield store


def send(link: Link, message: WholeMessage) -> None:
    link.send(message.layout, message.buffers, Deadline.after(PATIENCE_S))


def record_template(link: Link, template: Recorded) -> None:
    """Asks to record it, and does."""
    assert ask(link, template.question(would_record=True)).header.record
    for place in range(len(template.keys)):
        send_section(link, template, place)
    send(link, messages.recording_message(template.header(), template.drawn_tensors()))


def send_section(link: Link, template: Recorded, place: int, **fields: Any) -> None:
    """One of those that it is recorded of."""
    header = template.section(place, **fields)
    send(link, messages.section_message(place, header, template.layout))
    chunks = SectionChunks(place, template.layout, template.tensors(place))
    while not chunks.done:
        chunks.send(link, CHUNK_BYTES)


def ask(link: Link, question: pb.TemplateQuestion, *, number: int = 1) -> Answer:
    """Asks, and waits for the answer."""
    send(link, messages.question_message(number, question))
    return receive_answer(link, number)


def receive_answer(link: Link, number: int = 1) -> Answer:
    """The answer to the question of that number."""
    with link.recv(Deadline.after(PATIENCE_S)) as incoming:
        incoming.wait_all(Deadline.after(PATIENCE_S))
        layout = incoming.layout
        assert kind_of(layout) == ActivationMessageKind.ANSWER
        views = [incoming.view(index) for index in range(len(layout.specs))]
        answered, header = messages.read_answer(layout, views)
        assert answered == number
        return Answer(header=header, drawn=messages.read_drawn(layout, views, has_drawn=header.has_drawn))


def receive_abandon(link: Link) -> tuple[str, str]:
    """Recording and key of what the store takes nothing of."""
    with link.recv(Deadline.after(PATIENCE_S)) as incoming:
        incoming.wait_all(Deadline.after(PATIENCE_S))
        assert kind_of(incoming.layout) == ActivationMessageKind.ABANDON
        views = [incoming.view(index) for index in range(len(incoming.layout.specs))]
        header = messages.read_abandon(incoming.layout, views)
        return header.recording, header.key


def request_section(link: Link, digest: str, number: int, *, tensors: Sequence[int] = (), edit: int = 0) -> None:
    request = pb.SectionRequest(digest=digest, tensors=tensors, edit=edit)
    send(link, messages.fetch_message(number, request))


def fetch(link: Link, digest: str, layout: SectionLayout, *, tensors: Sequence[int] = (), number: int = 1) -> Fetched:
    """A section, as soon as it is here. Raises what the store refuses it with."""
    request_section(link, digest, number, tensors=tensors)
    return receive_sections(link, {number: layout}, {number: tensors})[number]


def receive_sections(
    link: Link,
    layouts: dict[int, SectionLayout],
    tensors: dict[int, Sequence[int]] | None = None,
    *,
    on_chunk: Callable[[int], None] = lambda number: None,
) -> dict[int, Fetched]:
    """All of these, by number; their chunks may come in turn. tensors: those that were asked for. on_chunk: told whose
    each is, also where that is another one's. Raises what one is refused with."""
    wanted = {number: tuple((tensors or {}).get(number) or range(len(of.tensors))) for number, of in layouts.items()}
    found: dict[int, Fetched] = {}
    parts: dict[int, dict[int, bytearray]] = {number: {} for number in layouts}
    while len(found) < len(layouts):
        with link.recv(Deadline.after(PATIENCE_S)) as incoming:
            incoming.wait_all(Deadline.after(PATIENCE_S))
            views = [incoming.view(index) for index in range(len(incoming.layout.specs))]
            kind = kind_of(incoming.layout)
            if kind == ActivationMessageKind.REFUSED:
                raise _refusal(messages.read_refused(incoming.layout, views)[1])
            if kind == ActivationMessageKind.WHOLE:
                number = read_number(incoming.layout, views)
                assert incoming.file is not None
                found[number] = _of_file(bytes(incoming.file), layouts[number])
                continue
            number, header = messages.read_chunk(incoming.layout, views)
            on_chunk(number)
            if number not in parts:
                continue
            rest = bytes(views[2])
            for place in wanted[number][wanted[number].index(header.tensor) :]:
                part = parts[number].setdefault(place, bytearray())
                if place == header.tensor:
                    assert header.start == len(part), "bytes of a tensor come in their order"
                left = layouts[number].tensors[place].size_bytes - len(part)
                part += rest[:left]
                rest = rest[left:]
                if not rest:
                    break
            assert not rest, "more bytes than were asked for"
            sizes = {place: layouts[number].tensors[place].size_bytes for place in wanted[number]}
            if {place: len(each) for place, each in parts[number].items()} == sizes:
                came = {place: bytes(each) for place, each in parts[number].items()}
                found[number] = Fetched(shared=False, tensors=came, order=tuple(came))
    return found


def _of_file(data: bytes, layout: SectionLayout) -> Fetched:
    assert len(data) == layout.size_bytes
    places = [layout.place(tensor.name) for tensor in layout.tensors]
    came = {place: data[offset : offset + size] for place, (offset, size) in enumerate(places)}
    return Fetched(shared=True, tensors=came, order=tuple(came))


def _refusal(packed: bytes) -> BottegaError:
    return from_job_error(json_format.Parse(packed, JobError()))


def layout_of(answer: pb.TemplateAnswer, place: int) -> SectionLayout:
    """Of the section in that place of an answer."""
    return SectionLayout.from_wire(answer.layouts[answer.sections[place].layout])


def profile(**fields: Any) -> pb.BlockProfile:
    """A measurement of a model with one block."""
    block = pb.BlockCost(name="mid_block.attentions.0", size_bytes=4096, full_s=0.01, masked_s=(0.001, 0.002))
    said: dict[str, Any] = {"model_hash": MODEL_HASH, "dtype": "float32", "width": 64, "height": 64, "forward_s": 0.1}
    said |= {"shares": (0.05, 0.2), "blocks": [block], "about": "measured"}
    return pb.BlockProfile(**{**said, **fields})
