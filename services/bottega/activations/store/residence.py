"""Which templates are in memory, and loading them into memory before edits use them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from bottega.activations.template import TemplateRecord
from bottega.caching import KnownFile, TieredCache
from bottega.v1 import activations_pb2 as pb

# A source has one template for each set of LoRAs and ControlNets; it is not known which one comes next.
_MOST_OF_A_SOURCE = 2
# Shorter loads do not show the disk's rate, but are used if nothing else is known.
_LEAST_MEASURED_S = 0.01
_NEW_SHARE = 0.5


class TemplateLoader:
    """Loads templates into memory, which may take `budget_bytes`."""

    def __init__(self, memory: TieredCache, *, budget_bytes: int) -> None:
        self._memory = memory
        self._budget_bytes = budget_bytes
        self._pace = DiskPace(memory)

    @property
    def disk_bytes_per_s(self) -> float:
        """Recent rate of loads from disk; 0 if not known."""
        return self._pace()

    def memory_bytes(self, template: TemplateRecord) -> int:
        """Return a template's bytes in memory. If all sections are there, the drawn tensors count as well."""
        there = sum(each.size_bytes for each in template.sections.values() if self._memory.state(each.digest))
        return template.size_bytes if there == template.sections_bytes else there

    def load(self, templates: Iterable[TemplateRecord]) -> list[int]:
        """Begin to load templates in this order, as far as all of memory has room.

        Return for each the bytes that are not yet in memory, or -1 if not all of it will be loaded.
        """
        left_bytes, found = self._budget_bytes, []
        for template in templates:
            coming_bytes = 0
            for section in template.in_order:
                left_bytes -= section.size_bytes
                file = KnownFile(size_bytes=section.size_bytes, group=template.key)
                # Loading more than the budget would evict what was loaded first.
                if left_bytes < 0 or not self._memory.prefetch(section.digest, file):
                    coming_bytes = -1
                    break
                coming_bytes += 0 if self._memory.state(section.digest) else section.size_bytes
            found.append(coming_bytes)
        return found

    def prefetch(self, sources: Sequence[tuple[str, Sequence[TemplateRecord]]]) -> list[pb.TemplateResidence]:
        """Begin to load each source's newest templates, and return where the newest one is now."""
        wanted = [template for _, templates in sources for template in templates[:_MOST_OF_A_SOURCE]]
        where = [self._where(source, templates) for source, templates in sources]
        self.load(wanted)
        return where

    def _where(self, source: str, templates: Sequence[TemplateRecord]) -> pb.TemplateResidence:
        if not templates:
            return pb.TemplateResidence(source=source, tier=pb.TEMPLATE_TIER_NOWHERE)
        size_bytes = templates[0].size_bytes
        disk_bytes = size_bytes - self.memory_bytes(templates[0])
        tier = pb.TEMPLATE_TIER_DISK if disk_bytes else pb.TEMPLATE_TIER_MEMORY
        return pb.TemplateResidence(source=source, tier=tier, size_bytes=size_bytes, disk_bytes=disk_bytes)


class DiskPace:
    """The rate of loads into memory, as a moving average in bytes per second. Thread-safe."""

    def __init__(self, memory: TieredCache) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._seen = (0, 0.0)
        self._bytes_per_s = 0.0

    def __call__(self) -> float:
        """Return the current rate; 0 before the first load."""
        with self._lock:
            counts = self._memory.counts
            new_bytes, new_s = counts.loaded_bytes - self._seen[0], counts.load_s - self._seen[1]
            known = self._bytes_per_s
            if new_s >= _LEAST_MEASURED_S or (new_s > 0.0 and not known):
                self._seen = counts.loaded_bytes, counts.load_s
                pace = new_bytes / new_s
                self._bytes_per_s = pace if not known else _NEW_SHARE * pace + (1 - _NEW_SHARE) * known
            return self._bytes_per_s
