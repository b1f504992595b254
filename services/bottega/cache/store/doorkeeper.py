"""Decides which keys are worth recording: those that are asked about again.

Control images, for example, seldom repeat.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict

# Maximum number of remembered keys, 150 bytes each. The least recently asked ones are forgotten first.
_MOST_KEYS = 65_536


class Doorkeeper:
    """Remembers which keys were asked about. Any thread may call it."""

    def __init__(self, most_keys: int = _MOST_KEYS) -> None:
        self._most_keys = most_keys
        # For each key, the job that asked about it; empty if any other job is accepted.
        self._seen: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def admits(self, key: str, job: str) -> bool:
        """Return whether another job has asked about the key before, and remember the question.

        Args:
            key: In hex.
            job: The job that asks; its retries do not count as another job. "" is unknown, and always counts as
                another.
        """
        short, asker = bytes.fromhex(key), _short(job)
        with self._lock:
            first = self._seen.get(short)
            admitted = first is not None and not (first and first == asker)
            self._seen[short] = b"" if admitted else asker
            self._seen.move_to_end(short)
            if len(self._seen) > self._most_keys:
                self._seen.popitem(last=False)
        return admitted


def _short(job: str) -> bytes:
    return hashlib.blake2b(job.encode(), digest_size=8).digest() if job else b""
