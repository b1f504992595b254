"""What loading from stores takes: bytes and seconds, and how fast it has been of late. Any thread may call it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping

# Until something was measured: the network of one gigabyte a second, half used.
_FIRST_BYTES_PER_S = 500e6
# Seconds of loading after which a measurement counts for a third of what it did.
_RECENT_S = 2.0
_LEAST_S = 1e-6
# Seconds without any load after which it is guessed again: a pace that was slow once would keep everybody from loading.
_FORGOTTEN_S = 10.0

EVENTS = (
    "loads",
    "load_bytes",
    "load_ms",
    "loads_refused",
    "loads_lost",
    "loads_cancelled",
    "loads_without_room",
    "waits",
    "wait_ms",
    "uploaded",
    "upload_bytes",
)


class LoadMeter:
    """counts: how often what has happened, by EVENTS and by what others note."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter(dict.fromkeys(EVENTS, 0))
        self._seconds = {"load_ms": 0.0, "wait_ms": 0.0}
        self._recent_bytes = 0.0
        self._recent_s = 0.0
        self._came_at = -_FORGOTTEN_S

    @property
    def counts(self) -> Mapping[str, int]:
        """Of this moment. Those in milliseconds are sums."""
        with self._lock:
            milliseconds = {name: round(1000 * seconds) for name, seconds in self._seconds.items()}
            return {**self._counts, **milliseconds}

    @property
    def bytes_per_s(self) -> float:
        """Of late, while something was being loaded; a guess before, and where that is long ago."""
        with self._lock:
            if not self._recent_bytes or self._clock() - self._came_at >= _FORGOTTEN_S:
                return _FIRST_BYTES_PER_S
            return self._recent_bytes / max(self._recent_s, _LEAST_S)

    def note(self, name: str, count: int = 1) -> None:
        """It has happened so often."""
        with self._lock:
            self._counts[name] += count

    def came(self, size_bytes: int, seconds: float, *, mapped: bool = False) -> None:
        """So much has come, for which so long was waited: seconds in which nothing else came of the same link.

        mapped: it was in this host's memory, which says nothing of how fast the rest is loaded.
        """
        with self._lock:
            self._counts["load_bytes"] += size_bytes
            self._seconds["load_ms"] += seconds
            if mapped:
                return
            self._came_at = self._clock()
            kept = max(0.0, 1 - seconds / _RECENT_S) if self._recent_s > _RECENT_S else 1.0
            self._recent_bytes = kept * self._recent_bytes + size_bytes
            self._recent_s = kept * self._recent_s + seconds

    def waited(self, seconds: float) -> None:
        """The engine has waited for a tensor."""
        with self._lock:
            self._counts["waits"] += 1
            self._seconds["wait_ms"] += seconds


class LinkPace:
    """When something came of one link: the seconds of it, for its meter."""

    def __init__(self, meter: LoadMeter, clock: Callable[[], float] = time.monotonic) -> None:
        self._meter = meter
        self._clock = clock
        self._since_s = 0.0

    def asked(self, *, idle: bool) -> None:
        """More is on its way from now on. idle: nothing was before."""
        if idle:
            self._since_s = self._clock()

    def came(self, size_bytes: int, *, mapped: bool = False) -> None:
        """It has. mapped: see LoadMeter."""
        now_s = self._clock()
        self._meter.came(size_bytes, max(0.0, now_s - self._since_s), mapped=mapped)
        self._since_s = now_s
