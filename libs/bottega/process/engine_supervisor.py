"""A service's side of its engine process: starts it, talks to it, watches it, replaces it.

The engine owns a device; a crash, a hang or a flood of memory there costs what it held and nothing else. While it
starts it says how far it is, and is killed when it has not got further for `start_stall_s`. From then on every word of
it is a sign of life; after `hang_s` without one it is killed, and so is one that lives on and makes no turn for
`stall_s` while it has work. Time in which this side was stopped itself, and received nothing for that reason,
is not held against the engine. A new one is started with a growing pause, until three in a row did not get ready: then
it is for whoever watches the service to decide. This module does not know what is said.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from typing import ClassVar, Generic, Protocol, TypeVar

from google.protobuf.message import DecodeError, Message

from bottega.background_tasks import running
from bottega.clocks import AwakeClock
from bottega.errors import BottegaError, ConfigError, InternalError, TooManyOpenFiles, Unavailable
from bottega.process.child import ChildProcess
from bottega.process.copying import copied
from bottega.process.engine_environment import engine_environment

_log = logging.getLogger(__name__)

# Transformers warns about image processors that nothing here uses.
_ENVIRONMENT = {"TRANSFORMERS_VERBOSITY": "error"}
# The engine reads its pipe between two turns; this many commands waiting means that it has stopped to.
_MAX_COMMANDS = 1024
_STOP_GRACE_S = 2.0
# How often an engine's silence is looked at, and at least so many times before it is given up.
_LOOK_S = 0.5
_LEAST_LOOKS = 5
_FIRST_PAUSE_S = 0.2
_MAX_PAUSE_S = 10.0
# In a row: a device that is gone, or a model's file that is damaged, is not mended by a fourth.
_MOST_FAILED_STARTS = 3

CommandT = TypeVar("CommandT", bound=Message)
EventT = TypeVar("EventT", bound=Message)
ReadyT = TypeVar("ReadyT", bound=Message)
Ready_contra = TypeVar("Ready_contra", contravariant=True)
Event_contra = TypeVar("Event_contra", contravariant=True)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StartProgress:
    """How far an engine is that has not become ready."""

    stage: str
    """What it does, for a person."""
    done_bytes: int = 0
    total_bytes: int = 0
    """Bytes of the stage; 0 where it has none to count."""


class EngineListener(Protocol[Ready_contra, Event_contra]):
    """The interface for messages of the engine."""

    async def on_engine_starting(self, progress: StartProgress) -> None:
        """The engine has begun a stage of its start, or has got further in it."""

    async def on_engine_ready(self, ready: Ready_contra) -> None:
        """The engine takes commands from now on."""

    async def on_engine_event(self, event: Event_contra) -> None:
        """Something happened. Must be quick: what the engine says next waits for it."""

    async def on_engine_lost(self, why: str) -> None:
        """The engine is gone, with everything that it held."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimeouts:
    """Seconds after which an engine is given up."""

    start_stall_s: float
    """Without progress of its start."""
    hang_s: float
    """Without a word."""
    stall_s: float
    """With work and without a turn."""


