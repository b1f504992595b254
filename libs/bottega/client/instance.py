"""The state folder of a suite on this machine: its lock, the record of the running suite, and subfolders."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from bottega.errors import BottegaError, Code
from bottega.manifest import read_services
from bottega.state_folder import make_missing, make_private, owner_of, private_files, write_whole

_INSTANT_S = 0.05
_LOCKS = Path("/proc/locks")
# What an instance makes in the folder beside the folders of its services. If there is more, the folder is shared.
_OURS = frozenset({"config", "imported", "logs", "suite.json", "suite.lock"})
_HALF_WRITTEN = ".suite.json."


class AlreadyHeld(Exception):
    """The error that a suite already runs from the state folder."""

    def __init__(self, holders: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.holders = holders
        """PIDs of the processes that hold the lock; empty if they cannot be found out."""


class StateFolderUnusable(BottegaError):
    """The error that the state folder belongs to another user, or cannot be opened or written."""

    code = Code.FAILED_PRECONDITION


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceProcess:
    """A process of a running suite. Its start time distinguishes it from a later process with the same PID."""

    name: str
    pid: int
    started_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceRecord:
    """A description of a running suite, which the suite writes to its state folder."""

    pid: int
    address: str
    """host:port of the gateway."""
    fleet_address: str
    """host:port of the gateway's listener for services."""
    ready: bool
    """Whether every service has been ready at least once since the start."""
    children: tuple[InstanceProcess, ...]
    starting: str = ""
    """Progress of the services that are slow to start, as text; empty if there are none."""
    http_address: str = ""
    """host:port of the HTTP API; empty in records of earlier versions."""


@dataclass(frozen=True, slots=True)
class StateFolder:
    """The folder in which a suite keeps its logs, its services' configurations and data, and its record."""

    root: Path

    @property
    def logs(self) -> Path:
        """The folder of the log files: NAME.log of every service, and the output of a suite in the background."""
        return self.root / "logs"

    @property
    def config(self) -> Path:
        """The folder of NAME.yaml, the configuration of each service."""
        return self.root / "config"

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the folder's lock for the `with` block, and make the folder private.

        All files that this process and its services create meanwhile are private to the user.

        Raises:
            AlreadyHeld: Another suite, or another process, holds the lock.
            StateFolderUnusable: The folder cannot be used.
        """
        with private_files():
            self.make()
            with self._opened() as lock:
                self._lock_alone(lock)
                yield

    def make(self) -> None:
        """Create missing folders, and make all of them private. Raise StateFolderUnusable if that fails."""
        try:
            make_missing(self.root)
            self._check_owner()
            if self.is_ours_alone():
                make_private(self.root)
            for folder in (self.logs, self.config, *(self.root / name for name in _shared_folders())):
                make_private(folder)
        except OSError as error:
            raise self._unusable(error) from None

    def is_ours_alone(self) -> bool:
        """Return whether the folder has no files but those of a suite. Raise OSError if it cannot be read."""
        ours = _OURS.union(_shared_folders(), (service.kind for service in read_services()))
        names = [path.name for path in self.root.iterdir()]
        return all(name in ours or name.startswith(_HALF_WRITTEN) for name in names)

    def others(self) -> str:
        """Return a phrase that warns of other users' access to the folder; empty if they have none."""
        status = self.root.stat()
        if status.st_uid != os.geteuid():
            return f"belongs to {owner_of(self.root)}, who can read and change what is in it"
        return "is open to other users" if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else ""

    def is_held(self) -> bool:
        """Return whether a suite runs from here. Raise StateFolderUnusable if the lock cannot be read."""
        try:
            with self._lock.open("r") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        except OSError as error:
            raise self._unusable(error) from None
        return False

    def holders(self) -> tuple[int, ...]:
        """Return the PIDs of the processes that hold the lock; empty on file systems where the kernel does not tell."""
        try:
            status = self._lock.stat()
            lines = _LOCKS.read_text(encoding="ascii").splitlines()
        except OSError:
            return ()
        file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        # A line is such as "4: FLOCK  ADVISORY  WRITE 1274 fd:01:131090 0 EOF"; with an arrow, a process waits for it.
        locks = [line.split() for line in lines if "->" not in line]
        return tuple(int(lock[4]) for lock in locks if lock[1] == "FLOCK" and lock[5] == file and int(lock[4]) > 0)

    def write(self, record: InstanceRecord) -> None:
        write_whole(self._record, json.dumps(asdict(record)).encode())

    def read(self) -> InstanceRecord | None:
        """Return the last record, whose suite may have ended; None if there is no readable record."""
        try:
            values = json.loads(self._record.read_bytes())
            children = tuple(InstanceProcess(**child) for child in values.pop("children"))
            return InstanceRecord(children=children, **values)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None

    def running(self) -> InstanceRecord | None:
        """Return the record of the suite that runs from here; None if none runs, or the lock cannot be read."""
        try:
            return self.read() if self.is_held() else None
        except StateFolderUnusable:
            return None

    def forget(self) -> None:
        """Delete the record."""
        self._record.unlink(missing_ok=True)

    @property
    def _lock(self) -> Path:
        return self.root / "suite.lock"

    @property
    def _record(self) -> Path:
        return self.root / "suite.json"

    def _opened(self) -> IO[str]:
        try:
            lock = self._lock.open("a")
            if os.fstat(lock.fileno()).st_uid == os.geteuid():
                os.fchmod(
                    lock.fileno(), stat.S_IRUSR | stat.S_IWUSR
                )  # any process that can read the file could hold the lock
        except OSError as error:
            raise self._unusable(error) from None
        return lock

    def _lock_alone(self, file: IO[str]) -> None:
        # A call of is_held() also holds the lock, but only for an instant.
        for last in (False, False, False, True):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if last:
                    raise AlreadyHeld(self.holders()) from None
                time.sleep(_INSTANT_S)
            else:
                return

    def _check_owner(self) -> None:
        """Raise if another user owns the folder: that user could read it, and start programs by its configurations."""
        owner = self.root.stat().st_uid
        if os.geteuid() != 0 and owner not in (0, os.geteuid()):
            raise StateFolderUnusable(f"the state folder {self.root} belongs to {owner_of(self.root)}, not to you")

    def _unusable(self, error: OSError) -> StateFolderUnusable:
        owner = owner_of(self.root) if isinstance(error, PermissionError) else ""
        whose = f" ({owner} owns it or its parent folder)" if owner else ""
        return StateFolderUnusable(f"the state folder {self.root} cannot be used: {error.strerror}{whose}")


def _shared_folders() -> set[str]:
    """Return the names of folders that services need besides their own."""
    return {name for service in read_services() for name in service.folders}
