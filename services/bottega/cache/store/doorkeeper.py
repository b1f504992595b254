"""Which keys are worth recording: those that are asked about again. Control images, for one, seldom repeat."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict

# Keys that are remembered, 150 bytes each; those that were asked about longest ago are forgotten first.
_MOST_KEYS = 65_536


class Doorkeeper:
    """Any thread may ask."""

    def __init__(self, most_keys: int = _MOST_KEYS) -> None:
        self._most_keys = most_keys
        # By key, the job that has asked about it; empty where any other one will do.
        self._seen: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def admits(self, key: str, job: str) -> bool:
        """Whether another job has asked about the key before; from now on it was asked about.

        key: in hex. job: who asks, whose later attempts are no other request; empty is not known, and always another.
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
