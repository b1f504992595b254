"""The engine process of a worker that computes only one stage: text encoders, or the VAE's decoder, for other workers.

The main thread computes one request after the other, in the order in which they came, and sends heartbeats between two
blocks of a network. Each connection has threads of its own. It exchanges the messages of a worker's engine process with
the front process.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bottega import kinds
from bottega.device.heartbeat import Heartbeat, call_after_blocks
from bottega.device.memory_plan import DeviceMemoryMeter
from bottega.device_links.tensor_messages import TensorMessage
from bottega.engine.encode import encode_all_prompts
from bottega.engine.errors import to_job_failure
from bottega.engine.limits import EngineLimits, max_pixels
from bottega.errors import BottegaError, Draining, QueueFull, TooLarge
from bottega.model.model import Model
from bottega.model.vae import check_decodable, decode_image
from bottega.process import FramedPipe
from bottega.rpc.link_service import answer_link_request, link_endpoints
from bottega.rpc.operation.metrics import link_counts
from bottega.transport import (
    Connection,
    Incoming,
    Limits,
    LinkHandler,
    LinkServer,
    LinkServerSettings,
    kind_of,
)
from bottega.v1.engine_pb2 import EngineBeat, EngineCommand, EngineEvent
from bottega.v1.fleet_pb2 import RunningAttempt
from bottega.worker.config import EngineConfig
from bottega.worker.stages.messages import (
    DecodedPixels,
    EncodeRequest,
    StageMessageKind,
    conditions_message,
    pixels_message,
    read_cancel,
    read_decode,
    read_encode,
    refused_message,
)

# Requests of one worker that wait. A worker runs some tens of jobs.
_MAX_WAITING = 1024
_SETTINGS = LinkServerSettings(limits=Limits(slots=8, slot_bytes=128 << 20))
_BEAT_S = 0.1
_IDLE_BEAT_S = 0.5
# Longest pause between two heartbeats.
_REST_BEAT_S = 2.0
# Weight of a new measurement in the average seconds of a request.
_WEIGHT = 0.2
# Side of the latent that is decoded at the start, so that the first request does not wait for one-time work.
_WARM_UP_SIDE = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTask:
    """A request that waits to be computed."""

    link: StageWorkerLink
    number: int
    compute: Callable[[], TensorMessage]
    """Returns the answer. Called by the main thread."""


class StageQueue:
    """The requests of all connections, in the order in which they came. Any thread may call it."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[StageTask] = queue.SimpleQueue()

    def put(self, task: StageTask) -> None:
        """Add a request."""
        self._tasks.put(task)

    def next(self, timeout_s: float) -> StageTask | None:
        """Remove and return the next request that is still wanted; None if none comes in time."""
        while True:
            try:
                task = self._tasks.get(timeout=timeout_s)
            except queue.Empty:
                return None
            if task.link.take(task.number):
                return task

    @property
    def is_empty(self) -> bool:
        """Whether no request waits."""
        return self._tasks.empty()


