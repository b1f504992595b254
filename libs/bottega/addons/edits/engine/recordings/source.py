"""The interface of a source of recordings, and the source that is this worker's memory alone.

The memory has a budget. Whole templates are evicted, the least recently used first.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from bottega.addons.edits.engine.recordings.recording import DrawnTemplate, Recording, RecordingKey, StepKey
from bottega.caching.lru_cache import LruCache
from bottega.engine.spans import StoreWork
from bottega.v1.fleet_pb2 import ServiceAddress

EVENTS = ("hits", "misses", "recorded", "given_up", "evictions", "dropped")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateQuery:
    """A query for the recording of a template."""

    key: RecordingKey
    recording: str = ""
    """ID of the only acceptable recording, 32 hex digits; empty for any."""
    would_record: bool = True
    """Whether the job would record the template if there is no recording."""
    origin: str = ""
    """Name of the source image at the gateway; see `Recording`."""
    width: int = 0
    """Width of the picture in pixels; 0 if not known."""
    height: int = 0


class ActivationSource(Protocol):
    """Finds, makes and keeps recordings. No method blocks.

    The engine's thread makes all calls except those for operators and the last `set_stores`, which closes the
    connections. A recording that was handed out is in use until it is released: it is not evicted, and tensors that its
    steps hold stay valid. Parts of it may be in a store and must be requested; the engine computes what a step does not
    have. Loaded parts may be dropped for others that are needed sooner.
    """

    @property
    def load_bytes_per_s(self) -> float | None:
        """Recent rate of loading, above 0; None if nothing is ever loaded because everything is in this process."""
        ...

    def set_stores(self, stores: Sequence[ServiceAddress]) -> None:
        """Set the stores that exist now, the best first."""
        ...

    def ask(self, query: TemplateQuery) -> Future[StoreWork | None]:
        """Look up a template in the background, so that `find` and `begin` can respond at once.

        The future never fails. Its result is the time that a store spent on the query, if one was asked. Cancel it to
        stop waiting.
        """
        ...

    def find(self, key: RecordingKey, recording: str = "") -> Recording | None:
        """Return a template's complete recording, now in use, or None. `recording` is the only acceptable ID."""
        ...

    def begin(
        self, key: RecordingKey, shape: tuple[int, int], drawn: DrawnTemplate | None = None, *, origin: str = ""
    ) -> Recording | None:
        """Begin a template's recording, which is in use until it is completed or abandoned; see `Recording`.

        Return None if the template has a recording or one is being made.
        """
        ...

    def changed(self, recording: Recording, key: StepKey) -> None:
        """Handle that a step was added, replaced or extended. Other processes get the recording when it is complete."""
        ...

    def reserve(self, recording: Recording, size_bytes: int) -> bool:
        """Reserve memory so that the recording may have `size_bytes` in total. Return whether there is enough."""
        ...

    def complete(self, recording: Recording) -> None:
        """Publish a recording that was begun, and release it."""
        ...

    def abandon(self, recording: Recording) -> None:
        """Discard a recording that was begun."""
        ...

    def release(self, recording: Recording) -> None:
        """Release a recording that was found."""
        ...

    # For operators.

    @property
    def budget_bytes(self) -> int:
        """Maximum bytes of all recordings."""
        ...

    @property
    def spare_bytes(self) -> int:
        """Unused bytes of the budget."""
        ...

    @property
    def recordings(self) -> Sequence[Recording]:
        """The recordings in this process, most recently used first."""
        ...

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of events since the start, by the names in `EVENTS`."""
        ...

    def drop(self, prefix: str) -> int:
        """Remove the idle recordings whose IDs begin with `prefix`, and return how many there were."""
        ...


class MemoryActivations:
    """An ActivationSource that keeps recordings in this process only."""

    load_bytes_per_s: float | None = None

    def __init__(self, budget_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget_bytes = budget_bytes
        self._clock = clock
        self._events: Counter[str] = Counter(dict.fromkeys(EVENTS, 0))
        self._cache: LruCache[Recording] = LruCache(budget_bytes=budget_bytes, on_evict=self._note_eviction)

    @property
    def budget_bytes(self) -> int:
        return self._budget_bytes

    @property
    def spare_bytes(self) -> int:
        return max(0, self._budget_bytes - self._cache.used_bytes)

    @property
    def recordings(self) -> Sequence[Recording]:
        return [kept[1] for kept in self._cache.items()][::-1]

    @property
    def counts(self) -> Mapping[str, int]:
        return self._events

    def set_stores(self, stores: Sequence[ServiceAddress]) -> None:
        """Ignore the stores: this source keeps recordings in memory only."""

    def ask(self, query: TemplateQuery) -> Future[StoreWork | None]:
        known: Future[StoreWork | None] = Future()
        known.set_result(None)
        return known

    def get(self, key: RecordingKey) -> Recording | None:
        """Return a template's recording in any state, without marking it as used; None if there is none."""
        return self._cache.get(key.digest)

    def adopt(self, recording: Recording) -> None:
        """Add a complete recording from a store. The template must have none here."""
        recording.complete = True
        recording.used_s = self._clock()
        self._cache.add(recording.key.digest, recording)

    def forget(self, recording: Recording) -> None:
        if self._cache.get(recording.key.digest) is recording:
            self._cache.remove(recording.key.digest)

    def make_room(self, size_bytes: int) -> bool:
        """Evict cached projections and idle recordings until `size_bytes` fit. Return whether they do."""
        lack_bytes = size_bytes - self.spare_bytes
        for recording in self.recordings[::-1]:
            if lack_bytes <= 0:
                break
            before_bytes = recording.size_bytes
            recording.drop_projections()
            lack_bytes -= before_bytes - recording.size_bytes
        return self._cache.make_room(size_bytes) is not None

    @property
    def used_bytes(self) -> int:
        """Bytes of all recordings. Thread-safe."""
        return self._cache.used_bytes

    def find(self, key: RecordingKey, recording: str = "") -> Recording | None:
        found = self._cache.get(key.digest)
        if found is None or not found.complete or recording not in ("", found.id):
            self._events["misses"] += 1
            return None
        self._events["hits"] += 1
        self._cache.use(key.digest)
        found.readers += 1
        found.uses += 1
        found.used_s = self._clock()
        return found

    def begin(
        self, key: RecordingKey, shape: tuple[int, int], drawn: DrawnTemplate | None = None, *, origin: str = ""
    ) -> Recording | None:
        if self._cache.get(key.digest) is not None or not self._budget_bytes:
            return None
        begun = Recording(key, shape, drawn, origin=origin)
        begun.used_s = self._clock()
        self._cache.add(key.digest, begun)
        return begun

    def changed(self, recording: Recording, key: StepKey) -> None:
        """Ignore the change: recordings are not shared with other processes."""

    def reserve(self, recording: Recording, size_bytes: int) -> bool:
        more_bytes = size_bytes - recording.size_bytes
        if more_bytes > 0 and not self.make_room(more_bytes):
            return False
        recording.reserved_bytes = size_bytes
        return True

    def complete(self, recording: Recording) -> None:
        self._events["recorded"] += 1
        recording.reserved_bytes = 0
        recording.complete = True
        recording.used_s = self._clock()
        self._cache.use(recording.key.digest)

    def abandon(self, recording: Recording) -> None:
        self._events["given_up"] += 1
        self._cache.remove(recording.key.digest)

    def release(self, recording: Recording) -> None:
        recording.readers -= 1
        recording.used_s = self._clock()
        if not recording.readers:
            recording.reserved_bytes = 0

    def drop(self, prefix: str) -> int:
        idle = [key for key, kept in self._cache.items() if kept.is_idle and kept.id.startswith(prefix)]
        for key in idle:
            self._cache.remove(key)
        self._events["dropped"] += len(idle)
        return len(idle)

    def _note_eviction(self, _key: str, _recording: Recording) -> None:
        self._events["evictions"] += 1
