"""What may still be written to the store's disk: within its own budget, and beside what stays free for others.

Room is reserved before writing. Any thread may call it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bottega.errors import QueueFull, StorageUnavailable, TooLarge
from bottega.storage import free_space, os_errors

# Uploads under way end, or have become LoRAs, by then.
_RETRY_S = 5.0


@dataclass(slots=True, kw_only=True, eq=False)
class Reservation:
    """Room for what is being written. files: that it is written to, so that what is there already is not counted twice
    against what the disk has left."""

    size_bytes: int
    files: list[Path] = field(default_factory=list)

    @property
    def pending_bytes(self) -> int:
        """What is still to be written."""
        written = 0
        for file in self.files:
            with contextlib.suppress(OSError):  # it has become something else
                written += file.stat().st_size
        return max(0, self.size_bytes - written)


class DiskQuota:
    """folder: on the disk. kept_bytes: called for what is on it for good. min_free_bytes: of the disk, for others; of
    a small one a twentieth."""

    def __init__(self, folder: Path, *, budget_bytes: int, min_free_bytes: int, kept_bytes: Callable[[], int]) -> None:
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._min_free_bytes = min_free_bytes
        self._kept_bytes = kept_bytes
        self._lock = threading.Lock()
        self._reserved: list[Reservation] = []

    @property
    def reserved_bytes(self) -> int:
        """For what is being written."""
        return sum(each.size_bytes for each in tuple(self._reserved))

    def reserve(self, size_bytes: int) -> Reservation:
        """Room for so much. Release it.

        Raises TooLarge where the budget does not allow it, QueueFull where it only does not for now, StorageUnavailable
        where the disk has no room.
        """
        with self._lock:
            self._check_budget(size_bytes)
            self._check_disk(size_bytes)
            made = Reservation(size_bytes=size_bytes)
            self._reserved.append(made)
            return made

    def grow(self, reservation: Reservation, most_bytes: int) -> None:
        """Makes it larger, up to so much, as far as there is room. Raises StorageUnavailable."""
        with self._lock:
            free_bytes, pending_bytes, min_free_bytes = self._disk()
            left = min(self._left_in_budget, free_bytes - pending_bytes - min_free_bytes)
            reservation.size_bytes += max(0, min(left, most_bytes - reservation.size_bytes))

    def release(self, reservation: Reservation) -> None:
        """It has been written, or will not be."""
        with self._lock:
            self._reserved.remove(reservation)

    def check_disk(self) -> None:
        """Raises StorageUnavailable where others have left less of the disk than is to stay free."""
        free_bytes, _, min_free_bytes = self._disk()
        if free_bytes < min_free_bytes:
            raise _disk_full(f"{free_bytes} bytes are free, and {min_free_bytes} stay free (min_free_bytes)")

    @property
    def _left_in_budget(self) -> int:
        return self._budget_bytes - self._kept_bytes() - self.reserved_bytes

    def _check_budget(self, wanted_bytes: int) -> None:
        left, reserved_bytes = self._left_in_budget, self.reserved_bytes
        if wanted_bytes <= left:
            return
        if wanted_bytes <= left + reserved_bytes:
            raise QueueFull(
                f"uploads under way may take {reserved_bytes} of the {self._budget_bytes} bytes that the store may "
                "have on its disk (disk_bytes); try again when they have ended",
                retry_after_s=_RETRY_S,
            )
        raise TooLarge(
            f"the store may have {self._budget_bytes} bytes on its disk (disk_bytes): {self._kept_bytes()} are taken, "
            f"what is in quarantine included, and bringing this takes {wanted_bytes}; remove some LoRAs, or empty the "
            "quarantine (bottega loras quarantine)",
            metadata={"limit": "disk_bytes"},
        )

    def _check_disk(self, wanted_bytes: int) -> None:
        free_bytes, pending_bytes, min_free_bytes = self._disk()
        if wanted_bytes > free_bytes - pending_bytes - min_free_bytes:
            raise _disk_full(
                f"{free_bytes} bytes are free, of which {pending_bytes} are for uploads under way and {min_free_bytes} "
                f"stay free (min_free_bytes); bringing this takes {wanted_bytes}"
            )

    def _disk(self) -> tuple[int, int, int]:
        """Bytes that are free for us; of these, those that are promised, and those that stay free."""
        free_bytes, kept_bytes = free_space.measure(self._folder, min_free_bytes=self._min_free_bytes)
        return free_bytes, sum(each.pending_bytes for each in tuple(self._reserved)), kept_bytes


def _disk_full(why: str) -> StorageUnavailable:
    return os_errors.unavailable(f"the disk is full: {why}", cause="ENOSPC")
