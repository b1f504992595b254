"""A child process behind limits that answers one call at a time: started when it is needed, and ended when it is lost.

A caller that has an untrusted file read in it must tell a file that kills its reader from a machine that had no time
for it: so a lost process says how it was lost.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from bottega.errors import InternalError, Unavailable
from bottega.process import sandbox_status
from bottega.process.child import ChildProcess
from bottega.process.cpu_time import CpuTime

_log = logging.getLogger(__name__)

# An interpreter that imports its libraries takes .3 to 4 s; this is for a machine that is busy with everything else.
_START_S = 60.0
_STOP_S = 2.0
# SIGXCPU: of RLIMIT_CPU. SIGPROF: of the timer that processes of many calls set themselves for each.
_CPU_SIGNALS = frozenset({-signal.SIGXCPU, -signal.SIGPROF})


class Loss(StrEnum):
    """How a process was lost in a call.

    OVERTIME: it worked beyond the deadline. STALLED: the deadline passed and it had hardly run: it was stopped, or the
    machine was busy. CPU_LIMIT: it spent the processor time that a call may take. DIED: in any other way.
    """

    OVERTIME = "took too long"
    STALLED = "stood still"
    CPU_LIMIT = "reached its limit of processor time"
    DIED = "died"

    @property
    def may_be_chance(self) -> bool:
        """Whether the same call may succeed in another process."""
        return self in (Loss.STALLED, Loss.DIED)


class ProcessLost(Exception):
    """The process is gone, and its call has no answer."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(loss.value)
        self.loss = loss


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """How a process is started: `python -m MODULE`, which says that it is ready with its first frame.

    name: for the log and errors, such as "codec process". limits: of resources, see ChildProcess.start, like sandbox
    and environment. deadline_s: of one call.
    """

    name: str
    module: str
    deadline_s: float
    limits: Mapping[int, int] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    sandbox: Literal["reads", "writes"] | None = None


class LimitedProcess:
    """One caller at a time."""

    def __init__(self, spec: ProcessSpec) -> None:
        self._spec = spec
        self._child: ChildProcess | None = None

    @property
    def pid(self) -> int | None:
        """While there is a process."""
        return self._child.pid if self._child else None

    async def start(self, limits: Mapping[int, int] | None = None) -> ChildProcess:
        """Returns when there is a process and it is ready. limits: beside those of its spec. Raises InternalError."""
        if self._child and self._child.exit_code is None:
            return self._child
        await self.stop()
        spec = self._spec
        self._child = child = await ChildProcess.start(
            spec.module, env=spec.environment, limits={**spec.limits, **(limits or {})}, confined=spec.sandbox
        )
        is_ready = False
        try:
            is_ready = await _is_ready(child)
        finally:
            if not is_ready:
                child.kill()
                await self.stop()
        if not is_ready:
            raise InternalError(f"the {spec.name} did not start")
        if spec.sandbox:
            sandbox_status.log_missing(child.pid)
        return child

    async def exchange(self, frame: bytes, limits: Mapping[int, int] | None = None) -> bytes:
        """The answer to a frame. limits: see start. Raises ProcessLost, InternalError.

        A caller that is cancelled ends the process: half a call means nothing to the next one.
        """
        try:
            return await self._exchange(await self.start(limits), frame)
        except BaseException:
            if self._child:
                self._child.kill()
            await self.stop()
            raise

    async def stop(self) -> int | None:
        """Ends the process, if there is one, and returns its exit code."""
        if self._child is None:
            return None
        child, self._child = self._child, None
        return await child.stop(_STOP_S)

    async def _exchange(self, child: ChildProcess, frame: bytes) -> bytes:
        spent, deadline_s = CpuTime(child.pid), self._spec.deadline_s
        answer, loss = None, Loss.DIED
        try:
            async with asyncio.timeout(deadline_s):
                await child.channel.send(frame)
                answer = await child.channel.recv()
        except TimeoutError:
            loss = Loss.STALLED if spent.stood_still(deadline_s) else Loss.OVERTIME
            child.kill()
        except Unavailable:
            pass  # its pipe is closed
        if answer is None:
            code = await self.stop()  # of one that died by itself, killing it would hide how
            loss = Loss.CPU_LIMIT if code in _CPU_SIGNALS else loss
            facts = {"child": self._spec.name, "pid": child.pid, "why": loss.value, "exit_code": code}
            _log.warning("child process lost", extra=facts)
            raise ProcessLost(loss)
        return answer


async def _is_ready(child: ChildProcess) -> bool:
    try:
        async with asyncio.timeout(_START_S):
            return await child.channel.recv() is not None
    except TimeoutError:
        return False
