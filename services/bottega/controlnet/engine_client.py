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
    """Keeps the engine process of a ControlNet server. Give every event to `on_event`: some are answers."""

    def __init__(
        self, config: ControlNetEngineConfig, *, timeouts: EngineTimeouts, module: str = ENGINE_MODULE
    ) -> None:
        super().__init__(module, "--config-json", json.dumps(dataclasses.asdict(config)), timeouts=timeouts)
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[pb.ControlNetEngineHosted | LinkResult]] = {}

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
        answer = await self._call(number, pb.ControlNetEngineCommand(host=host), _HOST_S)
        assert isinstance(answer, pb.ControlNetEngineHosted)
        return answer.controlnet

    async def open_link(self, request: OpenLinkRequest, *, caller: str) -> LinkOffer:
        """Offers a worker a link. caller: host of the worker.

        Raises what the engine refuses it with, Unavailable when there is no engine.
        """
        number = next(self._numbers)
        incoming = IncomingLinkRequest(request=number, open=request, caller=caller)
        answer = await self._call(number, pb.ControlNetEngineCommand(open_link=incoming), _OFFER_S)
        assert isinstance(answer, LinkResult)
        return answer.opened.offer

    def on_event(self, event: pb.ControlNetEngineEvent) -> None:
        """The engine says something, which may be an answer."""
        kind = event.WhichOneof("event")
        if kind not in ("hosted", "link_result"):
            return
        answer = event.hosted if kind == "hosted" else event.link_result
        call = self._pending.pop(answer.request, None)
        if call is None or call.done():
            return
        if answer.HasField("error"):
            call.set_exception(from_job_error(answer.error))
        else:
            call.set_result(answer)

    def fail_calls(self, error: BottegaError) -> None:
        """The engine is gone, and answers nothing any more."""
        for call in self._pending.values():
            if not call.done():
                call.set_exception(error)
        self._pending.clear()

    async def _call(
        self, number: int, command: pb.ControlNetEngineCommand, timeout_s: float
    ) -> pb.ControlNetEngineHosted | LinkResult:
        self.send(command)
        answer: asyncio.Future[pb.ControlNetEngineHosted | LinkResult]
        answer = self._pending[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise Unavailable(f"the engine did not answer within {timeout_s:g} s") from None
        finally:
            self._pending.pop(number, None)
