"""The front's side of the server's engine process, in the words of controlnet_engine.proto: questions and answers."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
from pathlib import Path

from bottega import process
from bottega.controlnet.config import ControlNetEngineConfig
from bottega.errors import BottegaError, Unavailable
from bottega.process import EngineTimeouts
from bottega.rpc.status import from_job_error
from bottega.v1 import controlnet_engine_pb2 as pb
from bottega.v1.hosted_pb2 import Hosted
from bottega.v1.link_pb2 import IncomingLinkRequest, LinkOffer, LinkResult, OpenLinkRequest

ENGINE_MODULE = "bottega.controlnet.engine"

# Of an offer: the engine makes it in a thread of its own, at once.
_OFFER_S = 5.0
# Of hosting: to read all of a ControlNet from a slow disk.
_HOST_S = 300.0


class ControlNetEngineClient(
    process.EngineSupervisor[pb.ControlNetEngineCommand, pb.ControlNetEngineEvent, pb.ControlNetEngineReady]
):
    """Keeps the engine process of a ControlNet server. Give it every event: `hear` knows which are answers."""

    def __init__(
        self, config: ControlNetEngineConfig, *, timeouts: EngineTimeouts, module: str = ENGINE_MODULE
    ) -> None:
        super().__init__(module, "--config-json", json.dumps(dataclasses.asdict(config)), timeouts=timeouts)
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[pb.ControlNetEngineHosted | LinkResult]] = {}

    def read(self, frame: bytes) -> pb.ControlNetEngineEvent:
        """The event in a frame. Raises DecodeError."""
        return pb.ControlNetEngineEvent.FromString(frame)

    def ready(self, event: pb.ControlNetEngineEvent) -> pb.ControlNetEngineReady | None:
        """What the engine says of itself when it is ready; None for other events."""
        return event.ready if event.HasField("ready") else None

    def turns(self, event: pb.ControlNetEngineEvent) -> int | None:
        """Forwards so far, in the heartbeat of an engine that has work; None for other events."""
        return event.beat.turns if event.HasField("beat") and event.beat.busy else None

    def prefetch(self, names: list[str]) -> None:
        """Has these loaded ahead. Raises Unavailable when there is no engine."""
        self.send(pb.ControlNetEngineCommand(prefetch=pb.ControlNetEnginePrefetch(names=names)))

    def drain(self) -> None:
        """Has no sessions opened any more. Raises Unavailable when there is no engine."""
        self.send(pb.ControlNetEngineCommand(drain=pb.ControlNetEngineDrain()))

    async def host(self, name: str, folder: Path, root: Path | None = None) -> Hosted:
        """Hosts a ControlNet. root: outside of which no file of it may be; None: wherever they are.

        Raises InvalidRequest, ControlNetUnusable, Unavailable when there is no engine.
        """
        number = next(self._numbers)
        host = pb.ControlNetEngineHost(request=number, name=name, folder=str(folder), root=str(root or ""))
        answer = await self._ask(number, pb.ControlNetEngineCommand(host=host), _HOST_S)
        assert isinstance(answer, pb.ControlNetEngineHosted)
        return answer.controlnet

    async def open_link(self, request: OpenLinkRequest, *, caller: str) -> LinkOffer:
        """Offers a worker a link. caller: host of whoever asks.

        Raises what the engine refuses it with, Unavailable when there is no engine.
        """
        number = next(self._numbers)
        asked = IncomingLinkRequest(request=number, open=request, caller=caller)
        answer = await self._ask(number, pb.ControlNetEngineCommand(open_link=asked), _OFFER_S)
        assert isinstance(answer, LinkResult)
        return answer.opened.offer

    def hear(self, event: pb.ControlNetEngineEvent) -> None:
        """An event that may be an answer."""
        kind = event.WhichOneof("event")
        if kind not in ("hosted", "link_result"):
            return
        answer = event.hosted if kind == "hosted" else event.link_result
        asked = self._asked.pop(answer.request, None)
        if asked is None or asked.done():
            return
        if answer.HasField("error"):
            asked.set_exception(from_job_error(answer.error))
        else:
            asked.set_result(answer)

    def forget(self, error: BottegaError) -> None:
        """The engine is gone, and answers nothing any more."""
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(error)
        self._asked.clear()

    async def _ask(
        self, number: int, command: pb.ControlNetEngineCommand, patience_s: float
    ) -> pb.ControlNetEngineHosted | LinkResult:
        self.send(command)
        answer: asyncio.Future[pb.ControlNetEngineHosted | LinkResult]
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(patience_s):
                return await answer
        except TimeoutError:
            raise Unavailable(f"the engine did not answer within {patience_s:g} s") from None
        finally:
            self._asked.pop(number, None)
