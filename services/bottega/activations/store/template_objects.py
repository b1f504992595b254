"""Recordings in an object store that several activation stores share.

    templates/ab/<tag>-<SHA-256 of the manifest>    manifests, which say what a recording consists of
    sections/ab/<tag>-<SHA-256 of the file>         the files of recordings

The tag is the SHA-256 of the template's key. A manifest is written after all its files, so a recording is visible when
it is complete, and each name has the checksum of its content. A recording that changes gets a new manifest, after which
the former one is deleted. If two stores record the same template at once, both recordings are whole, and the younger
manifest counts for all. So the catalogue is the list of manifests, without a database, a lock or a conditional write.

A manifest is written again, unchanged, while its template is in use, so that its age says when it was last used.
Calls wait for the object store, and raise StorageUnavailable.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf.message import DecodeError

from bottega.activations.records import (
    DrawnFile,
    SectionKey,
    SectionRecord,
    TemplateRecord,
    TemplateUse,
    layout_part,
    read_layout,
)
from bottega.storage.objects import ObjectStore, StoredObject
from bottega.v1 import activations_pb2
from bottega.v1.activations_pb2 import RecordingHeader

OBJECT_NAMES = re.compile(r"[0-9a-f]{64}-[0-9a-f]{64}")
"""Names of manifests and of files."""
_VERSION = 1
_TRANSFERS = 8
# A store may upload the files of a recording for hours before it writes the manifest.
_ORPHAN_S = 6 * 3600.0
SETTLED_S = 600.0
"""Younger recordings are not evicted, because other stores have not listed them yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The parts of a recording."""

    header: RecordingHeader
    drawn: DrawnFile | None
    sections: Mapping[SectionKey, SectionRecord]
    pinned: bool

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of its files in bytes, by digest."""
        sizes = {section.digest: section.size_bytes for section in self.sections.values()}
        return sizes | ({self.drawn.digest: self.drawn.size_bytes} if self.drawn is not None else {})

    @property
    def size_bytes(self) -> int:
        """Total bytes of its files."""
        return sum(self.sizes.values())

    @property
    def name(self) -> str:
        """Name of the object that has the manifest."""
        return f"{_tag(self.header.key)}-{hashlib.sha256(self.to_bytes()).hexdigest()}"

    def to_bytes(self) -> bytes:
        """Serialize the manifest. Equal ones give the same bytes."""
        layouts: dict[bytes, int] = {}
        maps: dict[bytes, int] = {}
        sections = [
            (
                *(section.key.timestep, section.key.noise_level, section.key.half, section.key.controls),
                *(section.digest, layouts.setdefault(layout_part(section.layout), len(layouts))),
                *(maps.setdefault(section.map, len(maps)), section.prompt),
            )
            for section in sorted(self.sections.values(), key=lambda section: section.key.order)
        ]
        drawn = self.drawn
        content = {
            "version": _VERSION,
            "header": _text(self.header.SerializeToString(deterministic=True)),
            "drawn": [drawn.digest, drawn.shape, drawn.size_bytes] if drawn is not None else None,
            "pinned": self.pinned,
            "layouts": list(map(_text, layouts)),
            "maps": list(map(_text, maps)),
            "sections": sections,
        }
        return json.dumps(content, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownTemplate:
    """A recording in the object store, as its manifest describes it."""

    name: str
    """Name of the manifest."""
    header: RecordingHeader
    size_bytes: int
    files: int
    steps: int
    valid_share: float
    """See TemplateRecord.valid_share."""
    pinned: bool
    written_s: float
    """Time at which the manifest was written, on the steady clock of this store."""

    def to_wire(self, now_s: float) -> activations_pb2.Template:
        """Describe a recording that only the object store has. The caller sets `holder`."""
        header = self.header
        return activations_pb2.Template(
            id=header.recording,
            digest=header.digest,
            model=header.model,
            model_hash=header.model_hash,
            width=header.width,
            height=header.height,
            size_bytes=self.size_bytes,
            steps=self.steps,
            idle_s=max(0.0, now_s - self.written_s),
            valid_share=self.valid_share,
            tier=activations_pb2.TEMPLATE_TIER_OBJECTS,
            pinned=self.pinned,
        )


class TemplateObjects:
    """The recordings in an object store, and the list of those that it had when it was last listed. Thread-safe.

    Args:
        manifests: The store of manifests.
        files: The store of files. The names in both match OBJECT_NAMES.
        budget_bytes: Upper bound on the bytes of all recordings of all activation stores.
        now: Returns the time on the steady clock of this store.
    """

    def __init__(
        self,
        *,
        manifests: ObjectStore,
        files: ObjectStore,
        budget_bytes: int,
        now: Callable[[], float],
    ) -> None:
        self.budget_bytes = budget_bytes
        self._manifests = manifests
        self._files = files
        self._now = now
        self._transfers = ThreadPoolExecutor(_TRANSFERS, thread_name_prefix="objects")
        self._lock = threading.Lock()
        self._known: dict[str, KnownTemplate] = {}
        """Recordings by tag."""
        self._by_source: dict[str, set[str]] = {}
        self._tags: frozenset[str] = frozenset()
        """Tags of all listed manifests, even of those that a later version wrote."""

    def close(self) -> None:
        """Drop the transfers that have not begun."""
        self._transfers.shutdown(wait=False, cancel_futures=True)

    def all(self) -> list[KnownTemplate]:
        """Return all known recordings."""
        with self._lock:
            return list(self._known.values())

    def find(self, key: str, recording: str = "") -> KnownTemplate | None:
        """Return the recording of a template, or None. `recording` is the only acceptable ID; "" is any."""
        with self._lock:
            known = self._known.get(_tag(key))
        return known if known is not None and recording in ("", known.header.recording) else None

    def of_source(self, source: str) -> list[KnownTemplate]:
        """Return the recordings of a source, the most recently used first."""
        with self._lock:
            found = [self._known[tag] for tag in self._by_source.get(source, ())]
        return sorted(found, key=lambda known: -known.written_s)

    def exists(self, key: str) -> bool:
        """Return whether a template has a manifest now, even one that this version cannot read."""
        return _tag(key) in self._tags or any(True for _ in self._manifests.objects(_tag(key)))

    def refresh(self) -> None:
        """List the manifests, and read the new ones."""
        youngest: dict[str, StoredObject] = {}
        for found in self._manifests.objects():
            other = youngest.setdefault(found.name[:64], found)
            if (found.age_s, found.name) < (other.age_s, other.name):
                youngest[found.name[:64]] = found
        self._tags = frozenset(youngest)
        before = {known.name: known for known in self.all()}
        new = [found for found in youngest.values() if found.name not in before]
        read = {known.name: known for known in self._transfers.map(self._read_listed, new) if known is not None}
        for tag, known in list(self._known.items()):
            # One that was replaced during a long listing may be in none of its pages.
            if tag not in youngest and not any(True for _ in self._manifests.objects(tag)):
                self._forget(known)
        for found in youngest.values():
            listed = read.get(found.name) or before.get(found.name)
            if listed is not None:
                self._keep(listed, written_s=self._now() - found.age_s)

    def read(self, known: KnownTemplate) -> Manifest | None:
        """Return the manifest of a recording; None if it is gone or damaged."""
        listed = next((found for found in self._manifests.objects(known.name)), None)
        return self._read(listed) if listed is not None else None

    def read_file(self, key: str, digest: str, size_bytes: int) -> bytes | None:
        """Return a file of a recording; None if it is missing or damaged, after which it is missing."""
        name = f"{_tag(key)}-{digest}"
        data = self._files.read(name, digest=bytes.fromhex(digest), size_bytes=size_bytes)
        if data is None:
            self._files.remove([name])  # the next upload of the same file must not find a damaged one
        return data

    def publish(self, manifest: Manifest, read: Callable[[str], bytes | None]) -> bool:
        """Write a recording, in place of an earlier version of it. Files that the object store has are not sent again.

        Args:
            manifest: What the recording consists of.
            read: Returns a file of this store by its digest; None if it is missing or damaged.

        Returns:
            Whether all its files could be read. If not, nothing was published.
        """
        tag, sizes = _tag(manifest.header.key), manifest.sizes
        there = {found.name for found in self._files.objects(tag) if sizes.get(found.name[65:]) == found.size_bytes}

        def upload(digest: str) -> bool:
            content = read(digest)
            if content is not None:
                self._files.write(f"{tag}-{digest}", content)
            return content is not None

        missing = [digest for digest in sizes if f"{tag}-{digest}" not in there]
        if not all(list(self._transfers.map(upload, missing))):
            return False
        former = [found.name for found in self._manifests.objects(tag) if found.name != manifest.name]
        self.touch(manifest)
        self._manifests.remove(former)
        return True

    def touch(self, manifest: Manifest) -> None:
        """Write the manifest of a recording whose files are there, so that the recording counts as used now."""
        self._manifests.write(manifest.name, manifest.to_bytes())
        self._keep(_described(manifest.name, manifest), written_s=self._now())

    def pin(self, known: KnownTemplate, *, pinned: bool) -> None:
        """Pin or unpin a recording that this store does not have itself."""
        manifest = self.read(known)
        if manifest is not None and manifest.pinned != pinned:
            self.publish(replace(manifest, pinned=pinned), lambda _: None)

    def remove(self, gone: Iterable[KnownTemplate]) -> None:
        """Delete recordings: first the manifests, so that nobody begins to use them, and then the files."""
        for known in gone:
            tag = known.name[:64]
            self._manifests.remove([found.name for found in self._manifests.objects(tag)])
            self._forget(known)
            self._files.remove([found.name for found in self._files.objects(tag)])

    def discard(self, known: KnownTemplate) -> None:
        """Delete the manifest of a recording that cannot be used, so that the template can be recorded again."""
        self._manifests.remove([known.name])
        self._forget(known)

    def make_room(self, size_bytes: int) -> list[KnownTemplate] | None:
        """Delete the recordings that were not used for longest until `size_bytes` more fit. Return them.

        If that is impossible, delete none and return None.
        """
        if size_bytes <= 0:
            return []
        excess = sum(known.size_bytes for known in self.all()) + size_bytes - self.budget_bytes
        gone = []
        settled_s = self._now() - SETTLED_S
        for known in sorted(self.all(), key=lambda known: known.written_s):
            if excess <= 0:
                break
            if not known.pinned and known.written_s < settled_s:
                gone.append(known)
                excess -= known.size_bytes
        if excess > 0:
            return None
        self.remove(gone)
        return gone

    def sweep(self) -> int:
        """Delete old files that no recording has, left by uploads and deletions that were cut off. Return how many."""
        listed: dict[str, list[StoredObject]] = {}
        for found in self._files.objects():
            listed.setdefault(found.name[:64], []).append(found)
        self.refresh()
        orphans: list[str] = []
        for tag, files in listed.items():
            known = self._known.get(tag)
            manifest = self.read(known) if known is not None and len(files) > known.files else None
            if manifest is not None or not (known is not None or tag in self._tags):
                wanted = manifest.sizes if manifest is not None else {}
                orphans += [file.name for file in files if file.name[65:] not in wanted and file.age_s > _ORPHAN_S]
        self._files.remove(orphans)
        return len(orphans)

    def _read_listed(self, found: StoredObject) -> KnownTemplate | None:
        manifest = self._read(found)
        return _described(found.name, manifest) if manifest is not None else None

    def _read(self, found: StoredObject) -> Manifest | None:
        data = self._manifests.read(found.name, digest=bytes.fromhex(found.name[65:]), size_bytes=found.size_bytes)
        manifest = _parsed(data) if data is not None else None
        return manifest if manifest is not None and _tag(manifest.header.key) == found.name[:64] else None

    def _keep(self, known: KnownTemplate, *, written_s: float) -> None:
        tag = known.name[:64]
        with self._lock:
            self._unlink(self._known.get(tag))
            self._known[tag] = replace(known, written_s=written_s)
            self._by_source.setdefault(known.header.source, set()).add(tag)

    def _forget(self, known: KnownTemplate) -> None:
        with self._lock:
            self._unlink(self._known.pop(known.name[:64], None))
            self._tags -= {known.name[:64]}

    def _unlink(self, known: KnownTemplate | None) -> None:
        """Remove a recording from the lookup by source. Requires the lock."""
        if known is not None:
            tags = self._by_source[known.header.source]
            tags.discard(known.name[:64])
            if not tags:
                del self._by_source[known.header.source]


def manifest_of(template: TemplateRecord) -> Manifest:
    """Return the manifest of a template."""
    return Manifest(
        header=template.header, drawn=template.drawn, sections=template.sections, pinned=template.use.pinned
    )


def _described(name: str, manifest: Manifest) -> KnownTemplate:
    template = TemplateRecord(
        0, manifest.header, drawn=manifest.drawn, sections=manifest.sections, use=TemplateUse(pinned=manifest.pinned)
    )
    return KnownTemplate(
        name=name,
        header=manifest.header,
        size_bytes=manifest.size_bytes,
        files=len(manifest.sizes),
        steps=template.step_count,
        valid_share=template.valid_share,
        pinned=manifest.pinned,
        written_s=0.0,
    )


def _parsed(data: bytes) -> Manifest | None:
    """Return the result of `Manifest.to_bytes`; None for other content, such as that of a later version."""
    try:
        content = json.loads(data)
        return _manifest(content) if content["version"] == _VERSION else None
    except (ValueError, TypeError, KeyError, IndexError, DecodeError):
        return None


def _manifest(content: dict[str, Any]) -> Manifest:
    layouts = [read_layout(base64.b64decode(part)) for part in content["layouts"]]
    maps = [base64.b64decode(part) for part in content["maps"]]
    sections = {}
    for timestep, noise_level, half, controls, digest, layout, valid, prompt in content["sections"]:
        key = SectionKey(timestep=timestep, noise_level=noise_level, half=half, controls=tuple(controls))
        sections[key] = SectionRecord(key=key, digest=digest, layout=layouts[layout], map=maps[valid], prompt=prompt)
    drawn = content["drawn"]
    return Manifest(
        header=RecordingHeader.FromString(base64.b64decode(content["header"])),
        drawn=DrawnFile(digest=drawn[0], shape=tuple(drawn[1]), size_bytes=drawn[2]) if drawn is not None else None,
        sections=sections,
        pinned=content["pinned"],
    )


def _tag(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
