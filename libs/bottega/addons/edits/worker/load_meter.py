"""Measures loading from stores: counts, bytes, seconds and the recent rate. Thread-safe."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping

# Assumed before anything was measured: half of a network of one gigabyte a second.
_FIRST_BYTES_PER_S = 500e6
# After this time of loading a measurement has a third of its weight.
_RECENT_S = 2.0
_LEAST_S = 1e-6
# After this time without any load the rate is assumed again. A rate that was low once would prevent all loading.
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
    """Counters of all loads of a worker."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter(dict.fromkeys(EVENTS, 0))
        self._seconds = {"load_ms": 0.0, "wait_ms": 0.0}
        self._recent_bytes = 0.0
        self._recent_s = 0.0
        self._came_at_s = -_FORGOTTEN_S

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of events, by EVENTS and by the names given to `note`. Values in milliseconds are sums."""
        with self._lock:
            milliseconds = {name: round(1000 * seconds) for name, seconds in self._seconds.items()}
            return {**self._counts, **milliseconds}

    @property
    def bytes_per_s(self) -> float:
        """Recent rate of loading, without idle times. If the last load was long ago, it is a fixed assumption."""
        with self._lock:
            if not self._recent_bytes or self._clock() - self._came_at_s >= _FORGOTTEN_S:
                return _FIRST_BYTES_PER_S
            return self._recent_bytes / max(self._recent_s, _LEAST_S)

    def note(self, name: str, count: int = 1) -> None:
        """Count events of this name."""
        with self._lock:
            self._counts[name] += count

    def came(self, size_bytes: int, seconds: float, *, mapped: bool = False) -> None:
        """Count bytes that have arrived.

        Args:
            seconds: Time that the connection waited for them, without the time of other messages.
            mapped: Whether they are in mapped memory of a store on this host. Such loads do not count for the rate.
        """
        with self._lock:
            self._counts["load_bytes"] += size_bytes
            self._seconds["load_ms"] += seconds
            if mapped:
                return
            self._came_at_s = self._clock()
            kept = max(0.0, 1 - seconds / _RECENT_S) if self._recent_s > _RECENT_S else 1.0
            self._recent_bytes = kept * self._recent_bytes + size_bytes
            self._recent_s = kept * self._recent_s + seconds

    def waited(self, seconds: float) -> None:
        """Count a wait of the engine for a tensor."""
        with self._lock:
            self._counts["waits"] += 1
            self._seconds["wait_ms"] += seconds


class LinkPace:
    """A stopwatch of one connection, which reports the time of each load to the LoadMeter."""

    def __init__(self, meter: LoadMeter, clock: Callable[[], float] = time.monotonic) -> None:
        self._meter = meter
        self._clock = clock
        self._since_s = 0.0

    def asked(self, *, idle: bool) -> None:
        """Record that more bytes were requested.

        Args:
            idle: Whether no request was pending before.
        """
        if idle:
            self._since_s = self._clock()

    def came(self, size_bytes: int, *, mapped: bool = False) -> None:
        """Record that requested bytes have arrived; for `mapped`, see LoadMeter."""
        now_s = self._clock()
        self._meter.came(size_bytes, max(0.0, now_s - self._since_s), mapped=mapped)
        self._since_s = now_s
