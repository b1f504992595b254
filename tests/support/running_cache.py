"""An approximate cache on a real gRPC server in the test's own event loop, and workers' links to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bottega import kinds
from bottega.addons.cache import wire
from bottega.addons.cache.wire import CacheMessage, CacheMessageKind
from bottega.cache.__main__ import build
from bottega.cache.config import CacheConfig
from bottega.cache.server import CacheServer
from bottega.rpc.channel import open_channel
from bottega.rpc.server import Server
from bottega.rpc.server_config import LinksConfig, ServerConfig
from bottega.transport import BytesMessage, Deadline, DType, Layout, Limits, Link, connect, kind_of, offer_from_wire
from bottega.v1 import cache_pb2 as pb
from bottega.v1 import cache_pb2_grpc, link_pb2_grpc
from bottega.v1.generation_pb2 import FIDELITY_BALANCED, GenerationSpec
from bottega.v1.link_pb2 import LinkOffer, OpenLinkRequest
from tests.support.running_gateway import Running as RunningGateway
from tests.support.waiting import eventually

PATIENCE_S = 20.0
KEY = "0a" * 32
MODEL_HASH = "ab" * 32
STEPS = 20
WIDTH = 16
"""Of embeddings."""

SHAPE = (4, 6, 8)
"""Of latents, in float32."""

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a cache has answered: the header, and its latents."""

    header: pb.CacheAnswer
    latents: tuple[Vector, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A cache that serves, and stubs to call it."""

    server: Server
    cache: CacheServer
    stub: cache_pb2_grpc.CacheServiceAsyncStub
    links: link_pb2_grpc.LinkServiceAsyncStub

    async def call(self, method: str, **fields: Any) -> Any:
        """What CacheService answers to a request of these fields."""
        request = getattr(pb, f"{method}Request")(**fields)
        return await getattr(self.stub, method)(request, timeout=PATIENCE_S)

    async def open_link(self, worker: str = "w") -> LinkOffer:
        response = await self.links.OpenLink(OpenLinkRequest(kind=kinds.CACHE, worker=worker), timeout=PATIENCE_S)
        return response.offer

    async def link(self, worker: str = "w", *, limits: Limits | None = None) -> Link:
        offer = offer_from_wire(await self.open_link(worker))
        limits = limits or Limits(slots=2, slot_bytes=1 << 20)
        return await asyncio.to_thread(connect, offer, Deadline.after(PATIENCE_S), limits=limits)

    async def fill(self, *prompts: str, key: str = KEY, model_hash: str = MODEL_HASH) -> None:
        """Has it record a picture of each prompt, all that there is of one; returns when they are there."""
        with await self.link("recorder") as link:
            for number, prompt in enumerate(prompts):
                await asyncio.to_thread(
                    record, link, embedding(number), key=key, model_hash=model_hash, prompt=prompt, seed=number
                )
            await eventually(lambda: set(prompts) <= self._prompts(model_hash), "the recordings to be kept")

    def _prompts(self, model_hash: str) -> set[str]:
        return {entry.parameters.prompt for entry in self.cache.store.entries(model_hash, 500)}


def config(**overrides: object) -> CacheConfig:
    """Of a cache on free ports that joins no fleet, and explores nothing."""
    server = ServerConfig(listen="127.0.0.1:0", metrics_listen="127.0.0.1:0", drain_grace_s=2.0)
    settings = CacheConfig(
        gateway="",
        server=server,
        links=LinksConfig(socket=None),
        exploration=0.0,
        min_free_bytes=0,
    )
    return replace(settings, **overrides)  # type: ignore[arg-type]  # the test's own names


@contextlib.asynccontextmanager
async def running(folder: Path, settings: CacheConfig | None = None) -> AsyncIterator[Running]:
    """A cache whose state is in that folder."""
    server, cache = build(settings or config(), folder)
    await server.start()
    channel = open_channel(server.address)
    try:
        await cache.start()
        stub = cache_pb2_grpc.CacheServiceStub(channel)
        yield Running(server=server, cache=cache, stub=stub, links=link_pb2_grpc.LinkServiceStub(channel))
    finally:
        await channel.close()
        await server.stop()
        await cache.stop()


@contextlib.asynccontextmanager
async def joined_cache(gateway: RunningGateway, folder: Path, *, name: str = "cache") -> AsyncIterator[Running]:
    """A cache that has joined a gateway's fleet."""
    async with running(folder, config(gateway=gateway.fleet_address, name=name)) as cache:
        await gateway.until_joined(name)
        yield cache


def profile(model_hash: str = MODEL_HASH, *, similarity: float = 0.9, about: str = "") -> pb.CacheProfile:
    """From that similarity on half of the steps are skipped, whatever the prompt and the fidelity."""
    threshold = pb.CacheThreshold(fraction=0.5, similarity=similarity)
    classes = [pb.CacheLengthClass(thresholds=[threshold])]
    return pb.CacheProfile(model_hash=model_hash, balanced=classes, fast=classes, about=about)


def embedding(number: int) -> Vector:
    """Of a prompt; any two are at right angles."""
    made = np.zeros(WIDTH, np.float32)
    made[number % WIDTH] = 1.0
    return made


def latents(number: int = 0, count: int = 5) -> list[Vector]:
    """Of a picture, after its recorded steps."""
    return [np.full(SHAPE, number + step / 10, np.float32) for step in range(count)]


def picture(number: int = 0) -> npt.NDArray[np.uint8]:
    made = np.zeros((8, 6, 3), np.uint8)
    made[..., 0], made[0, 0, 1] = number, 255
    return made


def question(**fields: Any) -> pb.CacheQuestion:
    """Of a job with one picture."""
    asked = {"key": KEY, "model_hash": MODEL_HASH, "steps": STEPS, "images": 1, "words": 3}
    return pb.CacheQuestion(**{"fidelity": FIDELITY_BALANCED, **asked, **fields})


def send(link: Link, message: CacheMessage | BytesMessage) -> None:
    link.send(message.layout, message.buffers, Deadline.after(PATIENCE_S))


def ask(link: Link, vector: Vector, *, number: int = 1, **fields: Any) -> Answer:
    """Asks, and waits for the answer."""
    send(link, wire.question_message(number, question(**fields), vector.data.cast("B")))
    return receive(link, number)


def receive(link: Link, number: int = 1) -> Answer:
    """The answer to the question of that number."""
    with link.recv(Deadline.after(PATIENCE_S)) as incoming:
        incoming.wait_all(Deadline.after(PATIENCE_S))
        layout: Layout = incoming.layout
        assert kind_of(layout) == CacheMessageKind.ANSWER
        views = [incoming.view(index) for index in range(len(layout.specs))]
        answered, header = wire.read_header(layout, views, pb.CacheAnswer)
        assert answered == number
        wire.check_latents(layout, 2, len(header.hits))
        found = [
            np.frombuffer(bytes(view), np.float32).reshape(spec.shape)
            for spec, view in zip(layout.specs[2:], views[2:], strict=True)
        ]
    return Answer(header=header, latents=tuple(found))


def recording_message(
    header: pb.CacheRecording, vector: Vector, pixels: npt.NDArray[np.uint8], recorded: Sequence[Vector]
) -> CacheMessage:
    """What a worker sends of a picture."""
    height, width, _ = pixels.shape
    return wire.recording_message(
        header,
        embedding=vector.data.cast("B"),
        picture=(wire.picture_spec(height, width), pixels.data.cast("B")),
        latents=[
            (wire.latent_spec(index, DType.FLOAT32, latent.shape), latent.data.cast("B"))
            for index, latent in enumerate(recorded)
        ],
    )


def record(link: Link, vector: Vector, *, prompt: str = "a star", seed: int = 0, **fields: Any) -> None:
    """Sends a recording after steps 2, 4, 6, 8 and 10 of 20. seed: also tells its picture and latents from others."""
    parameters = GenerationSpec(prompt=prompt, seed=seed, num_inference_steps=STEPS, width=64, height=64)
    said = {"key": KEY, "model_hash": MODEL_HASH, "parameters": parameters, "steps": [2, 4, 6, 8, 10]}
    header = pb.CacheRecording(**{**said, **fields})
    send(link, recording_message(header, vector, picture(seed), latents(seed, len(header.steps))))
