"""The plain server of a day: stock Diffusers in one process, static batches in the order of arrival, and no caches.

It has the machine to itself, keeps every ControlNet loaded, leaves LoRAs in for a next batch that has the same, and is
asked over a pipe: nothing of a server around it is counted against it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from load.bench.day_reference import DayReference, PlainBatch, PlainPicture
from load.bench.day_requests import RequestClass, warm_up_requests
from load.bench.day_world import World
from load.bench.static_batches import StaticServer
from load.replay.requests import PlannedRequest
from load.replay.results import Result

Send = Callable[[PlannedRequest], Awaitable[Result]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainSide:
    """The process, and how it draws. fuse: whether LoRAs go into the weights, whichever is faster there."""

    process: DayReference
    world: World
    fuse: bool = True

    def alone(self, request: PlannedRequest) -> float:
        """Seconds of a request that nobody is before, and that finds no LoRA of another one."""
        return self.process.draw(self.batch([request], stay=False))

    def draw(self, requests: Sequence[PlannedRequest]) -> float:
        """Seconds of a batch, all of which go together."""
        return self.process.draw(self.batch(requests))

    def batch(self, requests: Sequence[PlannedRequest], *, stay: bool = True) -> PlainBatch:
        """With the longest of their steps."""
        first = requests[0]
        return PlainBatch(
            pictures=[self._picture(request) for request in requests],
            steps=max(request.steps for request in requests),
            nets=[str(self.world.controlnets[name]) for name in sorted(first.controlnets)],
            loras=[str(self.world.loras[name]) for name in sorted(first.loras)],
            fuse=self.fuse,
            stay=stay,
        )

    def _picture(self, request: PlannedRequest) -> PlainPicture:
        if request.template is not None:
            box = self.world.pictures.mask(request)
            return PlainPicture(
                prompt=request.prompt,
                seed=request.seed,
                image=str(self.world.template(request.template)),
                box=(box.x, box.y, box.width, box.height),
            )
        image = str(self.world.control_image(request)) if request.controlnets else ""
        return PlainPicture(prompt=request.prompt, seed=request.seed, image=image)


def together(request: PlannedRequest) -> Hashable:
    """What requests of one batch have in common: one call of a pipeline draws them, with one set of weights."""
    return request.kind, frozenset(request.controlnets), frozenset(request.loras)


@asynccontextmanager
async def serving(side: PlainSide) -> AsyncIterator[Send]:
    """How requests are sent, while it serves."""
    server: StaticServer[PlannedRequest] = StaticServer(side.draw, together=together)

    async def send(request: PlannedRequest) -> Result:
        await server.draw(request)
        return Result()

    try:
        yield send
    finally:
        await server.stop()


def faster_with_fusing(side: PlainSide, request: PlannedRequest) -> PlainSide:
    """The side, with the faster of both ways for LoRAs, of which this request has some; each is warm."""
    side.world.prepare([request])
    taken = {}
    for fuse in (True, False):
        way = replace(side, fuse=fuse)
        way.alone(request)
        taken[fuse] = way.alone(request)
    return replace(side, fuse=taken[True] <= taken[False])


@dataclass(frozen=True, slots=True, kw_only=True)
class AloneTimes:
    """What requests take alone on the plain server, once all is warm. seconds: of each class that was asked about."""

    side: PlainSide
    seconds: dict[RequestClass, float] = field(default_factory=dict)

    def of(self, request: PlannedRequest) -> float:
        """Seconds; the first request of a class is drawn for it, which is said."""
        kind = RequestClass.of(request)
        if kind not in self.seconds:
            self.side.world.prepare([request])
            self.seconds[kind] = self.side.alone(request)
            print(f"alone on the plain server: {kind}: {self.seconds[kind]:.2f} s", flush=True)
        return self.seconds[kind]


def warm_up_plain(side: PlainSide, requests: Sequence[PlannedRequest]) -> None:
    """Draws what a day begins with. requests: some of it."""
    wanted = warm_up_requests(requests, list(side.world.controlnets))
    side.world.prepare(wanted)
    for request in wanted:
        side.alone(request)
