"""The two sides of a day, and what both draw with.

The plain server is stock Diffusers in one process, with static batches in the order of arrival, and no caches. It has
the machine to itself, keeps every ControlNet loaded, leaves LoRAs in for a next batch that has the same, and is asked
over a pipe: nothing of a server around it is counted against it.

The suite is a gateway, a worker, a ControlNet server and stores as processes, with all techniques or without some.
Every run has a suite of its own, which begins with the same state: a copy of what `prepare` left, as it is on the
morning after a day like this one.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from bottega.addons.cache.client.types import profile_from
from bottega.client import AsyncClient, Client, Picture
from bottega.client.types.options import GenerationOptions
from bottega.miniature import WEIGHTS
from bottega.v1.cache_pb2 import CacheProfile
from load.bench.bench_model import BenchShape, write_bench_controlnet, write_bench_model
from load.bench.day_requests import RequestClass, warm_up_requests
from load.bench.engine_runs import ACCELERATIONS
from load.bench.framework import GUIDANCE_SCALE, closed_loop
from load.bench.lora_files import random_lora
from load.bench.side_process import Side
from load.bench.static_batches import StaticServer
from load.bench.suites import Suite, print_accelerations, suite
from load.replay.gateway_sender import GatewaySender
from load.replay.pictures import Pictures
from load.replay.requests import PlannedRequest
from load.replay.results import Outcome, Result
from tests.support.waiting import wait_until

MODEL = "day"
"""What requests call the model."""

# SDXL's topology, and about its share of transformers in a step (.79, measured), as small as edits allow that shall
# gain by their masks as SDXL's do: with fewer channels, layers or tokens a masked block takes as long as a whole one. A
# guided step takes .5 to .7 s on two cores. With the embedded model's text towers, so that prompts can be alike.
SHAPE = BenchShape(
    block_out_channels=(64, 128, 256),
    transformer_layers=(2, 10),
    head_channels=32,
    norm_groups=16,
    sample_size=48,
    latent_scale=4,
    text_width=64,
)
RANK = 8
_TEXT_TOWERS = ("text_encoder", "text_encoder_2")
_GIB = 1 << 30
_CLIENTS = 8
_ACTIVATIONS_MIB = 2048
# Rows of one guided request.
_ONE_REQUEST = 2
# By then everything that the day before left has been written.
_WRITTEN_S = 60.0
_STORES = ("loras", "cache", "activations")

Send = Callable[[PlannedRequest], Awaitable[Result]]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A model, ControlNets, LoRAs and images, as files in one folder."""

    model: Path
    controlnets: Mapping[str, Path]
    """Folders by name."""
    loras: Mapping[str, Path]
    """Files by name, as Diffusers saves them."""
    pictures: Pictures
    """Images that requests bring along, as the suite is sent them."""
    images: Path
    """Folder of the same ones for the plain server."""

    def template(self, rank: int) -> Path:
        """Return the file of the image that edits of this template edit."""
        return self._file(f"template-{rank}.png", lambda: self.pictures.template(rank))

    def control_image(self, request: PlannedRequest) -> Path:
        """Return the file of a request's control image."""
        return self._file(f"control-{request.seed}.png", lambda: self.pictures.control_image(request))

    def prepare(self, requests: Iterable[PlannedRequest]) -> None:
        """Draw and write all images that these need, so that no request waits for one."""
        for request in requests:
            if request.template is not None:
                self.template(request.template)
            if request.controlnets:
                self.control_image(request)

    def _file(self, name: str, data: Callable[[], bytes]) -> Path:
        path = self.images / name
        if not path.exists():
            path.write_bytes(data())
        return path


