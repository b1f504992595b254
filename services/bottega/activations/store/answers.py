"""Answers to workers' questions about a template: its sections, their layouts and maps, and its block costs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from bottega.activations.records import layout_part
from bottega.activations.store.sealed_parts import read_drawn
from bottega.activations.template import SectionRecord, TemplateRecord
from bottega.addons.edits.wire import DrawnTensors
from bottega.addons.edits.wire.messages import MAX_HEADER_BYTES
from bottega.blobstore import BlobFiles
from bottega.caching import LruCache, TieredCache
from bottega.errors import StorageUnavailable
from bottega.v1 import activations_pb2
from bottega.v1.activations_pb2 import BlockProfile, SectionInfo, TemplateAnswer

# Budget of cached image latents and noise: half a MiB for SDXL at 1024x1024.
_DRAWN_BYTES = 64 << 20


def template_answer(template: TemplateRecord, memory: TieredCache) -> TemplateAnswer:
    """Return a template's sections in the order of use, with each different layout and map once."""
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
    """Add a block profile to an answer if it fits."""
    if profile is not None and answer.ByteSize() + profile.ByteSize() < MAX_HEADER_BYTES:
        answer.profile.CopyFrom(profile)


class DrawnCache:
    """A thread-safe cache of templates' image latents and noise; `lost` gets the digest of a damaged or gone file."""

    def __init__(self, files: BlobFiles, *, lost: Callable[[str], None]) -> None:
        self._files = files
        self._lost = lost
        self._lock = threading.Lock()
        self._cache: LruCache[_KeptDrawn] = LruCache(budget_bytes=_DRAWN_BYTES)

    def get(self, template: TemplateRecord) -> DrawnTensors | None:
        """Return a template's image latent and noise, or None if they cannot be read. May block on the disk."""
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
    """Return each different part with its place among them."""
    return {part: place for place, part in enumerate(dict.fromkeys(parts))}
