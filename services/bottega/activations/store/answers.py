"""Answers to questions of workers and gateways about templates, and loading of templates before edits use them.

Workers get the list of a template's sections, with their layouts and maps, and block costs. Gateways learn whether a
template is in memory, on disk or missing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from bottega.activations.records import SectionRecord, TemplateRecord, layout_part
from bottega.activations.store.sealed_parts import read_drawn
from bottega.addons.edits.wire import DrawnTensors
from bottega.addons.edits.wire.messages import MAX_HEADER_BYTES
from bottega.caching.lru_cache import LruCache
from bottega.caching.tiered_cache import TieredCache
from bottega.caching.tiers import KnownFile
from bottega.errors import StorageUnavailable
from bottega.storage import BlobFiles
from bottega.v1 import activations_pb2
from bottega.v1 import activations_pb2 as pb
from bottega.v1.activations_pb2 import BlockProfile, SectionInfo, TemplateAnswer

# Budget in bytes of cached image latents and noise. One template has half a MiB for SDXL at 1024x1024.
_DRAWN_BYTES = 64 << 20
# Number of templates to load for a source, which has one for each set of LoRAs and ControlNets.
_MOST_OF_A_SOURCE = 2
# Shorter loads do not show the disk's rate; they count only until there is a longer one.
_LEAST_MEASURED_S = 0.01
_NEW_SHARE = 0.5


def template_answer(template: TemplateRecord, memory: TieredCache) -> TemplateAnswer:
    """Return a message with a template's sections in the order of use. Equal layouts and maps are in it once."""
    sections = template.in_order
    layouts = _places([layout_part(section.layout) for section in sections])
    maps = _places([section.map for section in sections])
    header = template.header
    return TemplateAnswer(
        recording=template.recording,
        latent_height=header.latent_height,
        latent_width=header.latent_width,
        sections=[_info(section, layouts, maps, memory) for section in sections],
        layouts=[activations_pb2.SectionLayout.FromString(part) for part in layouts],
        maps=list(maps),
        has_drawn=template.drawn is not None,
        seed=header.seed,
    )


def add_profile(answer: TemplateAnswer, profile: BlockProfile | None) -> None:
    """Add a block profile to an answer, if it is not None and the message does not get too large."""
    if profile is not None and answer.ByteSize() + profile.ByteSize() < MAX_HEADER_BYTES:
        answer.profile.CopyFrom(profile)


class DrawnCache:
    """A thread-safe cache of templates' (edited source images') latents and noise.

    It calls `lost` with the digest of an unusable file.
    """

    def __init__(self, files: BlobFiles, *, lost: Callable[[str], None]) -> None:
        self._files = files
        self._lost = lost
        self._lock = threading.Lock()
        self._cache: LruCache[_KeptDrawn] = LruCache(budget_bytes=_DRAWN_BYTES)

    def get(self, template: TemplateRecord) -> DrawnTensors | None:
        """Return a template's image latent and noise, or None if they cannot be read. May wait for the disk."""
        drawn = template.drawn
        assert drawn is not None, "the template must have drawn tensors"
        with self._lock:
            kept = self._cache.use(drawn.digest)
        if kept is not None:
            return kept.drawn
        try:
            digest = bytes.fromhex(drawn.digest)
            data = self._files.read(drawn.digest, digest=digest, size_bytes=drawn.size_bytes)
        except StorageUnavailable:
            return None
        if data is None:
            self._lost(drawn.digest)
            return None
        found = read_drawn(data, drawn.shape)
        with self._lock:
            if self._cache.make_room(found.size_bytes) is not None:
                self._cache.add(drawn.digest, _KeptDrawn(found))
        return found


class _KeptDrawn:
    is_idle = True

    def __init__(self, drawn: DrawnTensors) -> None:
        self.drawn = drawn
        self.size_bytes = drawn.size_bytes


def _info(
    section: SectionRecord, layouts: dict[bytes, int], maps: dict[bytes, int], memory: TieredCache
) -> SectionInfo:
    return SectionInfo(
        key=section.key.to_wire(),
        digest=section.digest,
        layout=layouts[layout_part(section.layout)],
        map=maps[section.map],
        prompt=section.prompt,
        in_memory=bool(memory.state(section.digest)),
    )


def _places(parts: Sequence[bytes]) -> dict[bytes, int]:
    """Return the distinct items of `parts`, each with an index."""
    return {part: place for place, part in enumerate(dict.fromkeys(parts))}


class TemplateLoader:
    """Loads templates into memory, in which they may take `budget_bytes`."""

    def __init__(self, memory: TieredCache, *, budget_bytes: int) -> None:
        self._memory = memory
        self._budget_bytes = budget_bytes
        self._pace = DiskPace(memory)

    @property
    def disk_bytes_per_s(self) -> float:
        """Recent rate of loads from disk in bytes per second; 0 if unknown."""
        return self._pace()

    def memory_bytes(self, template: TemplateRecord) -> int:
        """Return a template's bytes in memory. If all sections are there, the image latent and noise count as well."""
        there = sum(each.size_bytes for each in template.sections.values() if self._memory.state(each.digest))
        return template.size_bytes if there == template.sections_bytes else there

    def describe(self, template: TemplateRecord, now_s: float) -> pb.Template:
        """Describe a template for people. The caller sets `holder`.

        Args:
            now_s: The time on the store's steady clock.
        """
        header, use = template.header, template.use
        memory_bytes = self.memory_bytes(template)
        return pb.Template(
            id=template.recording,
            digest=header.digest,
            model=header.model,
            model_hash=header.model_hash,
            width=header.width,
            height=header.height,
            size_bytes=template.size_bytes,
            steps=template.step_count,
            uses=use.uses,
            idle_s=max(0.0, now_s - use.used_s),
            in_use=any(self._memory.leases(section.digest) for section in template.sections.values()),
            valid_share=template.valid_share,
            tier=pb.TEMPLATE_TIER_MEMORY if memory_bytes == template.size_bytes else pb.TEMPLATE_TIER_DISK,
            pinned=use.pinned,
            memory_bytes=memory_bytes,
        )

    def load(self, templates: Iterable[TemplateRecord]) -> list[int]:
        """Start to load templates in this order, as long as memory has space for all of them.

        Return for each the bytes that are not in memory yet, or -1 if some of it will not be loaded.
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
        """Start to load each source's newest templates into memory. Return where each source's newest one is now."""
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
    """The rate of loads from disk into memory, as a moving average in bytes per second. Any thread may use it."""

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
