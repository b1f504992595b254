"""The front's side of the worker's engine process, in the words of engine.proto.

An engine is starting, ready or dead. One that makes no progress of its start for start_stall_s, later says nothing for
hang_s, or makes no step for stall_s while it has work, is dead: what it ran is lost, and another one is started.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import stat
import tempfile
import time
import weakref
from pathlib import Path
from typing import ClassVar, Protocol

from bottega import process
from bottega.errors import Unavailable, WorkerLost
from bottega.process import EngineListener, EngineTimeouts, PendingCalls, StartProgress
from bottega.rpc.status import from_job_error
from bottega.storage.process_lock import ProcessLock
from bottega.v1.activations_pb2 import (
    BlockProfile,
    DropTemplateRequest,
    DropTemplateResponse,
    ListTemplatesResponse,
    ProfileBlocksRequest,
)
from bottega.v1.engine_pb2 import (
    EngineCommand,
    EngineEvent,
    EngineProfile,
    EngineProfileRequest,
    EngineReady,
    EngineTemplates,
    EngineTemplatesRequest,
)
from bottega.v1.link_pb2 import IncomingLinkRequest, LinkOffer, LinkResult, OpenLinkRequest
from bottega.worker.config import EngineConfig

# Of an offer: the engine makes it in a thread of its own, at once.
_OFFER_S = 3.0
# Of a word on its templates, which comes between two turns: those of a large model take a while.
_TEMPLATES_S = 60.0
# Of a measurement: some tens of forwards, at least two of each kind, however slow the device is.
_PROFILE_S = 600.0

ENGINE_MODULE = "bottega.worker.engine.main"

_TRIALS = "bottega-trials-"
# A folder is locked as soon as it is made; younger ones are left alone.
_MADE_S = 60.0

WorkerEngineListener = EngineListener[EngineReady, EngineEvent]


class CommandSender(Protocol):
    """Where commands go to the engine process."""

    def send(self, command: EngineCommand, size_bytes: int = 0) -> None:
        """Raises WorkerLost when there is no engine."""


class TrialFolder:
    """A temporary folder in which an engine notes what it tries; it goes with this object.

    A process that is killed cannot remove its own: the next one of this user does. Whose process lives has it locked.
    """

    def __init__(self) -> None:
        _remove_left_folders()
        self.path = Path(tempfile.mkdtemp(prefix=_TRIALS))
        lock = ProcessLock(self.path)
        lock.acquire()
        weakref.finalize(self, _remove, self.path, lock)


class WorkerEngineClient(process.EngineSupervisor[EngineCommand, EngineEvent, EngineReady]):
    """Keeps the engine process of a worker. module: what is run; another one speaks the same frames."""

    lost: ClassVar[type[Unavailable]] = WorkerLost

    def __init__(self, config: EngineConfig, *, timeouts: EngineTimeouts, module: str = ENGINE_MODULE) -> None:
        # Outlives the engine processes, and ends with this one.
        self._trials = TrialFolder()
        trials = str(self._trials.path / "trials.json")
        arguments = ("--config-json", json.dumps(dataclasses.asdict(config)), "--trials", trials)
        self._calls: PendingCalls[LinkResult] = PendingCalls()
        self._template_calls: PendingCalls[EngineTemplates] = PendingCalls()
        self._profile_calls: PendingCalls[EngineProfile] = PendingCalls()
        super().__init__(module, *arguments, timeouts=timeouts, exclusive_cores=config.exclusive_cores)

    def read(self, frame: bytes) -> EngineEvent:
        return EngineEvent.FromString(frame)

    def ready(self, event: EngineEvent) -> EngineReady | None:
        return event.ready if event.HasField("ready") else None

    def starting(self, event: EngineEvent) -> StartProgress | None:
        """Return how far the start is that an event reports; None for all other events."""
        if not event.HasField("starting"):
            return None
        said = event.starting.progress
        return StartProgress(stage=said.stage, done_bytes=said.done_bytes, total_bytes=said.total_bytes)

    async def open_link(self, request: OpenLinkRequest, *, caller: str) -> LinkOffer:
        """Offers another worker a link. caller: host of the worker.

        Raises what the engine refuses it with, Unavailable when there is no engine.
        """
        incoming = IncomingLinkRequest(open=request, caller=caller)

        def send(number: int) -> None:
            incoming.request = number
            self.send(EngineCommand(open_link=incoming))

        return (await self._calls.call(send, _OFFER_S)).opened.offer

    def on_link_result(self, result: LinkResult) -> None:
        """The engine's answer to `open_link`."""
        self._calls.answer(result.request, from_job_error(result.error) if result.HasField("error") else result)

    async def list_templates(self) -> ListTemplatesResponse:
        """What is recorded for edits. Raises Unavailable when there is no engine, or when it says nothing."""
        return (await self._ask_templates(EngineTemplatesRequest())).listed

    async def drop_template(self, template_id: str) -> DropTemplateResponse:
        """Forgets recordings whose ids begin so. Raises as `list_templates` does."""
        drop = DropTemplateRequest(id=template_id)
        return (await self._ask_templates(EngineTemplatesRequest(drop=drop))).dropped

    def on_templates(self, answer: EngineTemplates) -> None:
        """The engine's answer to either."""
        self._template_calls.answer(answer.request, answer)

    async def profile_blocks(self, request: ProfileBlocksRequest) -> BlockProfile:
        """What the network's blocks take, measured now. Raises what the engine refuses it with, too."""
        question = EngineProfileRequest(profile=request)

        def send(number: int) -> None:
            question.request = number
            self.send(EngineCommand(profile=question))

        return (await self._profile_calls.call(send, _PROFILE_S)).profile

    def on_profile(self, answer: EngineProfile) -> None:
        """The engine's answer to it."""
        self._profile_calls.answer(answer.request, from_job_error(answer.error) if answer.HasField("error") else answer)

    def on_lost(self, why: str) -> None:
        """There is nobody to answer any more."""
        lost = WorkerLost(f"the worker's engine was lost: {why}")
        self._template_calls.fail_all(lost)
        self._profile_calls.fail_all(lost)

    async def _ask_templates(self, question: EngineTemplatesRequest) -> EngineTemplates:
        def send(number: int) -> None:
            question.request = number
            self.send(EngineCommand(templates=question))

        return await self._template_calls.call(send, _TEMPLATES_S)

    def turns(self, event: EngineEvent) -> int | None:
        """Whatever begins or ends an attempt counts as a turn."""
        return event.beat.turns if event.HasField("beat") and event.beat.running else None


def _remove_left_folders() -> None:
    """Remove the folders of trials that processes of this user have left."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_TRIALS}*"):
        with contextlib.suppress(OSError):  # another process is quicker, or still has it
            found = folder.lstat()
            ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
            if ours and time.time() - found.st_mtime > _MADE_S:
                lock = ProcessLock(folder)
                lock.acquire()
                _remove(folder, lock)


def _remove(folder: Path, lock: ProcessLock) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    lock.release()
