"""A child process with resource limits that serves one call at a time. It starts on demand, and ends when it fails.

A caller that has an untrusted file read must know whether the file killed its reader or the machine was too busy, so a
lost process reports how it was lost.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal

import psutil

from bottega.errors import InternalError, Unavailable
from bottega.process.child import ChildProcess

_logged: set[tuple[str, ...]] = set()

# An interpreter that imports its libraries takes .3 to 4 s. The rest is for a machine that is busy with other work.
_START_S = 60.0
_STOP_S = 2.0
# SIGXCPU comes from RLIMIT_CPU, SIGPROF from the timer that processes of many calls set for each call.
_CPU_SIGNALS = frozenset({-signal.SIGXCPU, -signal.SIGPROF})
# A child that spent less than this share of the deadline as processor time was not slow because of its work.
_BUSY_SHARE = 0.5

_log = logging.getLogger(__name__)


class Loss(StrEnum):
    """The reason why a process was lost during a call."""

    OVERTIME = "took too long"
    """The process was still working at the deadline of the call."""
    STALLED = "stood still"
    """The deadline passed while the process hardly ran: it was stopped, or the machine was busy."""
    CPU_LIMIT = "reached its limit of processor time"
    """The process used all the processor time that a call may take."""
    DIED = "died"
    """The process ended for another reason."""

    @property
    def may_be_chance(self) -> bool:
        """Whether the loss may be accidental, so that the call may succeed in another process."""
        return self in (Loss.STALLED, Loss.DIED)


class ProcessLost(Exception):
    """Raised if the process ended before it answered its call."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(loss.value)
        self.loss = loss


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """The settings of a process `python -m MODULE`, which sends its first frame when it is ready."""

    name: str
    """Name of the process in logs and errors, such as "codec process"."""
    module: str
    deadline_s: float
    """Seconds that one call may take."""
    limits: Mapping[int, int] = field(default_factory=dict)
    """Resource limits. ChildProcess.start describes these, `environment` and `sandbox`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    sandbox: Literal["reads", "writes"] | None = None


class LimitedProcess:
    """A child process that one caller at a time may use."""

    def __init__(self, spec: ProcessSpec) -> None:
        self._spec = spec
        self._child: ChildProcess | None = None

    @property
    def pid(self) -> int | None:
        """Process ID, or None if there is no process."""
        return self._child.pid if self._child else None

    async def start(self, limits: Mapping[int, int] | None = None) -> ChildProcess:
        """Return the process once it is ready, starting one if needed. Raises InternalError.

        Args:
            limits: Limits in addition to those of the spec.
        """
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
            log_missing_restrictions(child.pid)
        return child

    async def exchange(self, frame: bytes, limits: Mapping[int, int] | None = None) -> bytes:
        """Send a frame and return the answer. Raises ProcessLost, InternalError.

        If the caller is cancelled, the process ends, because half a call would confuse the next one. For `limits` see
        `start`.
        """
        try:
            return await self._exchange(await self.start(limits), frame)
        except BaseException:
            if self._child:
                self._child.kill()
            await self.stop()
            raise

    async def stop(self) -> int | None:
        """End the process, if there is one, and return its exit status."""
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
            code = await self.stop()  # not killed: that would hide how it died
            loss = Loss.CPU_LIMIT if code in _CPU_SIGNALS else loss
            facts = {"child": self._spec.name, "pid": child.pid, "why": loss.value, "exit_code": code}
            _log.warning("a child process was lost during a call", extra=facts)
            raise ProcessLost(loss)
        return answer


async def _is_ready(child: ChildProcess) -> bool:
    try:
        async with asyncio.timeout(_START_S):
            return await child.channel.recv() is not None
    except TimeoutError:
        return False


class CpuTime:
    """Measures the processor time of one process, from the creation of this object on."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._began_s = self._now_s()

    def spent_s(self) -> float:
        """Return the processor seconds used since then; 0 if the process has ended."""
        return max(0.0, self._now_s() - self._began_s)

    def stood_still(self, deadline_s: float) -> bool:
        """Return whether the process hardly ran during the last `deadline_s` seconds."""
        return self.spent_s() < _BUSY_SHARE * deadline_s

    def _now_s(self) -> float:
        try:
            used = psutil.Process(self._pid).cpu_times()
        except psutil.Error:
            return 0.0
        return float(used.user + used.system)


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxStatus:
    """The sandbox restrictions that apply to a process."""

    no_network: bool
    """Whether it has a network namespace of its own."""
    filtered: bool
    """Whether it has a system-call filter that this process does not have."""
    no_new_privileges: bool
    """Whether programs that it starts can never have more rights than it has."""

    @property
    def missing(self) -> tuple[str, ...]:
        """The missing restrictions, as texts for users.

        A system-call filter forbids sockets, so it replaces a network namespace.
        """
        parts = {
            "a network of its own": self.no_network or self.filtered,
            "a system-call filter": self.filtered,
            "no new privileges": self.no_new_privileges,
        }
        return tuple(part for part, there in parts.items() if not there)


def sandbox_status(pid: int) -> SandboxStatus | None:
    """Return the sandbox status of a process, or None if it is unknown: the process has ended, or there is no /proc."""
    process, this = Path("/proc") / str(pid), Path("/proc/self")
    try:
        network = (process / "ns/net").readlink() != (this / "ns/net").readlink()
        theirs, ours = _status(process), _status(this)
    except OSError:
        return None
    return SandboxStatus(
        no_network=network,
        filtered=_filters(theirs) > _filters(ours),
        no_new_privileges=theirs.get("NoNewPrivs") == "1",
    )


def log_missing_restrictions(pid: int) -> None:
    """Log once which restrictions a confined child does not have. Call it when the child is ready."""
    known = sandbox_status(pid)
    if known is None or not known.missing or known.missing in _logged:
        return
    _logged.add(known.missing)
    _log.info(
        "processes that open untrusted files lack %s: the kernel refuses it, or the extra 'sandbox' is not installed",
        " and ".join(known.missing),
    )


def _status(process: Path) -> dict[str, str]:
    lines = (line.partition(":") for line in (process / "status").read_text().splitlines())
    return {name: value.strip() for name, _, value in lines}


def _filters(status: dict[str, str]) -> int:
    """Return the number of system-call filters of a process. Kernels before 5.9 report only whether there are any.

    A service may have one from systemd.
    """
    return int(status.get("Seccomp_filters") or status.get("Seccomp") == "2")
