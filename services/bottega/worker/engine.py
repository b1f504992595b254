"""The engine process: `python -m bottega.worker.engine --fd N --config-json JSON`, started by the worker's front.

It owns the device and the model, speaks engine.proto over the pipe, and exits when the pipe closes. Its loop is
one thread: a beat comes from between two blocks of a network, so an engine that hangs falls silent, and one that is
slow does not.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from bottega.diffusion.engine import Engine, EngineLimits
from bottega.diffusion.faults import named
from bottega.diffusion.model import DTYPES, load_model, pick_device
from bottega.errors import BottegaError, Unavailable
from bottega.miniature import WEIGHTS
from bottega.process import Channel
from bottega.rpc import logs
from bottega.rpc.address import split
from bottega.rpc.status import to_job_error
from bottega.transport import Doors, offer_to_wire
from bottega.v1.engine_pb2 import EngineCommand, EngineEvent, EnginePeerOffer, EnginePeerOffered
from bottega.v1.worker_pb2 import PeerTerms
from bottega.worker.at_hand import AtHand
from bottega.worker.config import EngineConfig
from bottega.worker.controlnets import LinkSettings, RemoteControlNets
from bottega.worker.engine_wire import beat_of, event_of, failed, key_of, order_of, ready_of, stores_of
from bottega.worker.link_desk import LinkDesk
from bottega.worker.loras import LinkedLoras, LoraLinkSettings
from bottega.worker.peer import Following, Peer, PeerSettings

_log = logging.getLogger(__name__)

_BEAT_S = 0.1
_IDLE_BEAT_S = 0.5
# While ControlNets of the peer's jobs are opened.
_LOOK_S = 0.05
# A peer may be another user: the socket's folder decides who finds it, and an offer's token who gets in.
_SOCKET_MODE = 0o666


class EngineProcess:
    """Reads commands, turns the engine, says what happened."""

    def __init__(self, channel: Channel, studio: Studio, desk: LinkDesk) -> None:
        self._channel = channel
        self._studio = studio
        self._engine = studio.engine
        self._desk = desk
        self._commands: queue.SimpleQueue[EngineCommand | Callable[[], None]] = queue.SimpleQueue()
        self._following = studio.follow(self._commands.put)
        self._beaten_s = time.monotonic()

    def run(self) -> None:
        """Serves until the pipe closes, which ends the process."""
        self._engine.tell_alive(self._beat_if_due)
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
            offered.offer.CopyFrom(offer_to_wire(self._following.offer(command.worker, command.link_id)))
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
                self._engine.expect(command.backlog.requests)
            case "preview":
                self._engine.show(key_of(command.preview.attempt))
            case "lora_stores":
                self._studio.loras.know(stores_of(command.lora_stores.stores))

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Studio:
    """All that draws. at_hand: the ControlNets of this process; controlnets: those, and those on servers.

    loras: those of stores. peer: the other worker of a pair, as this engine leads it; None where it is none.
    """

    config: EngineConfig
    engine: Engine
    controlnets: RemoteControlNets
    at_hand: AtHand
    loras: LinkedLoras
    peer: Peer | None = None

    def follow(self, post: Callable[[Callable[[], None]], None]) -> Following | None:
        """What it does for the other worker of a pair. post: see Following. Raises ConfigError."""
        if self.peer is None:
            return None
        config = self.config
        doors = Doors(
            tcp=split(config.links_listen) if config.links_listen else None,
            unix_path=Path(config.links_socket) if config.links_socket else None,
            unix_mode=_SOCKET_MODE,
        )
        return Following(doors, guests=self.engine.guests, counters=self.controlnets.counters, post=post)


def start(config: EngineConfig, desk: LinkDesk) -> Studio:
    """Loads the model and warms it up.

    Raises OSError, ValueError or BottegaError with the reason when model, device or a ControlNet cannot be used.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    folder = WEIGHTS if config.model == "miniature" else Path(config.model)
    name = config.model_name or ("miniature" if config.model == "miniature" else folder.name)
    model = load_model(folder, name=name, device=pick_device(config.device), dtype=DTYPES[config.dtype])
    limits = EngineLimits(
        max_rows=config.max_rows,
        fixed_rows=config.fixed_rows,
        max_wait_turns=config.max_wait_turns,
        max_pixels=config.max_pixels,
        checkpoint_interval_s=config.checkpoint_interval_s,
        progress_interval_s=config.progress_interval_s,
        lora_timeout_s=config.lora_timeout_s,
        pristine_on_host=config.lora_pristine == "host",
    )
    at_hand = AtHand(model, config)
    controlnets = RemoteControlNets(
        base=at_hand.base,
        dtype=model.dtype,
        device=model.device,
        offers=desk,
        local=at_hand.controlnets,
        digests=at_hand.digests,
        settings=LinkSettings(silence_s=config.controlnet_silence_s),
    )
    desk.terms = PeerTerms(model_hash=model.digest, dtype=model.dtype_name)
    peer = None
    if config.peer:
        settings = PeerSettings(silence_s=config.peer_silence_s)
        peer = Peer(config.peer, offers=desk, counters=controlnets.counters, settings=settings)
    loras = LinkedLoras(
        offers=desk,
        device=model.device,
        dtype=model.dtype,
        budget_bytes=config.lora_budget_bytes,
        settings=LoraLinkSettings(silence_s=config.lora_silence_s),
        counters=controlnets.counters,
    )
    engine = Engine(model, limits, controlnets=controlnets, loras=loras, follower=peer)
    engine.warm_up()
    return Studio(config=config, engine=engine, controlnets=controlnets, at_hand=at_hand, loras=loras, peer=peer)


def main() -> int:
    """Returns the exit code: 1 with a log line when the engine cannot start."""
    parser = argparse.ArgumentParser(prog="python -m bottega.worker.engine", description="A worker's engine process")
    parser.add_argument("--fd", type=int, required=True, help="the pipe to the front")
    parser.add_argument("--config-json", type=json.loads, required=True, help="EngineConfig as JSON")
    arguments = parser.parse_args()
    logs.configure("engine", "info")
    channel = Channel.from_fd(arguments.fd)
    config = EngineConfig(**arguments.config_json)
    desk = LinkDesk(lambda request: channel.send(EngineEvent(link_request=request).SerializeToString()))
    try:
        studio = start(config, desk)
    except (BottegaError, OSError, ValueError) as error:
        _log.error("the engine cannot start", extra={"model": config.model, "why": str(error)})
        return 1
    try:
        process = EngineProcess(channel, studio, desk)
        channel.send(ready_of(studio.engine, studio.at_hand.base).SerializeToString())
        process.run()
    except Unavailable:
        return 0  # the front is gone
    return 0


if __name__ == "__main__":
    os._exit(main())  # a thread may be waiting in the pipe
