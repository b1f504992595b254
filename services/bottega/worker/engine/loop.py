"""The loop of a worker's engine process, which owns the device and the model and exchanges messages over the pipe.

The loop is one thread and ends when the pipe is closed. It sends heartbeats between two blocks of a network, so that an
engine that hangs becomes silent, while a slow one does not.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

from bottega import kinds
from bottega.device.devices import compute_with
from bottega.device.engine_start import StartReporter
from bottega.device.memory_plan import DeviceMemoryMeter, is_out_of_memory
from bottega.engine.errors import to_job_failure
from bottega.engine.limits import EngineLimits, max_pixels
from bottega.errors import BottegaError, ConfigError, Unavailable
from bottega.process.child import FramedPipe
from bottega.rpc.link_service import answer_link_request
from bottega.rpc.status import to_job_error
from bottega.v1.engine_pb2 import EngineBeat, EngineCommand, EngineCompiling, EngineEvent, EngineReady
from bottega.v1.hosted_pb2 import HOSTED_STATE_LOADING
from bottega.v1.link_pb2 import IncomingLinkRequest, LinkResult
from bottega.worker.config import EngineConfig
from bottega.worker.engine.messages import answer_of, beat_of, event_of, failed, model_message, ready_of
from bottega.worker.engine.orders import key_of, order_of
from bottega.worker.engine.runtime import LinkRequests, Runtime, load_model_for, load_runtime
from bottega.worker.stages.server import serve_stage

_log = logging.getLogger(__name__)

_BEAT_S = 0.1
_IDLE_BEAT_S = 0.5
# The same at rest: after `_REST_AFTER_S` without a command or news to report, and while nothing is loaded.
_REST_BEAT_S = 2.0
_REST_AFTER_S = 10.0
# The same while inputs of the peer's jobs are being received.
_LOOK_S = 0.05


def run(
    channel: FramedPipe,
    config: EngineConfig,
    reporter: StartReporter,
    *,
    trials: Path | None = None,
    max_quiet_s: float = 0.0,
) -> int:
    """Start the engine, serve until the front process closes the pipe, and return the exit status.

    If the engine cannot start, the reason is logged. The status is then 1, or that of ConfigError if another start
    would fail, too.

    Args:
        channel: The pipe to the front process.
        reporter: Reports the progress of the start to the front process.
        trials: See TrialLog.
        max_quiet_s: See WorkerEngineLoop.
    """
    link_requests = LinkRequests(lambda request: channel.send(EngineEvent(link_request=request).SerializeToString()))
    try:
        if config.kind != kinds.WORKER:
            _serve_stage(channel, config, reporter, max_quiet_s=max_quiet_s)
            return 0
        runtime = load_runtime(config, link_requests, reporter, trials=trials)
    except Unavailable:
        return 0  # the front is gone
    except (BottegaError, OSError, ValueError) as error:
        _log.error("the engine cannot start", extra={"model": config.model, "why": str(error)})
        return ConfigError.exit_status if isinstance(error, ConfigError) else 1
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        facts = {"model": config.model, "why": str(error)}
        _log.error("the engine cannot start: its device has not enough memory", extra=facts)
        return 1
    try:
        process = WorkerEngineLoop(channel, runtime, link_requests, max_quiet_s=max_quiet_s)
        channel.send(ready_of(runtime.engine).SerializeToString())
        process.run()
    except Unavailable:
        return 0  # the front is gone
    return 0


def _serve_stage(channel: FramedPipe, config: EngineConfig, reporter: StartReporter, *, max_quiet_s: float) -> None:
    """Load the parts of the model for the worker's only role, and serve it."""
    compute_with(config.threads)
    model = load_model_for(config, reporter)
    most = max_pixels(EngineLimits(max_pixels=config.max_pixels), model)
    ready = EngineReady(model=model_message(model, max_pixels=most), device=str(model.device))
    serve_stage(channel, config, model, EngineEvent(ready=ready), max_quiet_s=max_quiet_s)


