"""Turns finished recordings into templates: frees space, writes files, then database rows, then publishes the template.

Only one thread at a time may call it. It raises errors of the disk; the writer handles them.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from bottega.activations.records import (
    DrawnFile,
    SectionKey,
    SectionRecord,
    TemplateRecord,
    TemplateUse,
    load_templates,
    map_bytes,
    new_rows,
)
from bottega.activations.store.checks import fits_answer
from bottega.activations.store.recordings import PendingRecording
from bottega.activations.store.sealed_parts import drawn_file
from bottega.activations.store.settings import ActivationStoreSettings, DropReason
from bottega.activations.store.template_objects import Manifest
from bottega.activations.store.template_table import TemplateTable, files_of
from bottega.addons.edits.wire import DrawnTensors, SectionLayout
from bottega.blobstore.writer import BlobDisk, StoreCounts
from bottega.caching.sealed_files import digest_of
from bottega.caching.tiered_cache import TieredCache
from bottega.caching.tiers import KnownFile
from bottega.clocks import SteadyClock
from bottega.errors import DataLoss, StorageUnavailable
from bottega.storage import os_errors
from bottega.storage.blob_files import PROBE_BYTES
from bottega.v1.activations_pb2 import RecordingHeader

# Bytes that a transaction usually adds to the database at most: a template's sections, layouts and maps.
_RECORD_BYTES = 256 << 10
# Attempts at one write. Other programs may use the space that evictions have freed.
_TRIES = 3

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IncomingSection:
    """A section that a worker has sent completely, in sealed memory."""

    key: str
    """Key of its template."""
    section: SectionKey
    layout: SectionLayout
    map: bytes
    prompt: str
    descriptor: int
    pending: PendingRecording | None
    """The recording to which it belongs; None if it replaces a section of the existing template `number`."""
    number: int = 0

    def stored(self, digest: str) -> SectionRecord:
        """Return the record of the section, once its file is written."""
        return SectionRecord(key=self.section, digest=digest, layout=self.layout, map=self.map, prompt=self.prompt)


class TemplateInsertion:
    """Adds templates to the table and the disk, and counts how many sections use each file.

    Args:
        shared: Whether files may be in the object store instead of on the disk.
    """

    def __init__(
        self,
        settings: ActivationStoreSettings,
        *,
        table: TemplateTable,
        disk: BlobDisk,
        memory: TieredCache,
        counts: StoreCounts[DropReason],
        now: SteadyClock,
        shared: bool = False,
    ) -> None:
        self.room = DiskRoom(table=table, disk=disk, counts=counts, release=self.release)
        """Frees disk space for writes."""
        self._settings = settings
        self._table = table
        self._disk = disk
        self._memory = memory
        self._counts = counts
        self._now = now
        self._shared = shared
        self._next_number = 1
        self._uses: Counter[str] = Counter()
        # Bytes of pending recordings.
        self._pending_bytes = 0

    @property
    def pending_bytes(self) -> int:
        """Total bytes of the files of pending recordings."""
        return self._pending_bytes

    def load(self) -> None:
        """Read the stored templates into the empty table."""
        self._uses.clear()
        ordered = sorted(load_templates(self._disk, shared=self._shared), key=lambda template: template.use.used_s)
        last_s = ordered[-1].use.used_s if ordered else 0.0
        if last_s > self._now():  # Otherwise, uses from now on would count as the oldest after the next start.
            self._now.go_on_from(last_s)
        for template in ordered:
            self._next_number = max(self._next_number, template.number + 1)
            is_new = self._table.get(template.key) is None
            gone = self._table.make_room(template.size_bytes) if is_new else None
            if gone is None:  # The configured budget was reduced.
                self._table.strike(template.number)
                self._disk.discard(template.files)
                continue
            self.release(files_of(gone))
            self._table.add(template)
            self._uses.update(template.files)

    def write_section(self, incoming: IncomingSection) -> DropReason | None:
        """Write a section and close its descriptor. Return None, or the reason why it is dropped.

        Raises StorageUnavailable and DataLoss.
        """
        try:
            reason = self._reason_against(incoming)
            if reason is not None:
                return reason
            with os_errors.translated():
                digest = digest_of(incoming.descriptor)
            if not self._uses[digest] and not self._write(digest, incoming.descriptor, incoming.layout, incoming.key):
                return DropReason.NO_ROOM
            return self._keep(incoming.stored(digest), incoming)
        finally:
            os.close(incoming.descriptor)

    def complete(
        self, pending: PendingRecording, header: RecordingHeader, drawn: DrawnTensors | None
    ) -> DropReason | None:
        """End a recording and make a template of it. Return None, or the reason why it is dropped.

        Raises StorageUnavailable and DataLoss.
        """
        reason = self._reason_against_template(pending, header)
        try:
            reason = reason or self._add_template(pending, header, drawn)
        finally:
            self.forget(pending)
        if reason is None:
            self._counts.add("recorded")
        return reason

    def adopt(self, manifest: Manifest, drawn: bytes) -> bool:
        """Add a template whose sections are in the object store. Return False if that is impossible.

        Raises StorageUnavailable and DataLoss.

        Args:
            manifest: The template.
            drawn: The file with its image latent and noise; empty if it has none.
        """
        header = manifest.header
        if self._table.get(header.key) is not None or not self.make_room(sum(manifest.sizes.values())):
            return False
        use = TemplateUse(pinned=manifest.pinned, used_s=self._now())
        template = TemplateRecord(self._next_number, header, drawn=manifest.drawn, sections=manifest.sections, use=use)

        def write() -> None:
            if manifest.drawn is not None:
                self._disk.files.check_room(len(drawn))
                self._disk.files.write(manifest.drawn.digest, drawn)
            self._disk.write(self._table.take_changes(), new_rows([template]))

        self._next_number += 1
        self.room.write(len(drawn) + _RECORD_BYTES, write, but=header.key)
        self._uses.update(template.files)
        self._table.add(template)
        return True

    def forget(self, pending: PendingRecording) -> None:
        """End a recording without a template. Files that nothing else uses are deleted at the next tidying."""
        self._pending_bytes -= pending.size_bytes
        pending.size_bytes = 0
        self.release(section.digest for section in pending.sections.values())
        pending.sections.clear()

    def release(self, digests: Iterable[str]) -> None:
        """Subtract one use of each file. Files without uses are deleted at the next tidying."""
        for digest in digests:
            self._uses[digest] -= 1
            if self._uses[digest] <= 0:
                del self._uses[digest]
                self._memory.forget(digest)
                self._disk.discard([digest])

    def make_room(self, size_bytes: int, *, but: str = "") -> bool:
        """Evict templates until so many more bytes are within the budget. Return whether they are.

        The template with key `but` stays. Raise StorageUnavailable if files cannot be deleted.
        """
        gone = self._table.make_room(self._pending_bytes + size_bytes, but=but)
        if gone:
            self._counts.add("evictions", len(gone))
            self.release(files_of(gone))
        self._disk.make_room()
        return gone is not None

    def _reason_against(self, incoming: IncomingSection) -> DropReason | None:
        """Return the reason why a section cannot be stored now, or None if it can."""
        if incoming.pending is not None and incoming.pending.over:
            return DropReason.ABANDONED
        sections = self._sections(incoming)
        if sections is None:
            return DropReason.NOT_GRANTED
        after = {**sections, incoming.section: incoming.stored("")}
        if len({len(section.map) for section in after.values()}) > 1:
            return DropReason.UNFIT
        size_bytes = sum(section.size_bytes for section in after.values())
        fits = size_bytes <= (self._settings.template_budget_bytes or size_bytes) and fits_answer(after)
        return None if fits else DropReason.TOO_LARGE

    def _reason_against_template(self, pending: PendingRecording, header: RecordingHeader) -> DropReason | None:
        if self._table.get(pending.key) is not None:
            return DropReason.NOT_GRANTED
        expected = {map_bytes(header.latent_height, header.latent_width)}
        sizes = {len(section.map) for section in pending.sections.values()}
        return None if sizes == expected else DropReason.UNFIT

    def _sections(self, incoming: IncomingSection) -> Mapping[SectionKey, SectionRecord] | None:
        """Return the sections of the section's template, or None if the template was deleted."""
        if incoming.pending is not None:
            return incoming.pending.sections
        template = self._table.get(incoming.key)
        return template.sections if template is not None and template.number == incoming.number else None

    def _write(self, digest: str, descriptor: int, layout: SectionLayout, key: str) -> bool:
        """Write a section's file and put it into memory. Return False if the budget does not allow it."""
        if not self._write_file(digest, descriptor, layout.size_bytes, but=key):
            return False
        with contextlib.suppress(OSError):  # If no descriptor is free, the section is read from the disk later.
            self._memory.adopt(digest, os.dup(descriptor), KnownFile(size_bytes=layout.size_bytes, group=key))
        return True

    def _write_file(self, digest: str, descriptor: int, size_bytes: int, *, but: str) -> bool:
        """Write a file. Return False if the budget does not allow it. The template with key `but` is not evicted."""
        if not self.make_room(size_bytes, but=but):
            return False

        def write() -> None:
            self._disk.files.check_room(size_bytes)
            self._disk.files.copy(digest, descriptor, size_bytes)

        self.room.write(size_bytes, write, but=but)
        return True

    def _keep(self, section: SectionRecord, incoming: IncomingSection) -> DropReason | None:
        """Store the record of a section whose file is written. Raise StorageUnavailable or DataLoss."""
        self._uses[section.digest] += 1
        if incoming.pending is not None:
            self._add(section, incoming.pending)
            reason = None
        else:
            reason = self._replace(section, incoming)
        if reason is None:
            self._counts.add("recorded_sections")
        return reason

    def _add(self, section: SectionRecord, pending: PendingRecording) -> None:
        before = pending.sections.get(section.key)
        pending.sections[section.key] = section
        change = section.size_bytes - (before.size_bytes if before is not None else 0)
        pending.size_bytes += change
        self._pending_bytes += change
        self.release([before.digest] if before is not None else [])

    def _replace(self, section: SectionRecord, incoming: IncomingSection) -> DropReason | None:
        try:
            self.room.write(
                _RECORD_BYTES,
                lambda: self._disk.write(self._table.take_changes(), new_rows(sections=[(incoming.number, section)])),
                but=incoming.key,
            )
        except (StorageUnavailable, DataLoss):
            self.release([section.digest])
            raise
        replaced = self._table.replace(incoming.number, incoming.key, section)
        if replaced is None:  # The template was deleted meanwhile.
            self.release([section.digest])
            return DropReason.NOT_GRANTED
        self.release(replaced)
        return None

    def _add_template(
        self, pending: PendingRecording, header: RecordingHeader, drawn: DrawnTensors | None
    ) -> DropReason | None:
        drawn_record = None
        if drawn is not None:
            drawn_record = self._write_drawn(pending, drawn)
            if drawn_record is None:
                return DropReason.NO_ROOM
            self._uses[drawn_record.digest] += 1
        use = TemplateUse(used_s=self._now())
        template = TemplateRecord(self._next_number, header, drawn=drawn_record, sections=pending.sections, use=use)
        self._next_number += 1
        try:
            self.room.write(
                _RECORD_BYTES,
                lambda: self._disk.write(self._table.take_changes(), new_rows([template])),
                but=pending.key,
            )
        except (StorageUnavailable, DataLoss):
            self.release([drawn_record.digest] if drawn_record is not None else [])
            raise
        self._uses.update(section.digest for section in template.sections.values())
        self._table.add(template)
        return None

    def _write_drawn(self, pending: PendingRecording, drawn: DrawnTensors) -> DrawnFile | None:
        """Write image latent and noise to a file. Return None if the budget does not allow it."""
        descriptor, size_bytes = drawn_file(drawn, pending.key)
        try:
            with os_errors.translated():
                digest = digest_of(descriptor)
            if not self._uses[digest] and not self._write_file(digest, descriptor, size_bytes, but=pending.key):
                return None
        finally:
            os.close(descriptor)
        return DrawnFile(digest=digest, shape=drawn.shape, size_bytes=size_bytes)