class EngineSupervisor(ABC, Generic[CommandT, EventT, ReadyT]):
    """Keeps one engine process. `spawn` first, then `watch` until the end, then `stop`.

    Subclasses know what is said. lost: the error of a command to an engine that is not there. exclusive_cores: see
    engine_environment.
    """

    lost: ClassVar[type[Unavailable]] = Unavailable

    def __init__(self, module: str, *arguments: str, timeouts: EngineTimeouts, exclusive_cores: bool = False) -> None:
        self._module = module
        self._arguments = arguments
        self._timeouts = timeouts
        self._environment = {**_ENVIRONMENT, **engine_environment(exclusive_cores=exclusive_cores)}
        self._awake = AwakeClock(min(_LOOK_S, timeouts.hang_s / _LEAST_LOOKS))
        self._child: ChildProcess | None = None
        self._spawned_at = time.monotonic()
        self._commands: asyncio.Queue[_Command] | None = None

    @abstractmethod
    def read(self, frame: bytes) -> EventT:
        """The event of a frame. Raises DecodeError."""

    @abstractmethod
    def ready(self, event: EventT) -> ReadyT | None:
        """What an engine that says that it is ready says of itself; None for all other events."""

    def starting(self, event: EventT) -> StartProgress | None:
        """Return what an engine says of its start; None for all other events."""
        return None

    @abstractmethod
    def turns(self, event: EventT) -> int | None:
        """Turns so far, of an engine that says that it has work; None for all other events."""

    @property
    def pid(self) -> int | None:
        """Process id of the engine, while there is one."""
        return self._child.pid if self._child else None

    @property
    def age_s(self) -> float:
        """Seconds since the newest process was spawned."""
        return time.monotonic() - self._spawned_at

    async def spawn(self) -> None:
        """Starts the process; it gets ready while others go on."""
        self._spawned_at = time.monotonic()
        self._child = await ChildProcess.start(self._module, *self._arguments, env=self._environment)

    async def watch(self, listener: EngineListener[ReadyT, EventT]) -> None:
        """Serve the listener until cancelled, with one engine process after the other.

        Raises:
            ConfigError: An engine ended because of its configuration, or of what this names. Another one would, too.
            InternalError: Several in a row did not get ready.
        """
        pause_s, failed_starts = _FIRST_PAUSE_S, 0
        while True:
            was_ready, why = await self._run_once(listener)
            exit_code = await self.stop()
            _log.error("engine lost", extra={"why": why, "was_ready": was_ready, "exit_code": exit_code})
            if not was_ready and exit_code == ConfigError.exit_status:
                raise ConfigError("the engine cannot use its configuration; what it logged just before says why")
            await _deliver(listener.on_engine_lost(why))
            failed_starts = 0 if was_ready else failed_starts + 1
            if failed_starts == _MOST_FAILED_STARTS:
                raise InternalError(f"the engine could not be started {failed_starts} times in a row; at last: {why}")
            pause_s = _FIRST_PAUSE_S if was_ready else min(2 * pause_s, _MAX_PAUSE_S)
            await asyncio.sleep(pause_s)

    def send(self, command: CommandT, size_bytes: int = 0) -> None:
        """Queues a command of about that size. Raises `lost` when there is no engine that is ready."""
        if self._commands is None:
            raise self.lost("the engine is being started again")
        try:
            self._commands.put_nowait(_Command(command.SerializeToString, size_bytes))
        except asyncio.QueueFull:
            raise self.lost("the engine does not read its commands") from None

    async def stop(self) -> int | None:
        """Ends the process: a pause to exit by itself, then by force. Harmless when there is none.

        Returns its exit code, None when it is not known.
        """
        self._commands = None
        if self._child is None:
            return None
        child, self._child = self._child, None
        return await child.stop(_STOP_GRACE_S)

    async def _run_once(self, listener: EngineListener[ReadyT, EventT]) -> tuple[bool, str]:
        """Serves one process until it is gone. Whether it had been ready, and why it is gone."""
        try:
            if self._child is None:
                await self.spawn()
        except OSError as error:
            return False, f"it cannot be started: {error.strerror}"
        except TooManyOpenFiles as error:
            return False, f"it cannot be started: {error.message}"
        child = self._child
        assert child is not None  # spawn made it
        ready = await self._wait_until_ready(child, listener)
        if isinstance(ready, str):
            return False, ready
        commands: asyncio.Queue[_Command] = asyncio.Queue(_MAX_COMMANDS)
        self._commands = commands
        async with running(_send_commands(child, commands)):
            await listener.on_engine_ready(ready)
            return True, await self._forward_events(child, listener)

    async def _wait_until_ready(self, child: ChildProcess, listener: EngineListener[ReadyT, EventT]) -> ReadyT | str:
        """Return what the engine says of itself when it is ready, or why it does not get so far."""
        stage = ""
        while not isinstance(event := await self._receive_event(child, self._timeouts.start_stall_s), str):
            ready = self.ready(event)
            if ready is not None:
                return ready
            progress = self.starting(event)
            if progress is None:
                return "it said something else before it was ready"
            stage = f" while {progress.stage}"
            await _deliver(listener.on_engine_starting(progress))
        return f"{event}{stage}, before it was ready; what it logged just before says why"

    async def _forward_events(self, child: ChildProcess, listener: EngineListener[ReadyT, EventT]) -> str:
        """Passes on what the engine says until it is gone; why it is."""
        turns, moved_s = -1, self._awake()
        while not isinstance(event := await self._receive_event(child, self._timeouts.hang_s), str):
            now = self.turns(event)
            if now is None or now != turns:
                turns, moved_s = -1 if now is None else now, self._awake()
            if self._awake() - moved_s > self._timeouts.stall_s:
                child.kill()
                return f"it made no step for {self._timeouts.stall_s:g} s"
            await _deliver(listener.on_engine_event(event))
        return event

    async def _receive_event(self, child: ChildProcess, timeout_s: float) -> EventT | str:
        """The next event, or why there is none."""
        try:
            async with asyncio.timeout(None) as limit:
                with self._limit_awake_time(limit, timeout_s):
                    frame = await child.channel.recv()
        except TimeoutError:
            child.kill()
            return f"it said nothing for {timeout_s:g} s"
        except InternalError as error:
            return error.message
        if frame is None:
            return "it closed its pipe or died"
        try:
            return await copied(len(frame), lambda: self.read(frame))
        except DecodeError:
            return "it said what is no event"

    @contextlib.contextmanager
    def _limit_awake_time(self, limit: asyncio.Timeout, timeout_s: float) -> Iterator[None]:
        """Lets `limit` pass after so many seconds of the block in which this process was awake.

        A timer alone is due as soon as a front goes on that was stopped, before it has read what the engine has said.
        """
        loop, until_s = asyncio.get_running_loop(), self._awake() + timeout_s
        looking: asyncio.TimerHandle

        def look() -> None:
            nonlocal looking
            left_s = until_s - self._awake()
            if left_s > 0:
                looking = loop.call_later(min(left_s, self._awake.every_s), look)
            else:
                limit.reschedule(loop.time())

        looking = loop.call_later(min(timeout_s, self._awake.every_s), look)
        try:
            yield
        finally:
            looking.cancel()


@dataclasses.dataclass(frozen=True, slots=True)
class _Command:
    """A command that waits to be sent, and its size."""

    pack: Callable[[], bytes]
    size_bytes: int


async def _send_commands(child: ChildProcess, commands: asyncio.Queue[_Command]) -> None:
    """Sends until cancelled, or until the pipe is closed, which `_receive_event` notices as well."""
    while True:
        command = await commands.get()
        frame = await copied(command.size_bytes, command.pack)
        try:
            await child.channel.send(frame)
        except BottegaError:
            return


async def _deliver(telling: Awaitable[None]) -> None:
    """One event that cannot be served must not end the service of the others."""
    try:
        await telling
    except Exception:  # noqa: BLE001 - the boundary of the engine's events; an attempt's own errors end that attempt
        _log.exception("an event of the engine could not be served")
