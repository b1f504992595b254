"""The front process's client of the worker's engine process. They exchange engine.proto messages.

An engine is starting, ready or dead. It counts as dead, and is replaced, if its start makes no progress for
start_stall_s, if it is ready and sends nothing for hang_s, or if it has work and completes no step for stall_s.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import shutil
import stat
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from bottega.errors import Unavailable, WorkerLost
from bottega.plain_text import progress_text
from bottega.process.engine_supervisor import EngineSupervisor, EngineTimeouts, PendingCalls, StartProgress
from bottega.rpc.status import from_job_error
from bottega.storage.folders import ProcessLock
from bottega.v1 import fleet_pb2
from bottega.v1.engine_pb2 import (
    EngineAnswer,
    EngineBacklog,
    EngineBeat,
    EngineCommand,
    EngineEvent,
    EngineQuestion,
    EngineReady,
    EngineServices,
)
from bottega.v1.link_pb2 import IncomingLinkRequest, LinkOffer, LinkResult, OpenLinkRequest
from bottega.worker.config import EngineConfig

_log = logging.getLogger(__name__)

# Seconds for which a call waits for an offer. A separate thread of the engine answers at once.
_OFFER_S = 3.0

# Seconds after which a stage of the start is logged, and the interval in which it is logged again.
_QUIET_S = 2.0
_REPEAT_S = 10.0
# The stage before the engine's first message.
_FIRST_STAGE = StartProgress(stage="starting the engine")

ENGINE_MODULE = "bottega.worker.engine.main"

_TRIALS = "bottega-trials-"
# A folder is locked right after it is made, so younger ones are left alone.
_MADE_S = 60.0


class TrialFolder:
    """A temporary folder in which an engine writes which acceleration it is trying. It is removed with this object.

    A process that is killed cannot remove its folder, so the next process of the same user does. A living process holds
    a lock on its own folder.
    """

    def __init__(self) -> None:
        _remove_left_folders()
        self.path = Path(tempfile.mkdtemp(prefix=_TRIALS))
        lock = ProcessLock(self.path)
        lock.acquire()
        weakref.finalize(self, _remove, self.path, lock)


class StartMonitor:
    """Watches one start of an engine: logs slow stages and reports progress to systemd and the fleet.

    Args:
        extend: Called at each sign of progress, with a text that describes it.
    """

    def __init__(self, extend: Callable[[str], None]) -> None:
        self._extend = extend
        self._progress = _FIRST_STAGE
        self._stage_began_s = time.monotonic()
        self._seconds: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._begin_stage()

    @property
    def text(self) -> str:
        """Description of the progress, such as "loading unet, 3.1 of 5.1 GB"."""
        return progress_text(self._progress.stage, self._progress.done_bytes, self._progress.total_bytes)

    @property
    def message(self) -> fleet_pb2.StartProgress:
        """The progress as a message to the fleet."""
        progress = self._progress
        return fleet_pb2.StartProgress(
            stage=progress.stage, done_bytes=progress.done_bytes, total_bytes=progress.total_bytes
        )

    def note(self, progress: StartProgress) -> None:
        """Record progress of the engine's start."""
        is_new = progress.stage != self._progress.stage
        if is_new:
            self._end_stage()
        self._progress = progress
        if is_new:
            self._begin_stage()
        self._extend(self.text)

    def end(self) -> dict[str, float]:
        """Stop watching, and return the seconds that each stage took. May be called again."""
        if self._timer is not None:
            self._end_stage()
        return self._seconds

    def _begin_stage(self) -> None:
        self._stage_began_s = time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(_QUIET_S, self._log_stage)

    def _end_stage(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        stage = self._progress.stage
        self._seconds[stage] = self._seconds.get(stage, 0.0) + time.monotonic() - self._stage_began_s

    def _log_stage(self) -> None:
        _log.info("engine starting", extra={"progress": self.text})
        self._timer = asyncio.get_running_loop().call_later(_REPEAT_S, self._log_stage)


class WorkerEngineClient(EngineSupervisor[EngineCommand, EngineEvent, EngineReady]):
    """Supervises a worker's engine process, and sends it the calls that other services make.

    Args:
        module: Module that the process runs. Tests pass another one that exchanges the same messages.
    """

    lost: ClassVar[type[Unavailable]] = WorkerLost

    def __init__(self, config: EngineConfig, *, timeouts: EngineTimeouts, module: str = ENGINE_MODULE) -> None:
        # All engine processes of this worker share it.
        self._trials = TrialFolder()
        trials = str(self._trials.path / "trials.json")
        arguments = (
            *("--config-json", json.dumps(dataclasses.asdict(config))),
            *("--trials", trials),
            *("--max-quiet-s", f"{timeouts.max_quiet_s:g}"),
        )
        self._link_calls: PendingCalls[LinkResult] = PendingCalls()
        self._addon_calls: PendingCalls[EngineAnswer] = PendingCalls()
        self._backlog = -1
        self._services: list[fleet_pb2.ServiceAddress] = []
        super().__init__(module, *arguments, timeouts=timeouts, exclusive_cores=config.exclusive_cores)

    def read(self, frame: bytes) -> EngineEvent:
        return EngineEvent.FromString(frame)

    def ready(self, event: EngineEvent) -> EngineReady | None:
        return event.ready if event.HasField("ready") else None

    def starting(self, event: EngineEvent) -> StartProgress | None:
        """Return the progress in an event of the engine's start; None for all other events."""
        if not event.HasField("starting"):
            return None
        progress = event.starting.progress
        return StartProgress(stage=progress.stage, done_bytes=progress.done_bytes, total_bytes=progress.total_bytes)

    async def open_link(self, request: OpenLinkRequest, *, caller: str) -> LinkOffer:
        """Ask the engine for an offer of a connection to another worker, and return it.

        Args:
            caller: Host of the other worker.

        Raises:
            Unavailable: There is no engine, or it does not answer, or it refuses.
        """
        incoming = IncomingLinkRequest(open=request, caller=caller)

        def send(number: int) -> None:
            incoming.request = number
            self.send(EngineCommand(open_link=incoming))

        return (await self._link_calls.call(send, _OFFER_S)).opened.offer

    async def ask(self, kind: str, question: bytes, timeout_s: float) -> bytes:
        """Send a question to the engine's add-on of a kind, and return the answer; see `EngineAddOn.answer`.

        Raises:
            Unavailable: There is no engine, or it does not answer.
            BottegaError: The add-on refuses.
        """
        asked = EngineQuestion(kind=kind, question=question)

        def send(number: int) -> None:
            asked.request = number
            self.send(EngineCommand(question=asked))

        return (await self._addon_calls.call(send, timeout_s)).answer

    def set_backlog(self, requests: int) -> None:
        """Tell the engine how many requests wait in the gateway's queue, if that has changed."""
        if requests != self._backlog:
            self._backlog = requests
            self._tell(EngineCommand(backlog=EngineBacklog(requests=requests)))

    def set_services(self, services: Sequence[fleet_pb2.ServiceAddress]) -> None:
        """Tell the engine which services it may use, if that has changed."""
        if list(services) != self._services:
            self._services = list(services)
            self._tell(EngineCommand(services=EngineServices(services=services)))

    def forget_fleet(self) -> None:
        """Note that a new engine has been told neither the backlog nor the services."""
        self._backlog, self._services = -1, []

    def _tell(self, command: EngineCommand) -> None:
        with contextlib.suppress(WorkerLost):  # without an engine; the next one is told after its first report
            self.send(command)

    def take_answer(self, event: EngineEvent) -> bool:
        """Complete the call that an event answers. Return False if the event answers no call."""
        match event.WhichOneof("event"):
            case "link_result":
                link = event.link_result
                self._link_calls.answer(link.request, from_job_error(link.error) if link.HasField("error") else link)
            case "answer":
                answer = event.answer
                error = from_job_error(answer.error) if answer.HasField("error") else None
                self._addon_calls.answer(answer.request, error or answer)
            case _:
                return False
        return True

    def on_lost(self, why: str) -> None:
        """Fail the calls that wait for an answer of the lost engine."""
        lost = WorkerLost(f"the worker's engine was lost: {why}")
        self._link_calls.fail_all(lost)
        self._addon_calls.fail_all(lost)

    def turns(self, event: EngineEvent) -> int | None:
        """Return the number of forward passes of an engine with work. A heartbeat without work counts as progress."""
        return event.beat.turns if event.HasField("beat") and event.beat.running else None


def reported_at_once(beat: EngineBeat) -> tuple[object, ...]:
    """Return the values of a heartbeat whose change is reported to the gateway at once.

    All other values wait for the next regular report, because each report costs processor time here and at the gateway.
    The gateway learns the progress of attempts separately, and step times change slowly.
    """
    measured = [(time.latent_height, time.latent_width, time.rows, time.outdated) for time in beat.step_times]
    return measured, list(beat.hosted)


def _remove_left_folders() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_TRIALS}*"):
        with contextlib.suppress(OSError):  # another process holds it, or has just removed it
            status = folder.lstat()
            ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if ours and time.time() - status.st_mtime > _MADE_S:
                lock = ProcessLock(folder)
                lock.acquire()
                _remove(folder, lock)


def _remove(folder: Path, lock: ProcessLock) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    lock.release()
