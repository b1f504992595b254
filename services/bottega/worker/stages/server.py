"""The engine process of a worker that computes only one stage: text encoders, or the VAE's decoder, for other workers.

The main thread computes one request after the other, by the shares of their tenants, and sends heartbeats between two
blocks of a network. Each connection has threads of its own. It exchanges the messages of a worker's engine process with
the front process.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
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
from bottega.engine.spec import ResolvedSpec
from bottega.errors import BottegaError, Draining, InternalError, QueueFull, TooLarge
from bottega.fair_order import FairOrder, Share
from bottega.model.decode import check_decodable, decode_image
from bottega.model.model import Model
from bottega.process.child import FramedPipe
from bottega.rpc.link_service import answer_link_request, link_endpoints
from bottega.rpc.operation.metrics import link_counts
from bottega.transport import Connection, Incoming, Limits, Link, LinkHandler, LinkServer, LinkServerSettings, kind_of
from bottega.v1.engine_pb2 import EngineBeat, EngineCommand, EngineEvent
from bottega.v1.fleet_pb2 import RunningAttempt
from bottega.worker.config import EngineConfig
from bottega.worker.engine.messages import add_prompt_metrics
from bottega.worker.stages.messages import (
    DecodedPixels,
    DecodeRequest,
    EncodeRequest,
    StageMessageKind,
    begun_message,
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
# Requests in a row that fail with an internal error, after which the process ends: a fresh one may be sound, while this
# one would fail all jobs, because it answers soonest. A job fails after two of them.
_MAX_FAILURES = 3
# Longest time in seconds that a computation waits for the message that it begins, which takes a fraction of a ms.
_SENT_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTask:
    """A request that waits to be computed."""

    link: StageWorkerLink
    number: int
    share: Share
    compute: Callable[[], TensorMessage]
    """Returns the answer. Called by the main thread."""


class StageQueue:
    """The requests of all connections. Tenants get their shares, and each one's requests are in order of arrival.

    Any thread may call it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tasks: dict[str, deque[StageTask]] = {}  # by tenant; none is empty
        self._order = FairOrder()

    def put(self, task: StageTask) -> None:
        """Add a request."""
        with self._changed:
            self._tasks.setdefault(task.share.tenant, deque()).append(task)
            self._changed.notify_all()

    def next(self, timeout_s: float) -> StageTask | None:
        """Remove and return the next request that is still wanted; None if none comes in time."""
        with self._changed:
            if not self._tasks:
                self._order.idle()
                self._changed.wait_for(lambda: self._tasks, timeout_s)
            while self._tasks:
                tenant = min(self._tasks, key=self._order.next_tag)
                task = self._tasks[tenant].popleft()
                if not self._tasks[tenant]:
                    del self._tasks[tenant]
                if task.link.take(task.number):
                    self._order.served(self._order.next_tag(tenant))
                    return task
        return None

    def charge(self, share: Share, seconds: float) -> None:
        """Charge a tenant for a request that was computed."""
        with self._changed:
            self._order.charge(share.tenant, cost=seconds, weight=share.weight)

    @property
    def is_empty(self) -> bool:
        """Whether no request waits."""
        return not self._tasks


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
                self._add(request, lambda: self._server.encode(request))
            elif kind is StageMessageKind.DECODE and self._server.kind == kinds.DECODE:
                finished = read_decode(layout, parts, model)
                self._add(finished, lambda: self._server.decode(finished.number, finished.latent))
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

    def report_begun(self, number: int) -> None:
        """Tell the worker that the computation of a request begins, and wait until the message is on its way.

        If the computation ends this process, the worker knows which request it was.
        """
        sent = threading.Event()

        def send(link: Link) -> None:
            try:
                self.connection.send_now(link, begun_message(number))
            finally:
                sent.set()

        if self.connection.post(send):
            sent.wait(_SENT_S)

    def _add(self, request: EncodeRequest | DecodeRequest, compute: Callable[[], TensorMessage]) -> None:
        number = request.number
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
            share = Share(tenant=request.share.tenant, weight=request.share.weight)
            self._server.tasks.put(StageTask(link=self, number=number, share=share, compute=compute))


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
        conditions = encode_all_prompts(self.model, request.spec(self.model), tenant=request.share.tenant)
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
        spec = ResolvedSpec(
            prompt="",
            guidance_scale=model.defaults.guidance_scale,
            width=model.defaults.width,
            height=model.defaults.height,
            sampler=model.defaults.sampler,
        )
        encode_all_prompts(model, spec)
        model.runtime.synchronize()


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
        self._failures = 0
        self._busy = False
        self._request_s = 0.0
        self._beaten_s = time.monotonic()
        heartbeat.subscribe(self._alive)

    def run(self) -> None:
        """Serve until the pipe closes, which ends the process.

        Raises:
            RuntimeError: The device has failed, or several requests in a row, so that a fresh process should serve.
        """
        threading.Thread(target=self._listen, name="commands", daemon=True).start()
        while True:
            task = self._links.tasks.next(max(_IDLE_BEAT_S, min(_REST_BEAT_S, self._max_quiet_s)))
            if task is not None:
                self._compute(task)
            self._memory.look_if_due()
            self._beat_if_due()

    def _compute(self, task: StageTask) -> None:
        self._busy, began_s = True, time.monotonic()
        task.link.report_begun(task.number)
        failure: BottegaError | None = None
        try:
            answer = task.compute()
        except Exception as error:  # noqa: BLE001 - the boundary of a request: its failure is not the others'
            failure = to_job_failure(error)
            answer = refused_message(task.number, failure)
        self._busy = False
        self._turns += 1
        self._links.progress += 1
        took_s = time.monotonic() - began_s
        self._request_s += (took_s - self._request_s) * (_WEIGHT if self._request_s else 1.0)
        self._links.tasks.charge(task.share, took_s)
        task.link.connection.send(answer)
        self._check_health(failure)

    def _check_health(self, failure: BottegaError | None) -> None:
        """Raise if this process should compute no more requests."""
        if not isinstance(failure, InternalError):
            self._failures = 0
            return
        self._failures += 1
        self._links.model.runtime.synchronize()  # raises again if the device has failed
        if self._failures >= _MAX_FAILURES:
            raise RuntimeError(f"{self._failures} requests in a row have failed")

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
        add_prompt_metrics(beat, links.model)
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
