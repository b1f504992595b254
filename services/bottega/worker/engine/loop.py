"""The loop of a worker's engine process, which owns the device and the model: it speaks engine.proto over the pipe, and
exits when the pipe closes.

It is one thread: a beat comes from between two blocks of a network, so an engine that hangs falls silent, and one that
is slow does not.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable

from bottega import kinds
from bottega.diffusion.errors import named
from bottega.errors import BottegaError, Unavailable
from bottega.process import FramedPipe
from bottega.rpc.status import to_job_error
from bottega.transport import offer_to_wire
from bottega.v1.engine_pb2 import EngineCommand, EngineEvent, EnginePeerOffer, EnginePeerOffered
from bottega.worker.config import EngineConfig
from bottega.worker.engine.messages import beat_of, event_of, failed, key_of, order_of, ready_of, stores_of
from bottega.worker.engine.runtime import Runtime, start
from bottega.worker.link_requests import LinkRequests

_log = logging.getLogger(__name__)

_BEAT_S = 0.1
_IDLE_BEAT_S = 0.5
# While ControlNets of the peer's jobs are opened.
_LOOK_S = 0.05


def run(channel: FramedPipe, config: EngineConfig) -> int:
    """Starts, says so, and serves until the front is gone. Returns 1 with a log line when it cannot start."""
    desk = LinkRequests(lambda request: channel.send(EngineEvent(link_request=request).SerializeToString()))
    try:
        studio = start(config, desk)
    except (BottegaError, OSError, ValueError) as error:
        _log.error("the engine cannot start", extra={"model": config.model, "why": str(error)})
        return 1
    try:
        process = WorkerEngineLoop(channel, studio, desk)
        channel.send(ready_of(studio.engine, studio.at_hand.base).SerializeToString())
        process.run()
    except Unavailable:
        return 0  # the front is gone
    return 0


class WorkerEngineLoop:
    """Reads commands, turns the engine, says what happened."""

    def __init__(self, channel: FramedPipe, studio: Runtime, desk: LinkRequests) -> None:
        self._channel = channel
        self._studio = studio
        self._engine = studio.engine
        self._desk = desk
        self._commands: queue.SimpleQueue[EngineCommand | Callable[[], None]] = queue.SimpleQueue()
        self._following = studio.follow(self._commands.put)
        self._beaten_s = time.monotonic()

    def run(self) -> None:
        """Serves until the pipe closes, which ends the process."""
        self._studio.heartbeat.subscribe(self._beat_if_due)
        self._studio.controlnets.tell_alive(self._beat_if_due)
        threading.Thread(target=self._listen, name="commands", daemon=True).start()
        if self._studio.peer is not None:
            self._studio.peer.start()
        while True:
            self._obey_all()
            for event in self._engine.turn():
                self._say(event_of(event, self._engine))
            self._tell_peer()
            self._beat_if_due()

    def _listen(self) -> None:
        while (frame := self._channel.recv()) is not None:
            command = EngineCommand.FromString(frame)
            if command.HasField("link_offer"):
                self._desk.answer(command.link_offer)  # at once: the loop may be waiting for the link
            elif command.HasField("peer_offer"):
                self._offer(command.peer_offer)
            else:
                self._commands.put(command)
        self._studio.controlnets.stop()
        self._studio.loras.stop()
        if self._following is not None:
            self._following.close()  # its socket leaves no file behind
        os._exit(0)  # the front is gone: there is nobody to finish for, and a turn may take long

    def _obey_all(self) -> None:
        """All commands that are here; with nothing else to do, waits for one, beating."""
        while True:
            try:
                command = self._commands.get(block=not self._engine.busy, timeout=self._pause_s)
            except queue.Empty:
                self._tell_peer()
                if self._engine.busy:
                    return
                self._beat_if_due()
            else:
                self._obey(command)

    @property
    def _pause_s(self) -> float:
        """How long an engine with nothing of its own to do waits for commands."""
        return _LOOK_S if self._engine.guests.opening else _IDLE_BEAT_S

    def _tell_peer(self) -> None:
        if self._following is not None:
            self._following.report(busy=self._engine.busy)
            self._following.attend()

    def _offer(self, command: EnginePeerOffer) -> None:
        offered = EnginePeerOffered(request=command.request)
        try:
            if self._following is None:
                raise Unavailable("the engine has no peer")
            offer = self._following.offer(command.worker, command.link_id, caller=command.caller)
            offered.offer.CopyFrom(offer_to_wire(offer))
        except BottegaError as error:
            offered.error.CopyFrom(to_job_error(error))
        self._say(EngineEvent(peer_offered=offered))

    def _obey(self, command: EngineCommand | Callable[[], None]) -> None:
        if not isinstance(command, EngineCommand):
            command()
            self._beat_if_due()
            return
        try:
            self._carry_out(command)
        except Exception as error:  # noqa: BLE001 - the boundary of a command: a wrong one is not the other attempts'
            kind = command.WhichOneof("command")
            if kind == "start":
                self._say(failed(command.start.attempt, named(error)))
            else:
                _log.error("a command failed", exc_info=error, extra={"command": kind})

    def _carry_out(self, command: EngineCommand) -> None:
        match command.WhichOneof("command"):
            case "start":
                self._engine.submit(order_of(command.start, self._engine.model.defaults.sampler))
                self._tell_peer()  # before the next turn: what it has lent until then is computed before it, too
            case "cancel":
                self._engine.cancel(key_of(command.cancel.attempt))
            case "backlog":
                self._engine.set_backlog(command.backlog.requests)
            case "preview":
                self._engine.enable_previews(key_of(command.preview.attempt))
            case "services":
                stores = (service for service in command.services.services if service.kind == kinds.LORAS)
                self._studio.loras.know(stores_of(stores))

    def _beat_if_due(self) -> None:
        if time.monotonic() - self._beaten_s >= _BEAT_S:
            self._beat()

    def _beat(self) -> None:
        self._beaten_s = time.monotonic()
        studio = self._studio
        linked = sum(end is not None and end.linked for end in (studio.peer, self._following))
        self._say(beat_of(self._engine, studio.controlnets, studio.at_hand, studio.loras, peer_links=linked))

    def _say(self, event: EngineEvent) -> None:
        self._channel.send(event.SerializeToString())
