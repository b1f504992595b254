"""How a scaler starts and stops services: as units of systemd, or as child processes where there is no systemd."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from bottega.client.suite.plan import ProcessPlan
from bottega.client.suite.service_process import DoesNotStart, RestartPolicy, ServiceProcess
from bottega.errors import BottegaError, ConfigError, Unavailable
from bottega.scale.pools import UnitState

_SYSTEMCTL = "systemctl"
# A call only queues a job or reads states. systemd on a busy machine was seen to take seconds.
_SYSTEMCTL_S = 30.0
# As TimeoutStopSec of the units: more than server.drain_grace_s, so that a drain is never cut short.
_STOP_GRACE_S = 45.0

_log = logging.getLogger(__name__)


class Units(Protocol):
    """Starts and stops units. No method waits until a unit has started or stopped."""

    @property
    def pids(self) -> Mapping[str, int]:
        """Process IDs of the units, as `states` has seen them last; 0 for a unit that does not run."""

    async def states(self, units: Sequence[str]) -> Mapping[str, UnitState]:
        """Return the states of units. Raise Unavailable if they cannot be read now."""

    async def start(self, unit: str) -> None:
        """Begin to start a unit. Raise Unavailable if the manager refuses it."""

    async def stop(self, unit: str) -> None:
        """Begin to stop a unit with SIGTERM, on which the service drains. Raise Unavailable."""

    async def close(self) -> None:
        """End what ends with the scaler."""


_STATES = {
    "active": UnitState.READY,
    "reloading": UnitState.READY,
    "inactive": UnitState.STOPPED,
    "failed": UnitState.FAILED,
    "activating": UnitState.STARTING,
    "deactivating": UnitState.STOPPING,
}


class SystemdUnits:
    """The units of this host's systemd. They go on when the scaler ends.

    Args:
        command: Name or path of systemctl.
    """

    def __init__(self, command: str = _SYSTEMCTL) -> None:
        self._command = command
        self.pids: dict[str, int] = {}

    async def states(self, units: Sequence[str]) -> Mapping[str, UnitState]:
        properties = "--property=Id,LoadState,ActiveState,SubState,Job,MainPID"
        text = await self._call("show", properties, "--", *units, what="systemctl show")
        found: dict[str, UnitState] = {}
        for block in text.split("\n\n"):
            fields = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
            unit = fields.get("Id", "")
            if fields.get("LoadState") == "not-found":
                raise ConfigError(f"the unit {unit} is not installed on this host: see deploy/README.md")
            if unit:
                self.pids[unit] = int(fields.get("MainPID") or 0)
            if fields.get("SubState") == "auto-restart":
                found[unit] = UnitState.RESTARTING
            elif fields.get("ActiveState") in ("inactive", "failed") and fields.get("Job"):
                found[unit] = UnitState.STARTING  # its start is queued; the state is that of the time before
            elif fields.get("ActiveState") in _STATES:
                found[unit] = _STATES[fields["ActiveState"]]
        return found

    async def start(self, unit: str) -> None:
        await self._call("start", "--no-block", "--", unit, what=f"systemctl start {unit}")

    async def stop(self, unit: str) -> None:
        await self._call("stop", "--no-block", "--", unit, what=f"systemctl stop {unit}")

    async def close(self) -> None:
        """Do nothing, as the units are systemd's."""

    async def _call(self, *arguments: str, what: str) -> str:
        try:
            process = await asyncio.create_subprocess_exec(
                self._command,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            raise ConfigError(
                f"{self._command} cannot be started: {error.strerror}; without systemd set manager: processes"
            ) from None
        try:
            output, errors = await asyncio.wait_for(process.communicate(), _SYSTEMCTL_S)
        except TimeoutError:
            process.kill()
            await process.wait()
            raise Unavailable(f"{what} took longer than {_SYSTEMCTL_S:g} s") from None
        if process.returncode:
            lines = errors.decode(errors="replace").strip().splitlines() or [f"status {process.returncode}"]
            raise Unavailable(f"{what}: {lines[-1]}")
        return output.decode(errors="replace")


class ProcessUnits:
    """Services as child processes of the scaler. They are restarted if they die, and end with the scaler.

    Args:
        plans: The process of each unit.
        logs: Folder of their logs.
    """

    def __init__(self, plans: Mapping[str, ProcessPlan], logs: Path) -> None:
        self._plans = plans
        self._logs = logs
        self._running: dict[str, tuple[ServiceProcess, asyncio.Task[None]]] = {}
        self._stopping: set[str] = set()
        self.pids: dict[str, int] = {}

    async def states(self, units: Sequence[str]) -> Mapping[str, UnitState]:
        self.pids = {unit: process.pid or 0 for unit, (process, _) in self._running.items()}
        return {unit: self._state(unit) for unit in units}

    async def start(self, unit: str) -> None:
        self._stopping.discard(unit)
        policy = RestartPolicy(stop_grace_s=_STOP_GRACE_S)
        process = ServiceProcess(self._plans[unit], self._logs, _ServiceEvents(), policy)
        self._running[unit] = process, asyncio.create_task(process.run(), name=unit)

    async def stop(self, unit: str) -> None:
        if unit in self._running:
            self._stopping.add(unit)
            self._running[unit][1].cancel()

    async def close(self) -> None:
        for unit in list(self._running):
            await self.stop(unit)
        await asyncio.gather(*(task for _, task in self._running.values()), return_exceptions=True)

    def _state(self, unit: str) -> UnitState:
        process, task = self._running.get(unit, (None, None))
        if process is None or task is None:
            return UnitState.STOPPED
        if not task.done():
            if unit in self._stopping:
                return UnitState.STOPPING
            return UnitState.READY if process.serving.is_set() else UnitState.STARTING
        del self._running[unit]
        if unit in self._stopping or task.cancelled():
            return UnitState.STOPPED
        error = task.exception()
        what = error.message if isinstance(error, BottegaError) else repr(error)
        last = error.last_lines[-1:] if isinstance(error, DoesNotStart) else ()
        _log.warning("a service does not start", extra={"unit": unit, "text": what, "last_line": "".join(last)})
        return UnitState.FAILED


class _ServiceEvents:
    """Logs the events of child processes."""

    def starting(self, name: str, progress: str) -> None:
        """Handle the progress of a start, which the service's own log has."""

    def serving(self, name: str, address: str) -> None:
        _log.info("a service serves", extra={"service_name": name, "address": address})

    def died(self, name: str, how: str, wait_s: float) -> None:
        _log.warning("a service died", extra={"service_name": name, "text": how, "wait_s": wait_s})

    def not_forked(self, reason: str) -> None:
        """Handle a failed fork server, of which there is none here."""
