"""Recordings in the worker's memory, within a byte budget. The least recently used recording is evicted first."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from bottega.addons.edits.engine.recordings.keys import RecordingKey, StepKey
from bottega.addons.edits.engine.recordings.recording import DrawnTemplate, Recording
from bottega.addons.edits.engine.recordings.source import EVENTS, TemplateQuery
from bottega.caching import LruCache
from bottega.engine.store_work import StoreWork
from bottega.v1.fleet_pb2 import ServiceAddress


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

    def stop(self) -> None:
        """Do nothing: this source has no connections."""

    def _note_eviction(self, _key: str, _recording: Recording) -> None:
        self._events["evictions"] += 1
