"""The state folder of a suite on this machine: its lock, its record and what lies below it."""

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

from bottega.client.files import write_whole
from bottega.errors import BottegaError, Code
from bottega.manifest import read_services
from bottega.state_folder import make_missing, make_private, owner_of, private_files

_INSTANT_S = 0.05
_LOCKS = Path("/proc/locks")
# What an instance makes in the folder beside its services: where there is more, the folder is not theirs alone.
_OURS = frozenset({"config", "logs", "suite.json", "suite.lock"})
_HALF_WRITTEN = ".suite.json."


class AlreadyHeld(Exception):
    """Another instance runs from the state folder. holders: the processes that have its lock, where that is known."""

    def __init__(self, holders: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.holders = holders


class StateFolderUnusable(BottegaError):
    """The state folder is another user's, or cannot be opened or written."""

    code = Code.FAILED_PRECONDITION


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceProcess:
    """A process of a running instance. Its start time tells it from a later one of the same pid."""

    name: str
    pid: int
    started_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceRecord:
    """The record that a running instance keeps of itself."""

    pid: int
    address: str
    """host:port of its gateway."""
    fleet_address: str
    """host:port where that lists the fleet."""
    ready: bool
    """Whether every service has served since the start."""
    children: tuple[InstanceProcess, ...]
    starting: str = ""
    """How far the services are whose start takes long; empty where none does."""


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

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Makes the folder this process's own while the context lasts, and nobody else's to look into.

        All files that this process and its services make are private meanwhile. Raises AlreadyHeld,
        StateFolderUnusable.
        """
        with private_files():
            self.make()
            with self._opened() as lock:
                self._lock_alone(lock)
                yield

    def make(self) -> None:
        """Makes the folders where they are not there, and takes other users' rights to them. Raises as `hold`."""
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
        """Whether there is nothing in the folder but what belongs to a suite. Raises OSError."""
        ours = _OURS.union(_shared_folders(), (service.kind for service in read_services()))
        names = [path.name for path in self.root.iterdir()]
        return all(name in ours or name.startswith(_HALF_WRITTEN) for name in names)

    def others(self) -> str:
        """Who else can read the folder, or change it, in words; empty where nobody can."""
        status = self.root.stat()
        if status.st_uid != os.geteuid():
            return f"belongs to {owner_of(self.root)}, who can read and change what is in it"
        return "is open to other users" if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else ""

    def is_held(self) -> bool:
        """Whether an instance runs from here. Raises StateFolderUnusable where that cannot be seen."""
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
        """Processes that have the lock, as far as the kernel tells: not on every file system, nor across containers."""
        try:
            status = self._lock.stat()
            lines = _LOCKS.read_text(encoding="ascii").splitlines()
        except OSError:
            return ()
        file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        # Such as "4: FLOCK  ADVISORY  WRITE 1274 fd:01:131090 0 EOF"; with an arrow, of who waits for one.
        locks = [line.split() for line in lines if "->" not in line]
        return tuple(int(lock[4]) for lock in locks if lock[1] == "FLOCK" and lock[5] == file and int(lock[4]) > 0)

    def write(self, record: InstanceRecord) -> None:
        """Replaces the record."""
        write_whole(self._record, json.dumps(asdict(record)).encode())

    def read(self) -> InstanceRecord | None:
        """The last record, of an instance that may be gone; None without one that can be read."""
        try:
            values = json.loads(self._record.read_bytes())
            children = tuple(InstanceProcess(**child) for child in values.pop("children"))
            return InstanceRecord(children=children, **values)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None

    def running(self) -> InstanceRecord | None:
        """The instance that runs from here; None when none does, or nobody can see whether one does."""
        try:
            return self.read() if self.is_held() else None
        except StateFolderUnusable:
            return None

    def forget(self) -> None:
        """Removes the record."""
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
                os.fchmod(lock.fileno(), stat.S_IRUSR | stat.S_IWUSR)  # whoever can read it, can hold it
        except OSError as error:
            raise self._unusable(error) from None
        return lock

    def _lock_alone(self, file: IO[str]) -> None:
        # A call of is_held() holds a shared lock for an instant: that is no instance.
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
        """Whose folder it is can read all that is written there, and start what he likes by its configuration."""
        owner = self.root.stat().st_uid
        if os.geteuid() != 0 and owner not in (0, os.geteuid()):
            raise StateFolderUnusable(f"the state folder {self.root} belongs to {owner_of(self.root)}, not to you")

    def _unusable(self, error: OSError) -> StateFolderUnusable:
        owner = owner_of(self.root) if isinstance(error, PermissionError) else ""
        whose = f" ({owner} owns it, or what it is to be made in)" if owner else ""
        return StateFolderUnusable(f"the state folder {self.root} cannot be used: {error.strerror}{whose}")


def _shared_folders() -> set[str]:
    """Names of folders that a service needs besides its own."""
    return {name for service in read_services() for name in service.folders}