def build_world(folder: Path, *, controlnets: int, loras: int) -> World:
    """Write all of it, the same every time: random except for the text towers."""
    model, images = folder / "model", folder / "images"
    write_bench_model(model, SHAPE)
    # Prompts that say the same are near each other for towers that were trained, which a random model's are not.
    for tower in _TEXT_TOWERS:
        shutil.rmtree(model / tower)
        shutil.copytree(WEIGHTS / tower, model / tower)
    images.mkdir()
    nets = [f"net{number}" for number in range(controlnets)]
    return World(
        model=model,
        controlnets={
            name: write_bench_controlnet(model, folder / "controlnets" / name, SHAPE, seed=seed)
            for seed, name in enumerate(nets)
        },
        loras={
            f"lora{number}": random_lora(model, folder / "loras", seed=number, rank=RANK).theirs
            for number in range(loras)
        },
        pictures=Pictures(width=SHAPE.side, height=SHAPE.side),
        images=images,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainSide:
    """The plain server's process, and how it draws."""

    process: Side
    world: World
    fuse: bool = True
    """Whether LoRAs go into the weights, whichever is faster there."""

    def alone(self, request: PlannedRequest) -> float:
        """Return the seconds of a request that waits for none before it, and that finds no LoRA of another one."""
        return self.process.ask(**self.question([request], stay=False))["seconds"]

    def draw(self, requests: Sequence[PlannedRequest]) -> float:
        """Return the seconds of a batch, all of which go together."""
        return self.process.ask(**self.question(requests))["seconds"]

    def question(self, requests: Sequence[PlannedRequest], *, stay: bool = True) -> dict[str, Any]:
        """Return the arguments of `Stock.draw` for a batch, which runs to the longest of their steps.

        Args:
            stay: Whether LoRAs stay for a next batch with the same ones.
        """
        first = requests[0]
        question: dict[str, Any] = {
            "prompts": [request.prompt for request in requests],
            "seeds": [request.seed for request in requests],
            "steps": max(request.steps for request in requests),
            "loras": [str(self.world.loras[name]) for name in sorted(first.loras)],
            "fuse": self.fuse,
            "stay": stay,
            "encoded": True,  # as at any server
        }
        if first.template is not None:
            boxes = [self.world.pictures.mask(request) for request in requests]
            question["boxes"] = [(box.x, box.y, box.width, box.height) for box in boxes]
            question["images"] = [str(self.world.template(request.template or 0)) for request in requests]
        elif first.controlnets:
            nets = [str(self.world.controlnets[name]) for name in sorted(first.controlnets)]
            images = [str(self.world.control_image(request)) for request in requests]
            question |= {"nets": nets, "images": [images] * len(nets)}
        return question

    def with_faster_loras(self, request: PlannedRequest) -> PlainSide:
        """Return the side with the faster of both ways for LoRAs, of which the request has some; each is warm."""
        self.world.prepare([request])
        taken = {}
        for fuse in (True, False):
            way = replace(self, fuse=fuse)
            way.alone(request)
            taken[fuse] = way.alone(request)
        return replace(self, fuse=taken[True] <= taken[False])

    def warm_up(self, requests: Sequence[PlannedRequest]) -> None:
        """Draw what a day begins with, given some of its requests."""
        wanted = warm_up_requests(requests, list(self.world.controlnets))
        self.world.prepare(wanted)
        for request in wanted:
            self.alone(request)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Send]:
        """Give how requests are sent, while it serves."""
        server: StaticServer[PlannedRequest] = StaticServer(self.draw, together=together)

        async def send(request: PlannedRequest) -> Result:
            await server.draw(request)
            return Result()

        try:
            yield send
        finally:
            await server.stop()


def together(request: PlannedRequest) -> Hashable:
    """Return what requests of one batch have in common: one call of a pipeline draws them, with one set of weights."""
    return request.kind, frozenset(request.controlnets), frozenset(request.loras)