class StageWorkerLink(LinkHandler):
    """The connection of one worker."""

    def __init__(self, connection: Connection, server: StageLinks) -> None:
        self.connection = connection
        self._server = server
        self._waiting: set[int] = set()
        self._changing = threading.Lock()

    @property
    def progress(self) -> int:
        """A counter that rises while the main thread makes progress."""
        return self._server.progress

    def on_message(self, connection: Connection, incoming: Incoming) -> None:
        """Handle a message. Raise ValueError if it breaks a rule, which ends the connection."""
        layout, model = incoming.layout, self._server.model
        with incoming:
            parts = connection.wait_all_parts(incoming)
            kind = StageMessageKind(kind_of(layout))
            if kind is StageMessageKind.CANCEL:
                self.take(read_cancel(layout, parts))
            elif kind is StageMessageKind.ENCODE and self._server.kind == kinds.ENCODE:
                request = read_encode(layout, parts)
                self._add(request.number, lambda: self._server.encode(request))
            elif kind is StageMessageKind.DECODE and self._server.kind == kinds.DECODE:
                number, latent = read_decode(layout, parts, model)
                self._add(number, lambda: self._server.decode(number, latent))
            else:
                raise ValueError(f"a worker must not send {kind} messages to one with the role {self._server.kind}")

    def on_end(self, cause: BottegaError) -> None:
        """Forget its requests, which the worker sends to another one."""
        with self._changing:
            self._waiting.clear()

    def take(self, number: int) -> bool:
        """Remove a request from those that wait. Return whether it was there."""
        with self._changing:
            is_there = number in self._waiting
            self._waiting.discard(number)
            return is_there

    def _add(self, number: int, compute: Callable[[], TensorMessage]) -> None:
        with self._changing:
            if number in self._waiting:
                raise ValueError(f"request {number} was sent twice")
            is_full = len(self._waiting) >= _MAX_WAITING
            if not is_full:
                self._waiting.add(number)
        if is_full:
            what = f"{_MAX_WAITING} requests of this worker wait, as many as may"
            self.connection.send(refused_message(number, QueueFull(what, metadata={"limit": "waiting"})))
        elif self._server.draining:
            self.take(number)
            self.connection.send(refused_message(number, Draining("the worker is stopping")))
        else:
            self._server.tasks.put(StageTask(link=self, number=number, compute=compute))


class StageLinks(LinkServer[StageWorkerLink]):
    """The server of the connections of all workers.

    Args:
        config: The engine's configuration, which has one role.
        model: The model, of which the parts for this role are loaded.

    Raises:
        ConfigError: An address cannot be bound.
    """

    def __init__(self, config: EngineConfig, model: Model) -> None:
        self.kind, self.model = config.kind, model
        self.tasks = StageQueue()
        self.progress = 0
        self._max_pixels = max_pixels(EngineLimits(max_pixels=config.max_pixels), model)
        links = config.links
        super().__init__(
            link_endpoints(links.listen, links.socket, seal=links.seal),
            service=f"the worker with the role {config.kind}",
            settings=_SETTINGS,
        )

    def new_handler(self, connection: Connection) -> StageWorkerLink:
        """Return the handler of a new connection."""
        return StageWorkerLink(connection, self)

    def encode(self, request: EncodeRequest) -> TensorMessage:
        """Encode the prompts of a request, and return the answer."""
        began_s = time.monotonic()
        conditions = encode_all_prompts(self.model, request.spec(self.model))
        self.model.runtime.synchronize()
        return conditions_message(request.number, conditions, seconds=time.monotonic() - began_s)

    @torch.inference_mode()
    def decode(self, number: int, latent: torch.Tensor) -> TensorMessage:
        """Decode a latent on the host, and return the answer.

        Raises:
            TooLarge: The picture is too large for this worker.
            MemoryError: A CPU has no memory for it.
        """
        began_s, model = time.monotonic(), self.model
        pixels = latent.shape[-2] * latent.shape[-1] * model.latent_scale**2
        if pixels > self._max_pixels:
            raise TooLarge(
                f"a picture has {pixels} pixels; the worker that decodes draws at most {self._max_pixels} (max_pixels)",
                metadata={"limit": "max_pixels", "max_pixels": str(self._max_pixels)},
            )
        check_decodable(model, latent)
        decoded = decode_image(model, model.runtime.to_device(latent))
        image, finite = decoded.pixels.cpu(), bool(decoded.finite)
        answer = DecodedPixels(
            number=number,
            seconds=time.monotonic() - began_s,
            how=model.decoder.as_decoded(tiled=decoded.tiled),
            finite=finite,
            pixels=image,
        )
        return pixels_message(answer)

    def warm_up(self) -> None:
        """Compute a small request, so that the first real one does not wait for one-time work."""
        model = self.model
        if self.kind == kinds.DECODE:
            side = _WARM_UP_SIDE
            self.decode(0, torch.zeros(1, model.latent_channels, side, side, dtype=model.dtype))
            return
        request = EncodeRequest(
            number=0,
            prompt="",
            prompts=(),
            prompt_2=None,
            negative_prompt="",
            negative_prompt_2=None,
            weighted=False,
            clip_skip=None,
            guidance_scale=model.defaults.guidance_scale,
            width=model.defaults.width,
            height=model.defaults.height,
            num_images=1,
        )
        self.encode(request)