class WorkerEngineLoop:
    """The loop that executes commands, calls Engine.turn (one forward pass of a batch) and sends events.

    Args:
        max_quiet_s: Longest pause in seconds between two heartbeats of an idle engine that has nothing new to report.
    """

    def __init__(
        self, channel: FramedPipe, runtime: Runtime, link_requests: LinkRequests, *, max_quiet_s: float = 0.0
    ) -> None:
        self._channel = channel
        self._runtime = runtime
        self._engine = runtime.engine
        self._link_requests = link_requests
        self._commands: queue.SimpleQueue[EngineCommand | Callable[[], None]] = queue.SimpleQueue()
        self._follower = runtime.follow(self._commands.put)
        self._device_memory = DeviceMemoryMeter(runtime.engine.model.runtime, runtime.engine.model.memory)
        self._max_quiet_s = max_quiet_s
        self._reported = EngineBeat()
        self._beaten_s = self._reported_s = self._stirred_s = time.monotonic()

    def run(self) -> None:
        """Serve until the pipe closes, which ends the process."""
        self._runtime.heartbeat.subscribe(self._beat_if_due)
        self._runtime.heartbeat.subscribe_covered(self._say_compiling)
        threading.Thread(target=self._listen, name="commands", daemon=True).start()
        if self._runtime.peer is not None:
            self._runtime.peer.start()
        while True:
            self._run_commands()
            for event in self._engine.turn():
                self._send(event_of(event, self._engine))
            self._update_leader()
            self._device_memory.look_if_due()
            self._beat_if_due()

    def _listen(self) -> None:
        while (frame := self._channel.recv()) is not None:
            command = EngineCommand.FromString(frame)
            if command.HasField("link_result"):
                # Answered in this thread, because the loop may wait for the link.
                self._link_requests.answer(command.link_result)
            elif command.HasField("open_link"):
                self._open_link(command.open_link)
            else:
                self._commands.put(command)
        for addon in self._engine.addons:
            addon.set_services(())
        if self._follower is not None:
            self._follower.close()  # removes the file of its socket
        os._exit(0)  # the front is gone, and a turn may take long

    def _run_commands(self) -> None:
        """Execute all received commands. If the engine has nothing else to do, wait for one."""
        while True:
            try:
                command = self._commands.get(block=not self._engine.busy, timeout=self._pause_s)
            except queue.Empty:
                self._update_leader()
                if self._engine.busy:
                    return
                self._device_memory.look_if_due()
                self._beat_if_due()
            else:
                self._stirred_s = time.monotonic()
                self._run_command(command)

    @property
    def _pause_s(self) -> float:
        if self._engine.remote_jobs.opening:
            return _LOOK_S
        at_rest = self._follower is None and time.monotonic() - self._stirred_s > _REST_AFTER_S
        if at_rest and not any(item.state == HOSTED_STATE_LOADING for item in self._reported.hosted):
            return max(_IDLE_BEAT_S, min(_REST_BEAT_S, self._max_quiet_s))
        return _IDLE_BEAT_S

    def _update_leader(self) -> None:
        if self._follower is not None:
            self._follower.report_busy(busy=self._engine.busy)
            self._follower.report_jobs()

    def _open_link(self, request: IncomingLinkRequest) -> None:
        if self._follower is None:
            error = to_job_error(Unavailable("this worker is not configured for a pair"))
            result = LinkResult(request=request.request, error=error)
        else:
            result = answer_link_request(self._follower, request)
        self._send(EngineEvent(link_result=result))

    def _run_command(self, command: EngineCommand | Callable[[], None]) -> None:
        if not isinstance(command, EngineCommand):
            command()
            self._beat_if_due()
            return
        try:
            self._execute(command)
        except Exception as error:  # noqa: BLE001 - the boundary of a command, which must not end other attempts
            kind = command.WhichOneof("command")
            if kind == "start":
                self._send(failed(command.start.request.attempt, to_job_failure(error)))
            else:
                _log.error("a command of the front process failed", exc_info=error, extra={"command": kind})

    def _execute(self, command: EngineCommand) -> None:
        match command.WhichOneof("command"):
            case "start":
                self._engine.submit(order_of(command.start, self._engine.model))
                self._update_leader()  # before the next turn, so that rows offloaded until now are computed first
            case "cancel":
                self._engine.cancel(key_of(command.cancel.attempt))
            case "backlog":
                self._engine.set_backlog(command.backlog.requests)
            case "preview":
                self._engine.enable_previews(key_of(command.preview.attempt))
            case "question":
                self._send(answer_of(self._engine, command.question))
            case "services":
                self._engine.set_services(command.services.services)

    def _beat_if_due(self) -> None:
        if time.monotonic() - self._beaten_s >= _BEAT_S:
            self._beat()

    def _beat(self) -> None:
        self._beaten_s = time.monotonic()
        runtime = self._runtime
        linked = sum(end is not None and end.linked for end in (runtime.peer, self._follower))
        event = beat_of(runtime, peer_links=linked, device_memory=self._device_memory.last)
        news = _news_of(event.beat)
        is_quiet = not self._engine.busy and self._beaten_s - self._reported_s < self._max_quiet_s
        if news != self._reported:
            self._stirred_s = self._beaten_s
        elif is_quiet:
            return
        self._reported, self._reported_s = news, self._beaten_s
        self._send(event)

    def _say_compiling(self) -> None:
        """Report that a forward pass is being compiled. Called in another thread; reads no state."""
        with contextlib.suppress(Unavailable):  # the loop notices as well that the front is gone
            self._send(EngineEvent(compiling=EngineCompiling()))

    def _send(self, event: EngineEvent) -> None:
        self._channel.send(event.SerializeToString())


def _news_of(beat: EngineBeat) -> EngineBeat:
    """Return a heartbeat without its connection counters, which change with every ping."""
    news = EngineBeat()
    news.CopyFrom(beat)
    news.links.Clear()
    news.links.open = beat.links.open
    return news
