"""The supervisor of a service's engine process: it starts the engine, sends commands, watches and replaces it.

The engine owns a device. If it crashes, hangs or runs out of memory, only its own work is lost. While it starts it
reports its progress, and is killed after `start_stall_s` without any. From then on every message is a sign of life. The
engine is killed after `hang_s` without one, and if it has work but completes no forward pass for `stall_s`. Time in
which this process itself was stopped does not count against the engine. A new engine is started after a growing pause.
When three in a row did not get ready, the supervisor gives up with an error. This module does not know the content of
messages.

Each operator of a network is split between threads, which then wait for the next operator. Sleeping threads cost
nothing but take some 50 microseconds to wake. Spinning threads begin at once, but take the core from other processes.
All threads sleep if a process has more of them than cores, which `bottega.device.devices` prevents.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import ClassVar, Generic, Protocol, TypeVar

from google.protobuf.message import DecodeError, Message

from bottega.background_tasks import copied, running
from bottega.clocks import AwakeClock
from bottega.errors import BottegaError, ConfigError, InternalError, TooManyOpenFiles, Unavailable
from bottega.process.child import ChildProcess

AnswerT = TypeVar("AnswerT")
CommandT = TypeVar("CommandT", bound=Message)
EventT = TypeVar("EventT", bound=Message)
ReadyT = TypeVar("ReadyT", bound=Message)
Ready_contra = TypeVar("Ready_contra", contravariant=True)
Event_contra = TypeVar("Event_contra", contravariant=True)

# Number of loops that libgomp's threads spin before they sleep: some tens of microseconds, about the time between two
# operators. Measured with two threads on two cores, 0 against 10,000: a forward of SDXL's topology at a quarter of its
# width 1.57 s and 1.18 s, one of an edit .50 s and .28 s; with a second such process 2.3 s and 2.9 s, .48 s and .99 s.
# Without a bound ("active") two processes slow each other down 80-fold.
_TURNS = 10_000
# glibc asks for huge pages if the system leaves that to programs (transparent_hugepage=madvise, as in Debian). In the
# same forwards it saved 6,700 page faults, 1 % of the time of a full one, and 3 to 5 % of an edit's.
_HUGE_PAGES = "glibc.malloc.hugetlb=1"
# MKL's matrix products do not depend on the addresses of their arguments then. Without it, on an EPYC with AVX-512,
# products with one row of a batch had four results, by the address of the weights modulo 16 bytes, which differs from
# one start of an engine to the next. Measured there with one thread: products of SDXL's sizes take the same time.
_SAME_BITS = "AUTO,STRICT"

# Transformers warns about image processors that are not used here.
_ENVIRONMENT = {"TRANSFORMERS_VERBOSITY": "error"}
# The engine reads its pipe between two forward passes. If so many commands wait, it has stopped reading.
_MAX_COMMANDS = 1024
_STOP_GRACE_S = 2.0
# How often an engine's silence is checked, and how many times at least before it is given up. An idle engine sends a
# message before the first check.
_LOOK_S = 6.0
_LEAST_LOOKS = 5
_FIRST_PAUSE_S = 0.2
_MAX_PAUSE_S = 10.0
# An idle engine that has nothing new to report sends a message at least this often, and several within hang_s.
_MAX_QUIET_S = 4.0
_QUIET_SHARE = 0.2
# A missing device or a damaged model file is not repaired by a fourth start.
_MOST_FAILED_STARTS = 3

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StartProgress:
    """The progress of an engine that is still starting."""

    stage: str
    """Description of the current stage, for users."""
    done_bytes: int = 0
    total_bytes: int = 0
    """Bytes to process in this stage; 0 if the stage does not count bytes."""


class EngineListener(Protocol[Ready_contra, Event_contra]):
    """Receives the messages of an engine."""

    async def on_engine_starting(self, progress: StartProgress) -> None:
        """Handle a new stage of the engine's start, or progress in a stage."""

    async def on_engine_ready(self, ready: Ready_contra) -> None:
        """Handle that the engine is ready and accepts commands."""

    async def on_engine_event(self, event: Event_contra) -> None:
        """Handle an event. Must be fast, because the engine's next message waits for it."""

    async def on_engine_lost(self, why: str) -> None:
        """Handle the loss of the engine and all of its work. `why` is the reason as text."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimeouts:
    """Times in seconds after which an engine is killed and replaced."""

    start_stall_s: float
    """Seconds without progress while the engine starts."""
    hang_s: float
    """Seconds without any message from a ready engine."""
    stall_s: float
    """Seconds without a completed forward pass while the engine has work."""

    @property
    def max_quiet_s(self) -> float:
        """Longest pause in seconds between two messages of an idle engine."""
        return min(_MAX_QUIET_S, self.hang_s * _QUIET_SHARE)


class EngineSupervisor(ABC, Generic[CommandT, EventT, ReadyT]):
    """Keeps one engine process running. Call `spawn`, then `watch` until the end, then `stop`.

    Subclasses define the messages. `lost` is the error for a command while no engine is running.

    Args:
        exclusive_cores: See engine_environment.
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
        """Parse a frame as an event. Raises DecodeError."""

    @abstractmethod
    def ready(self, event: EventT) -> ReadyT | None:
        """Return the engine's properties if the event says that it is ready; None for all other events."""

    def starting(self, event: EventT) -> StartProgress | None:
        """Return the progress if the event is one of the engine's start; None for all other events."""
        return None

    @abstractmethod
    def turns(self, event: EventT) -> int | None:
        """Return the number of forward passes so far if the event is from an engine with work; else None."""

    @property
    def pid(self) -> int | None:
        """Process ID of the engine, or None."""
        return self._child.pid if self._child else None

    @property
    def age_s(self) -> float:
        """Seconds since the newest process was spawned."""
        return time.monotonic() - self._spawned_at

    async def spawn(self) -> None:
        """Start the process, without waiting until it is ready."""
        self._spawned_at = time.monotonic()
        self._child = await ChildProcess.start(self._module, *self._arguments, env=self._environment)

    async def watch(self, listener: EngineListener[ReadyT, EventT]) -> None:
        """Start engine processes, one after the other, and pass their messages to the listener until cancelled.

        Raises:
            ConfigError: An engine ended because of its configuration, or a file that it names. Another one would end,
                too.
            InternalError: Several engines in a row did not get ready.
        """
        pause_s, failed_starts = _FIRST_PAUSE_S, 0
        while True:
            was_ready, why = await self._run_once(listener)
            exit_code = await self.stop()
            _log.error("engine lost", extra={"why": why, "was_ready": was_ready, "exit_code": exit_code})
            if not was_ready and exit_code == ConfigError.exit_status:
                raise ConfigError("the engine cannot use its configuration; its last log lines say why")
            await _deliver(listener.on_engine_lost(why))
            failed_starts = 0 if was_ready else failed_starts + 1
            if failed_starts == _MOST_FAILED_STARTS:
                raise InternalError(
                    f"the engine could not be started {failed_starts} times in a row; the last reason: {why}"
                )
            pause_s = _FIRST_PAUSE_S if was_ready else min(2 * pause_s, _MAX_PAUSE_S)
            await asyncio.sleep(pause_s)

    def send(self, command: CommandT, size_bytes: int = 0) -> None:
        """Queue a command of approximately that size. Raises `lost` if no engine is ready."""
        if self._commands is None:
            raise self.lost("the engine is being started again")
        try:
            self._commands.put_nowait(_Command(command.SerializeToString, size_bytes))
        except asyncio.QueueFull:
            raise self.lost("the engine does not read its commands") from None

    async def stop(self) -> int | None:
        """End the process: wait for it to exit by itself, then kill it. Does nothing if there is none.

        Returns its exit status, or None if it is unknown.
        """
        self._commands = None
        if self._child is None:
            return None
        child, self._child = self._child, None
        return await child.stop(_STOP_GRACE_S)

    async def _run_once(self, listener: EngineListener[ReadyT, EventT]) -> tuple[bool, str]:
        """Serve one process until it ends. Return whether it had been ready, and why it ended."""
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
        """Return the engine's ready message, or the reason why it does not get ready."""
        stage = ""
        while not isinstance(event := await self._receive_event(child, self._timeouts.start_stall_s), str):
            ready = self.ready(event)
            if ready is not None:
                return ready
            progress = self.starting(event)
            if progress is None:
                return "it sent another event before it was ready"
            stage = f" while {progress.stage}"
            await _deliver(listener.on_engine_starting(progress))
        return f"{event}{stage}, before it was ready; its last log lines say why"

    async def _forward_events(self, child: ChildProcess, listener: EngineListener[ReadyT, EventT]) -> str:
        """Pass the engine's events to the listener until the engine ends. Return the reason."""
        turns, moved_s = -1, self._awake()
        while not isinstance(event := await self._receive_event(child, self._timeouts.hang_s), str):
            now = self.turns(event)
            if now is None or now != turns:
                turns, moved_s = -1 if now is None else now, self._awake()
            if self._awake() - moved_s > self._timeouts.stall_s:
                child.kill()
                return f"it had work but completed no step for {self._timeouts.stall_s:g} s"
            await _deliver(listener.on_engine_event(event))
        return event

    async def _receive_event(self, child: ChildProcess, timeout_s: float) -> EventT | str:
        try:
            async with asyncio.timeout(None) as limit:
                with self._limit_awake_time(limit, timeout_s):
                    frame = await child.channel.recv()
        except TimeoutError:
            child.kill()
            return f"it sent no message for {timeout_s:g} s"
        except InternalError as error:
            return error.message
        if frame is None:
            return "it died or closed its pipe"
        try:
            return await copied(len(frame), lambda: self.read(frame))
        except DecodeError:
            return "it sent a frame that is not an event"

    @contextlib.contextmanager
    def _limit_awake_time(self, limit: asyncio.Timeout, timeout_s: float) -> Iterator[None]:
        """Let `limit` expire after `timeout_s` seconds in the block, without time in which this process was stopped.

        A plain timer would expire as soon as a stopped service continues, before it has read the engine's messages.
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
    """A command that waits to be sent, and its approximate bytes."""

    pack: Callable[[], bytes]
    size_bytes: int


async def _send_commands(child: ChildProcess, commands: asyncio.Queue[_Command]) -> None:
    """Send commands until cancelled, or until the pipe is closed, which `_receive_event` notices as well."""
    while True:
        command = await commands.get()
        frame = await copied(command.size_bytes, command.pack)
        try:
            await child.channel.send(frame)
        except BottegaError:
            return


async def _deliver(telling: Awaitable[None]) -> None:
    """Deliver one event. If that fails, log the error, so that the next events are delivered."""
    try:
        await telling
    except Exception:  # noqa: BLE001 - the boundary of the engine's events; an attempt's own errors end that attempt
        _log.exception("handling an event of the engine failed")


def engine_environment(*, exclusive_cores: bool) -> Mapping[str, str]:
    """Return environment variables that must be set before torch is imported.

    GLIBC_TUNABLES and MKL_CBWR stay as they are if they are set.

    Args:
        exclusive_cores: Whether no other process computes on these cores. If not, threads sleep while they wait.
    """
    return {
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": str(_TURNS if exclusive_cores else 0),
        "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES") or _HUGE_PAGES,
        "MKL_CBWR": os.environ.get("MKL_CBWR") or _SAME_BITS,
    }


class PendingCalls(Generic[AnswerT]):
    """Calls that wait for their answers, by number. Used in one event loop."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[AnswerT]] = {}

    async def call(self, send: Callable[[int], None], timeout_s: float) -> AnswerT:
        """Call `send` with a new number, and return the answer with that number.

        Raises the errors of `send`, an error that answers the call, and Unavailable if no answer comes in time.
        """
        number = next(self._numbers)
        send(number)
        answer: asyncio.Future[AnswerT] = asyncio.get_running_loop().create_future()
        self._pending[number] = answer
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise Unavailable(f"the engine did not answer within {timeout_s:g} s") from None
        finally:
            self._pending.pop(number, None)

    def answer(self, number: int, answer: AnswerT | BottegaError) -> None:
        """Complete a call. Does nothing if the caller no longer waits."""
        call = self._pending.pop(number, None)
        if call is None or call.done():
            return
        if isinstance(answer, BottegaError):
            call.set_exception(answer)
        else:
            call.set_result(answer)

    def fail_all(self, error: BottegaError) -> None:
        """Fail all calls, because the engine was lost."""
        for number in list(self._pending):
            self.answer(number, error)