class DiskRoom:
    """Frees space on a disk that has less than the budget assumes, by evicting templates for new ones.

    The disk may be smaller than the budget, or other programs may fill it. Then its free space is the budget.

    Args:
        release: Called with the digests of evicted templates' files, once for each use.
    """

    def __init__(
        self,
        *,
        table: TemplateTable,
        disk: BlobDisk,
        counts: StoreCounts[DropReason],
        release: Callable[[Iterable[str]], None],
    ) -> None:
        self._table = table
        self._disk = disk
        self._counts = counts
        self._release = release
        self._is_small = False

    def write(self, size_bytes: int, write: Callable[[], None], *, but: str = "") -> None:
        """Call `write`. If the disk has no `size_bytes` free, evict the least recently used templates and retry.

        The template with key `but` stays. Raise StorageUnavailable, without evicting, if evictions cannot free enough,
        as far as the disk reports its free space.
        """
        for tries_left in reversed(range(_TRIES)):
            try:
                write()
                return
            except StorageUnavailable as error:
                if not tries_left or not os_errors.is_lack_of_room(error) or not self._free(size_bytes, but):
                    raise
                self._say_small(error)

    def probe(self) -> None:
        """Test whether the disk can be written. Raise StorageUnavailable if not."""
        self._disk.make_room()  # Deletes discarded files before templates are evicted.
        self.write(PROBE_BYTES, self._disk.files.probe)

    def _free(self, size_bytes: int, but: str) -> bool:
        """Evict templates until so many bytes should fit on the disk. Return whether any were evicted."""
        # The disk's figures do not include quotas, or what a file system needs for itself.
        gone = self._table.free(max(self._disk.files.lack(size_bytes), size_bytes), but=but)
        if not gone:
            return False
        self._counts.add("evictions", len(gone))
        self._release(files_of(gone))
        self._disk.make_room()
        return True

    def _say_small(self, error: StorageUnavailable) -> None:
        """Log once that the disk is smaller than the budget."""
        if not self._is_small:
            self._is_small = True
            text = "the disk has less space than disk_bytes: old recordings are evicted for new ones within the budget"
            _log.warning(text, extra={"disk": error.message})
