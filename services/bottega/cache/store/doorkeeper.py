"""Which keys are worth recording: those that are asked about again. Control images, for one, seldom repeat."""

from __future__ import annotations

import threading
from collections import OrderedDict

# Keys that are remembered, 100 bytes each; those that were asked about longest ago are forgotten first.
_MOST_KEYS = 65_536


class Doorkeeper:
    """Any thread may ask."""

    def __init__(self, most_keys: int = _MOST_KEYS) -> None:
        self._most_keys = most_keys
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()

    def admits(self, key: str) -> bool:
        """Whether the key, in hex, was asked about before; from now on it was."""
        short = bytes.fromhex(key)
        with self._lock:
            known = short in self._seen
            self._seen[short] = None
            self._seen.move_to_end(short)
            if len(self._seen) > self._most_keys:
                self._seen.popitem(last=False)
        return known
