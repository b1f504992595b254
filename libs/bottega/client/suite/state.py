"""The state folder of a suite on this machine, and who holds it. Knows paths, not services."""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from bottega.client.files import write_whole

_INSTANT_S = 0.05


class AlreadyHeld(Exception):
    """Another instance runs from the state folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A process of a running instance. Its start time tells it from a later one of the same pid."""

    name: str
    pid: int
    started_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a running instance says about itself.

    address: host:port of its gateway. ready: every service has served since the start. fleet_address: where its gateway
    lists the fleet.
    """

    pid: int
    address: str
    ready: bool
    children: tuple[Child, ...]
    fleet_address: str = ""


@dataclass(frozen=True, slots=True)
class StateFolder:
    """Where an instance keeps its logs, its services' configuration and its record."""

    root: Path

    @property
    def logs(self) -> Path:
        """NAME.log of every service, and up.log of a detached instance."""
        return self.root / "logs"

    @property
    def config(self) -> Path:
        """NAME.yaml of every service, as it was started."""
        return self.root / "config"

    @property
    def gateway(self) -> Path:
        """The gateway's jobs and images, which outlive an instance."""
        return self.root / "gateway"

    @property
    def controlnets(self) -> Path:
        """Folders of ControlNets that may be added, which outlive an instance."""
        return self.root / "controlnets"

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Makes the folder this process's own while the context lasts. Raises AlreadyHeld, or OSError."""
        for folder in (self.root, self.logs, self.config, self.controlnets):
            folder.mkdir(parents=True, exist_ok=True)
        with self._lock.open("a") as lock:
            _lock_alone(lock)
            yield

    def is_held(self) -> bool:
        """Whether an instance runs from here."""
        try:
            with self._lock.open("r") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def write(self, record: Record) -> None:
        """Replaces the record."""
        write_whole(self._record, json.dumps(asdict(record)).encode())

    def read(self) -> Record | None:
        """The last record, of an instance that may be gone; None without one that can be read."""
        try:
            values = json.loads(self._record.read_bytes())
            children = tuple(Child(**child) for child in values.pop("children"))
            return Record(children=children, **values)
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def running(self) -> Record | None:
        """The instance that runs from here; None when none does."""
        return self.read() if self.is_held() else None

    def running_address(self) -> str | None:
        """host:port of the gateway of the instance that runs from here; None when none does."""
        record = self.running()
        return record.address if record else None

    def forget(self) -> None:
        """Removes the record."""
        self._record.unlink(missing_ok=True)

    @property
    def _lock(self) -> Path:
        return self.root / "suite.lock"

    @property
    def _record(self) -> Path:
        return self.root / "suite.json"


def _lock_alone(file: IO[str]) -> None:
    # Whoever asks is_held() holds a shared lock for an instant: that is no instance.
    for last in (False, False, False, True):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if last:
                raise AlreadyHeld from None
            time.sleep(_INSTANT_S)
        else:
            return