@dataclass(frozen=True, slots=True, kw_only=True)
class AloneTimes:
    """Seconds that requests take alone on the plain server, once all is warm, by class."""

    side: PlainSide
    seconds: dict[RequestClass, float] = field(default_factory=dict)

    def of(self, request: PlannedRequest) -> float:
        """Return the seconds of a request's class; its first request is drawn for it."""
        kind = RequestClass.of(request)
        if kind not in self.seconds:
            self.side.world.prepare([request])
            self.seconds[kind] = self.side.alone(request)
            print(f"alone on the plain server: {kind}: {self.seconds[kind]:.2f} s", flush=True)
        return self.seconds[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Techniques:
    """The techniques of the suite that are on."""

    identical_answers: bool = True
    """A request that was drawn before is answered with the stored picture."""
    cached_starts: bool = True
    """Pictures may start from the latents of similar prompts."""
    masked_blocks: bool = True
    """Edits compute their masked part."""
    sparse_convolutions: bool = True
    """Convolutions, too."""
    stored_activations: bool = True
    """Recordings of edits are kept for the next day, and for all workers; without it, in the worker that made them."""
    controlnet_server: bool = True
    """ControlNets run beside the worker; without it, in it."""
    late_residuals: bool = True
    """Residuals of ControlNets may be a step old."""
    late_loras: bool = True
    """Steps are made before LoRAs are there."""
    batches: bool = True
    """Requests share turns; without it one is drawn at a time."""


ALL = Techniques()
LABELS = {
    "identical_answers": "stored answers to identical requests",
    "cached_starts": "starts from cached latents",
    "masked_blocks": "masked blocks of edits",
    "sparse_convolutions": "convolutions of edits around their masks alone",
    "stored_activations": "the activation store",
    "controlnet_server": "ControlNets on a server of their own",
    "late_residuals": "residuals of ControlNets that may be a step old",
    "late_loras": "LoRAs that may come late",
    "batches": "batches, joined at every step",
}


def without_each() -> dict[str, Techniques]:
    """Return, by the name of a technique, all of them but that one."""
    # Nothing is recorded where nothing is reused: a store would be there to no purpose.
    also_off = {"masked_blocks": ("stored_activations",)}
    return {
        name: replace(ALL, **dict.fromkeys((name, *also_off.get(name, ())), False))
        for name in (each.name for each in fields(Techniques))
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class DaySuite:
    """How a suite is started."""

    world: World
    folder: Path
    """For configurations and logs."""
    state: Path
    """Of the stores, which the suite changes."""
    threads: int
    """Of each engine."""
    deadline_s: float
    """Of a request."""
    techniques: Techniques = ALL

    def services(self) -> dict[str, dict[str, object]]:
        """Return settings of all services but the gateway."""
        found: dict[str, dict[str, object]] = {
            "loras": {"bases": {MODEL: str(self.world.model)}},
            # All is recorded, and nothing left to chance.
            "cache": {"exploration": 0.0, "min_free_bytes": 0},
            "activations": {"budget_bytes": 3 * _GIB, "disk_bytes": 8 * _GIB, "template_mib": 0, "min_free_bytes": 0},
        }
        if not self.techniques.cached_starts:
            del found["cache"]
        if not self.techniques.stored_activations:
            del found["activations"]
        for kind, settings in found.items():
            settings["folder"] = str(self.state / kind)
        if self.techniques.controlnet_server:
            found["controlnet"] = {"engine": {"threads": self.threads}, "controlnets": self._controlnets()}
        return found | {"worker": {"engine": self._engine()}}

    def _engine(self) -> dict[str, object]:
        techniques = self.techniques
        engine: dict[str, object] = {
            "model": str(self.world.model),
            "model_name": MODEL,
            "threads": self.threads,
            # As the plain server's, which has no other engine beside it: here one of a ControlNet computes at times.
            "exclusive_cores": True,
            "accelerations": list(ACCELERATIONS),
            # LoRAs are not kept beyond their requests: of thousands, as in production, few are used again soon.
            "loras": {"budget_bytes": 1},
            # A template has 180 MiB, and as many are recorded at once as there are clients.
            "edits": {
                "activations_mib": _ACTIVATIONS_MIB,
                "upload_mib": _ACTIVATIONS_MIB,
                "sparse_convolutions": techniques.sparse_convolutions,
            },
        }
        if not techniques.controlnet_server:
            engine["controlnets"] = {"folders": self._controlnets()}
        if not techniques.batches:
            engine["max_rows"] = _ONE_REQUEST
        return engine

    def _controlnets(self) -> dict[str, str]:
        return {name: str(folder) for name, folder in self.world.controlnets.items()}

    def options(self) -> GenerationOptions:
        """Return options of all requests."""
        options: GenerationOptions = {
            "guidance_scale": GUIDANCE_SCALE,
            # Also of recordings of another prompt: nearly every edit's is a new one.
            "masked_blocks": self.techniques.masked_blocks,
        }
        if not self.techniques.cached_starts:
            options["approximate_cache"] = False
        if not self.techniques.late_residuals:
            options["stale_residuals"] = False
        if not self.techniques.late_loras:
            options["bounded_lora_loading"] = False
        return options

    @contextmanager
    def running(self) -> Iterator[Suite]:
        """Run it; everything has joined when the block begins."""
        identical = {"identical_results": self.techniques.identical_answers}
        with suite(self.folder, self.services(), gateway=identical) as running:
            print_accelerations(running.client)
            yield running

    @asynccontextmanager
    async def sending(
        self, running: Suite, seen: Callable[[PlannedRequest, Picture], None]
    ) -> AsyncIterator[GatewaySender]:
        """Give how requests are sent to it.

        Args:
            seen: Is called with every picture that comes.
        """
        async with AsyncClient(running.address, fleet_address=running.gateway.fleet) as client:
            yield GatewaySender(
                client,
                self.world.pictures,
                deadline_s=self.deadline_s,
                model=MODEL,
                options=self.options(),
                seen=seen,
            )

    async def draw_all(self, running: Suite, requests: Sequence[PlannedRequest]) -> None:
        """Draw requests, a few at a time. Raises RuntimeError where a picture does not come."""
        async with self.sending(running, lambda *_: None) as sender:

            async def draw(number: int) -> None:
                result = await sender.send(requests[number])
                if result.outcome is not Outcome.ANSWERED:
                    raise RuntimeError(f"the suite did not draw {requests[number]}: {result.outcome}, {result.reason}")

            if requests:
                await closed_loop(draw, requests=len(requests), clients=_CLIENTS)

    async def warm_up(self, running: Suite, requests: Sequence[PlannedRequest]) -> None:
        """Draw requests that leave no latents behind from which others could start."""
        quiet = replace(self, techniques=replace(self.techniques, cached_starts=False))
        await quiet.draw_all(running, requests)

    def prepare(self, before: Sequence[PlannedRequest], profile: CacheProfile) -> None:
        """Leave in its state what a day leaves: LoRAs in the store, pictures in the cache, recordings of templates.

        Raises RuntimeError where a picture does not come, and AssertionError where recordings are not stored.

        Args:
            before: The requests of that day.
            profile: Of any model; it is set for this one.
        """
        with self.running() as running:
            client = running.client
            for name, file in self.world.loras.items():
                client.add_lora(name, file)
            client.set_cache_profile(replace(profile_from(profile), model_hash=running.model_hash))
            asyncio.run(self.draw_all(running, before))
            templates = {request.template for request in before} - {None}
            wait_until(lambda: _stored(client) >= len(templates), "the templates to be stored", within_s=_WRITTEN_S)


def copy_state(prepared: Path, folder: Path) -> Path:
    """Copy the state of the stores, which must have ended, for another suite."""
    for store in _STORES:
        shutil.copytree(prepared / store, folder / store)
    return folder


def _stored(client: Client) -> int:
    """Return the number of templates that the store has, whole."""
    templates = client.templates().templates
    return sum(bool(each.store) and not each.recording for each in templates)
