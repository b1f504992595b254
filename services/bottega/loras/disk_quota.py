"""Limits what the store writes to its disk: a budget of its own, and space that stays free for other programs.

Space is reserved before it is written. Any thread may call this module.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bottega.errors import QueueFull, StorageUnavailable, TooLarge
from bottega.storage import os_errors
from bottega.storage import os_errors as free_space

# Seconds after which to retry: some running uploads have ended by then.
_RETRY_S = 5.0


@dataclass(slots=True, kw_only=True, eq=False)
class Reservation:
    """Reserved disk space for an upload or an import."""

    size_bytes: int
    files: list[Path] = field(default_factory=list)
    """Files that are being written. What they contain already is no longer counted as reserved."""

    @property
    def pending_bytes(self) -> int:
        """Bytes of the reservation that are not written yet."""
        written = 0
        for file in self.files:
            with contextlib.suppress(OSError):  # the file has been renamed or deleted
                written += file.stat().st_size
        return max(0, self.size_bytes - written)


class DiskQuota:
    """The disk space that the store may use.

    Args:
        budget_bytes: Upper bound on the bytes of the store's files, including reservations.
        min_free_bytes: Bytes of disk space that stay free for other programs. At most 5 % of the disk counts.
        kept_bytes: Returns the total size of the files that the store keeps.
    """

    def __init__(self, folder: Path, *, budget_bytes: int, min_free_bytes: int, kept_bytes: Callable[[], int]) -> None:
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._min_free_bytes = min_free_bytes
        self._kept_bytes = kept_bytes
        self._lock = threading.Lock()
        self._reserved: list[Reservation] = []

    @property
    def reserved_bytes(self) -> int:
        """Total size of all reservations."""
        return sum(reservation.size_bytes for reservation in tuple(self._reserved))

    def reserve(self, size_bytes: int) -> Reservation:
        """Reserve space. The caller must release it.

        Raises TooLarge if the budget can never hold it, QueueFull if running uploads have to end first, and
        StorageUnavailable if the disk is full.
        """
        with self._lock:
            self._check_budget(size_bytes)
            self._check_disk(size_bytes)
            reservation = Reservation(size_bytes=size_bytes)
            self._reserved.append(reservation)
            return reservation

    def grow(self, reservation: Reservation, max_bytes: int) -> None:
        """Enlarge a reservation to `max_bytes`, or as far as there is space. Raises StorageUnavailable."""
        with self._lock:
            free_bytes, pending_bytes, min_free_bytes = self._disk()
            left = min(self._left_in_budget, free_bytes - pending_bytes - min_free_bytes)
            reservation.size_bytes += max(0, min(left, max_bytes - reservation.size_bytes))

    def release(self, reservation: Reservation) -> None:
        """Release a reservation, whether or not its space was written to."""
        with self._lock:
            self._reserved.remove(reservation)

    def check_disk(self) -> None:
        """Raise StorageUnavailable if the disk has less free space than must stay free."""
        free_bytes, _, min_free_bytes = self._disk()
        if free_bytes < min_free_bytes:
            raise _disk_full(f"{free_bytes} bytes are free, and {min_free_bytes} must stay free (min_free_bytes)")

    @property
    def _left_in_budget(self) -> int:
        return self._budget_bytes - self._kept_bytes() - self.reserved_bytes

    def _check_budget(self, wanted_bytes: int) -> None:
        left, reserved_bytes = self._left_in_budget, self.reserved_bytes
        if wanted_bytes <= left:
            return
        if wanted_bytes <= left + reserved_bytes:
            raise QueueFull(
                f"running uploads have reserved {reserved_bytes} of the {self._budget_bytes} bytes that the store may "
                "use on its disk (disk_bytes); try again when they have ended",
                retry_after_s=_RETRY_S,
            )
        raise TooLarge(
            f"the store may use {self._budget_bytes} bytes on its disk (disk_bytes): {self._kept_bytes()} are used, "
            f"including the quarantine, and this LoRA needs {wanted_bytes}; remove some LoRAs, or empty the quarantine "
            "(bottega loras quarantine)",
            metadata={"limit": "disk_bytes"},
        )

    def _check_disk(self, wanted_bytes: int) -> None:
        free_bytes, pending_bytes, min_free_bytes = self._disk()
        if wanted_bytes > free_bytes - pending_bytes - min_free_bytes:
            raise _disk_full(
                f"{free_bytes} bytes are free, of which {pending_bytes} are reserved for running uploads and "
                f"{min_free_bytes} must stay free (min_free_bytes); this LoRA needs {wanted_bytes}"
            )

    def _disk(self) -> tuple[int, int, int]:
        """Return the free bytes of the disk, how many of them are reserved, and how many must stay free."""
        free_bytes, kept_bytes = free_space.measure(self._folder, min_free_bytes=self._min_free_bytes)
        return free_bytes, sum(reservation.pending_bytes for reservation in tuple(self._reserved)), kept_bytes


def _disk_full(why: str) -> StorageUnavailable:
    return os_errors.unavailable(f"the disk is full: {why}", cause="ENOSPC")