class StageLoop:
    """The loop of the engine process, whose thread computes. It ends when the pipe is closed.

    Args:
        max_quiet_s: Longest pause in seconds between two heartbeats of an idle engine.
    """

    def __init__(self, channel: FramedPipe, links: StageLinks, heartbeat: Heartbeat, *, max_quiet_s: float) -> None:
        self._channel = channel
        self._links = links
        self._max_quiet_s = max_quiet_s
        self._memory = DeviceMemoryMeter(links.model.runtime, links.model.memory)
        self._turns = 0
        self._busy = False
        self._request_s = 0.0
        self._beaten_s = time.monotonic()
        heartbeat.subscribe(self._alive)

    def run(self) -> None:
        """Serve until the pipe closes, which ends the process."""
        threading.Thread(target=self._listen, name="commands", daemon=True).start()
        while True:
            task = self._links.tasks.next(max(_IDLE_BEAT_S, min(_REST_BEAT_S, self._max_quiet_s)))
            if task is not None:
                self._compute(task)
            self._memory.look_if_due()
            self._beat_if_due()

    def _compute(self, task: StageTask) -> None:
        self._busy, began_s = True, time.monotonic()
        try:
            answer = task.compute()
        except Exception as error:  # noqa: BLE001 - the boundary of a request: its failure is not the others'
            answer = refused_message(task.number, to_job_failure(error))
        self._busy = False
        self._turns += 1
        self._links.progress += 1
        took_s = time.monotonic() - began_s
        self._request_s += (took_s - self._request_s) * (_WEIGHT if self._request_s else 1.0)
        task.link.connection.send(answer)

    def _listen(self) -> None:
        while (frame := self._channel.recv()) is not None:
            command = EngineCommand.FromString(frame)
            if command.HasField("open_link"):
                self._send(EngineEvent(link_result=answer_link_request(self._links, command.open_link)))
        self._links.close()  # workers learn at once that they have to ask another one
        os._exit(0)  # the front is gone

    def _alive(self) -> None:
        self._links.progress += 1
        self._beat_if_due()

    def _beat_if_due(self) -> None:
        if time.monotonic() - self._beaten_s < _BEAT_S:
            return
        self._beaten_s = time.monotonic()
        links = self._links
        beat = EngineBeat(
            turns=self._turns,
            steps=self._turns,
            # While it computes, its supervisor expects progress.
            running=[RunningAttempt(steps_left=1)] if self._busy else [],
            fixed_s=self._request_s,
            links=link_counts(links.counters, open_links=len(links.handlers)),
            device_memory=self._memory.last,
        )
        self._send(EngineEvent(beat=beat))

    def _send(self, event: EngineEvent) -> None:
        self._channel.send(event.SerializeToString())


def serve_stage(
    channel: FramedPipe, config: EngineConfig, model: Model, ready: EngineEvent, *, max_quiet_s: float
) -> None:
    """Serve one stage of a model until the front process closes the pipe.

    Args:
        ready: The message that the engine is ready.
        max_quiet_s: See StageLoop.

    Raises:
        ConfigError: An address for connections cannot be bound.
        Unavailable: The front process is gone.
    """
    heartbeat = Heartbeat()
    call_after_blocks((model.vae.decoder, *model.text_encoders), heartbeat.beat)
    links = StageLinks(config, model)
    links.warm_up()
    loop = StageLoop(channel, links, heartbeat, max_quiet_s=max_quiet_s)
    channel.send(ready.SerializeToString())
    loop.run()
