"""How the threads of links wake the engine's."""

from __future__ import annotations

import threading


class ChangeCondition:
    """A counter of events; a thread that has seen a count may wait for a higher one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0

    @property
    def count(self) -> int:
        """How much has happened."""
        return self._count

    def notify(self) -> None:
        """Something has happened."""
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def wait(self, seen: int, timeout_s: float) -> None:
        """Returns when more than `seen` has happened, or after the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._count > seen, timeout_s)
