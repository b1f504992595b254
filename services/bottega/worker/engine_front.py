"""The front's side of the engine process: starts it, talks to it, watches it, replaces it.

The engine owns the device and the model; a crash, a hang or a flood of memory there costs the attempts
that it held and nothing else. Every word of the engine is a sign of life; after `hang_s` without one it
is killed, and so is one that lives on and makes no step for `stall_s` while it has work. A new one is started
with a growing pause. This module does not know what an attempt is.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import time
from collections.abc import Awaitable
from typing import Protocol

from google.protobuf.message import DecodeError

from bottega.errors import BottegaError, InternalError, WorkerLost
from bottega.process import Child, copied
from bottega.v1.engine_pb2 import EngineCommand, EngineEvent, EngineReady
from bottega.worker.config import EngineConfig

_log = logging.getLogger(__name__)

ENGINE_MODULE = "bottega.worker.engine"

# Two torch processes on the same cores collapse 80-fold when their threads wait actively (measured).
# Transformers warns about image processors that nothing here uses.
_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "TRANSFORMERS_VERBOSITY": "error"}
# The engine reads its pipe between two turns; this many commands waiting means that it has stopped to.
_MAX_COMMANDS = 1024
_STOP_GRACE_S = 2.0
_FIRST_PAUSE_S = 0.2
_MAX_PAUSE_S = 10.0


class EngineListener(Protocol):
    """Who is told what the engine says."""

    async def engine_ready(self, ready: EngineReady) -> None:
        """The engine takes commands from now on."""

    async def engine_said(self, event: EngineEvent) -> None:
        """Something happened. Must be quick: what the engine says next waits for it."""

    async def engine_lost(self, why: str) -> None:
        """The engine is gone, with everything that it held."""


class EngineFront:
    """Keeps one engine process. `spawn` first, then `watch` until the end, then `stop`.

    module: what is run; another one speaks the same frames.
    """

    def __init__(
        self, config: EngineConfig, *, start_s: float, hang_s: float, stall_s: float, module: str = ENGINE_MODULE
    ) -> None:
        self._config = config
        self._start_s = start_s
        self._hang_s = hang_s
        self._stall_s = stall_s
        self._module = module
        self._child: Child | None = None
        self._commands: asyncio.Queue[_Command] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the engine, while there is one."""
        return self._child.pid if self._child else None

    async def spawn(self) -> None:
        """Starts the process; it loads its model while others go on."""
        arguments = ("--config-json", json.dumps(dataclasses.asdict(self._config)))
        self._child = await Child.start(self._module, *arguments, env=_ENVIRONMENT)

    async def watch(self, listener: EngineListener) -> None:
        """Serves the listener until cancelled, with one engine process after the other."""
        pause_s = _FIRST_PAUSE_S
        while True:
            was_ready, why = await self._life(listener)
            exit_code = await self.stop()
            _log.error("engine lost", extra={"why": why, "was_ready": was_ready, "exit_code": exit_code})
            await _told(listener.engine_lost(why))
            pause_s = _FIRST_PAUSE_S if was_ready else min(2 * pause_s, _MAX_PAUSE_S)
            await asyncio.sleep(pause_s)

    def send(self, command: EngineCommand, size_bytes: int = 0) -> None:
        """Queues a command of about that size. Raises WorkerLost when there is no engine that is ready."""
        if self._commands is None:
            raise WorkerLost("the worker's engine is being started again")
        try:
            self._commands.put_nowait(_Command(command, size_bytes))
        except asyncio.QueueFull:
            raise WorkerLost("the worker's engine takes no commands") from None

    async def stop(self) -> int | None:
        """Ends the process: a pause to exit by itself, then by force. Harmless when there is none.

        Returns its exit code, None when it is not known.
        """
        self._commands = None
        if self._child is None:
            return None
        child, self._child = self._child, None
        return await child.stop(_STOP_GRACE_S)

    async def _life(self, listener: EngineListener) -> tuple[bool, str]:
        """Serves one process until it is gone. Whether it had been ready, and why it is gone."""
        try:
            if self._child is None:
                await self.spawn()
        except OSError as error:
            return False, f"it cannot be started: {error.strerror}"
        child = self._child
        assert child is not None  # spawn made it
        event = await self._hear(child, self._start_s)
        if isinstance(event, str):
            return False, event
        if not event.HasField("ready"):
            return False, "its first word was not that it is ready"
        commands: asyncio.Queue[_Command] = asyncio.Queue(_MAX_COMMANDS)
        self._commands = commands
        sending = asyncio.create_task(_send_all(child, commands))
        try:
            await listener.engine_ready(event.ready)
            return True, await self._listen(child, listener)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _listen(self, child: Child, listener: EngineListener) -> str:
        """Passes on what the engine says until it is gone; why it is."""
        steps = _Steps()
        while isinstance(event := await self._hear(child, self._hang_s), EngineEvent):
            if steps.idle_s(event) > self._stall_s:
                child.kill()
                return f"it made no step for {self._stall_s:g} s"
            await _told(listener.engine_said(event))
        return event

    async def _hear(self, child: Child, patience_s: float) -> EngineEvent | str:
        """The next event, or why there is none."""
        try:
            async with asyncio.timeout(patience_s):
                frame = await child.channel.recv()
        except TimeoutError:
            child.kill()
            return f"it said nothing for {patience_s:g} s"
        except InternalError as error:
            return error.message
        if frame is None:
            return "it closed its pipe or died"
        try:
            return await copied(len(frame), lambda: EngineEvent.FromString(frame))
        except DecodeError:
            return "it said what is no event"


class _Steps:
    """Whether an engine that says something also does something."""

    def __init__(self) -> None:
        self._turns = -1
        self._moved_s = time.monotonic()

    def idle_s(self, event: EngineEvent) -> float:
        """Seconds for which it has had work and has neither made a turn nor begun or ended anything."""
        turns = event.beat.turns if event.HasField("beat") else -1
        if turns != self._turns or not event.beat.running:
            self._turns, self._moved_s = turns, time.monotonic()
        return time.monotonic() - self._moved_s


@dataclasses.dataclass(frozen=True, slots=True)
class _Command:
    """A command that waits to be sent, and its size."""

    message: EngineCommand
    size_bytes: int


async def _send_all(child: Child, commands: asyncio.Queue[_Command]) -> None:
    """Sends until cancelled, or until the pipe is closed, which `_hear` notices as well."""
    while True:
        command = await commands.get()
        frame = await copied(command.size_bytes, command.message.SerializeToString)
        try:
            await child.channel.send(frame)
        except BottegaError:
            return


async def _told(telling: Awaitable[None]) -> None:
    """One event that cannot be served must not end the service of the others."""
    try:
        await telling
    except Exception:  # noqa: BLE001 - the boundary of the engine's events; an attempt's own errors end that attempt
        _log.exception("an event of the engine could not be served")
