"""The front's side of the worker's engine process, in the words of engine.proto. Does not know what an attempt is."""

from __future__ import annotations

import dataclasses
import json
from typing import ClassVar

from bottega import process
from bottega.errors import Unavailable, WorkerLost
from bottega.process import Listener, Patience
from bottega.v1.engine_pb2 import EngineCommand, EngineEvent, EngineReady
from bottega.worker.config import EngineConfig

ENGINE_MODULE = "bottega.worker.engine"

EngineListener = Listener[EngineReady, EngineEvent]


class EngineFront(process.EngineFront[EngineCommand, EngineEvent, EngineReady]):
    """Keeps the engine process of a worker. module: what is run; another one speaks the same frames."""

    lost: ClassVar[type[Unavailable]] = WorkerLost

    def __init__(
        self, config: EngineConfig, *, start_s: float, hang_s: float, stall_s: float, module: str = ENGINE_MODULE
    ) -> None:
        arguments = ("--config-json", json.dumps(dataclasses.asdict(config)))
        super().__init__(module, *arguments, patience=Patience(start_s=start_s, hang_s=hang_s, stall_s=stall_s))

    def read(self, frame: bytes) -> EngineEvent:
        """See process.EngineFront."""
        return EngineEvent.FromString(frame)

    def ready(self, event: EngineEvent) -> EngineReady | None:
        """See process.EngineFront."""
        return event.ready if event.HasField("ready") else None

    def turns(self, event: EngineEvent) -> int | None:
        """See process.EngineFront. Whatever begins or ends an attempt counts as a turn."""
        return event.beat.turns if event.HasField("beat") and event.beat.running else None
