"""The writer thread of a store: it writes sections, templates, deletions and use counts.

Beyond the budget, or if the disk is full, templates are evicted for new ones. If nothing can be evicted, the store is
read-only until there is space. The bytes of waiting sections are bounded.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Hashable

from bottega.activations.records import SectionKey, layout_part, read_layout
from bottega.activations.store.insertion import IncomingSection, TemplateInsertion
from bottega.activations.store.recordings import PendingRecording, PendingRecordings, SectionIntake
from bottega.activations.store.sealed_parts import SectionFile
from bottega.activations.store.settings import ActivationStoreSettings, DropReason
from bottega.activations.store.template_objects import Manifest
from bottega.activations.store.template_table import TemplateTable, files_of
from bottega.addons.edits.wire import DrawnTensors, SectionLayout
from bottega.blobstore.records import RecordChanges
from bottega.blobstore.writer import BlobDisk, BlobWriter, StoreCounts
from bottega.clocks import SteadyClock
from bottega.errors import DataLoss, StorageUnavailable
from bottega.process import open_files
from bottega.v1.activations_pb2 import RecordingHeader, SectionHeader

# Extra queue space for ends of recordings, half a MiB each, so that a full queue of sections loses no template.
_SPARE_BYTES = 64 << 20
# Share of the process's descriptors for waiting sections, one each, so that a hanging disk leaves enough for others.
_SHARE_OF_OPEN_FILES = 0.125

_log = logging.getLogger(__name__)


class ActivationWriter(BlobWriter):
    """The writer of an activation store.

    Args:
        on_recorded: Called after the end of each recording.
    """

    def __init__(
        self,
        settings: ActivationStoreSettings,
        *,
        table: TemplateTable,
        recordings: PendingRecordings,
        now: SteadyClock,
        disk: BlobDisk,
        insertion: TemplateInsertion,
        counts: StoreCounts[DropReason],
        on_recorded: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(disk, name="the activation store", retry_s=settings.retry_s)
        self._settings = settings
        self._table = table
        self._recordings = recordings
        self._now = now
        self._insertion = insertion
        self._counts = counts
        self._on_recorded = on_recorded
        self._most_waiting = max(1, int(_SHARE_OF_OPEN_FILES * open_files.limit()))
        self._lock = threading.Lock()
        self._waiting = self._waiting_bytes = 0

    @property
    def waiting(self) -> tuple[int, int]:
        """Number of waiting sections, and their bytes."""
        with self._lock:
            return self._waiting, self._waiting_bytes

    def reserve(self, size_bytes: int, *, is_end: bool = False) -> DropReason | None:
        """Reserve queue space until a section is written. Return None, or the reason why there is no space.

        The end of a recording may still be queued when no more sections may, because its sections are already here.
        """
        if self._trouble:
            return DropReason.TROUBLE
        max_bytes = self._settings.max_waiting_bytes + (_SPARE_BYTES if is_end else 0)
        with self._lock:
            too_many = self._waiting >= self._most_waiting and not is_end
            if too_many or (self._waiting and self._waiting_bytes + size_bytes > max_bytes):
                return DropReason.BUSY
            self._waiting += 1
            self._waiting_bytes += size_bytes
        return None

    def unreserve(self, size_bytes: int) -> None:
        """Release the queue space of a section that was written or dropped."""
        with self._lock:
            self._waiting -= 1
            self._waiting_bytes -= size_bytes

    def begin_section(
        self, header: SectionHeader, key: SectionKey, layout: SectionLayout, link: Hashable
    ) -> SectionIntake | DropReason:
        """Return an object that receives the chunks of a section, or why it is dropped; see ActivationStore."""
        template = self._table.get(header.key)
        pending = None if template is not None else self._recordings.begin_section(header.key, header.recording, link)
        if pending is None and (template is None or template.recording != header.recording):
            # With NOT_GRANTED, the worker would discard what it has just recorded.
            early = template is None and self._recordings.is_being_written(header.key, header.recording, link)
            refused = DropReason.EARLY if early else DropReason.NOT_GRANTED
            self._counts.drop(refused)
            return refused
        reason = self.reserve(layout.size_bytes)
        if reason is not None:
            self._counts.drop(reason)
            return reason
        try:
            file = SectionFile(layout, header.key)
        except BaseException as error:
            self._drop_section(layout, DropReason.TROUBLE)
            if not isinstance(error, StorageUnavailable):
                raise
            return DropReason.TROUBLE
        incoming = functools.partial(
            IncomingSection,
            key=header.key,
            section=key,
            layout=read_layout(layout_part(layout)),
            map=header.map,
            prompt=header.prompt,
            pending=pending,
            number=template.number if template is not None else 0,
        )
        return SectionIntake(
            file,
            pending=pending,
            now=self._now,
            on_whole=lambda descriptor: self._thread.post(lambda: self._write(incoming(descriptor=descriptor))),
            on_drop=lambda why: self._drop_section(layout, why),
        )

    def complete(self, pending: PendingRecording, header: RecordingHeader, drawn: DrawnTensors | None) -> None:
        """Queue the end of a recording, which makes a template of its sections. Space was reserved for `drawn`."""
        self._thread.post(lambda: self._complete(pending, header, drawn))

    def forget(self, pending: PendingRecording) -> None:
        """Queue the deletion of an abandoned recording."""
        self._thread.post(lambda: self._insertion.forget(pending))
        self._thread.post(self._tidy)

    def lose(self, digest: str) -> None:
        """Remove the sections that use a damaged or missing file. The rest of the template stays."""
        gone = self._table.lose(digest)
        if gone:
            self._counts.add("damaged")
            _log.error("a section is damaged or missing, and was deleted", extra={"digest": digest})
            self._thread.post(lambda: self._insertion.release(gone))
            self._thread.post(self._tidy)

    def adopt(self, manifest: Manifest, drawn: bytes) -> bool:
        """Add a template whose sections are in the object store; see TemplateInsertion.adopt. Return whether it was.

        Raise StorageUnavailable if the disk does not answer.
        """
        return self._thread.call(lambda: self._adopt(manifest, drawn))

    def drop(self, prefix: str) -> int:
        """Delete templates, and return how many. Raise StorageUnavailable if the disk does not answer."""
        return self._thread.call(lambda: self._drop(prefix))

    def pin(self, prefix: str, *, pinned: bool) -> int:
        """Pin or unpin templates, and return how many. Raise StorageUnavailable if the disk does not answer."""
        return self._thread.call(lambda: self._pin(prefix, pinned=pinned))

    def _tick(self) -> None:
        self._recordings.expire()
        super()._tick()

    def _read(self) -> None:
        for pending in self._recordings.end_all():
            self._insertion.forget(pending)
        self._insertion.release(files_of(self._table.drop("")))
        self._table.take_changes()
        self._insertion.load()

    def _take_changes(self) -> RecordChanges:
        return self._table.take_changes()

    def _probe(self) -> None:
        self._insertion.room.probe()

    def _write(self, incoming: IncomingSection) -> None:
        try:
            if self._trouble:
                os.close(incoming.descriptor)
                self._counts.drop(DropReason.TROUBLE)
                return
            self._note(self._insertion.write_section(incoming))
        except (StorageUnavailable, DataLoss) as error:
            self._counts.drop(DropReason.TROUBLE)
            self._fail(error)
        finally:
            self.unreserve(incoming.layout.size_bytes)

    def _complete(self, pending: PendingRecording, header: RecordingHeader, drawn: DrawnTensors | None) -> None:
        try:
            if self._trouble:
                self._insertion.forget(pending)
                self._counts.drop(DropReason.TROUBLE)
                return
            self._note(self._insertion.complete(pending, header, drawn))
            self._on_recorded()
        except (StorageUnavailable, DataLoss) as error:
            self._counts.drop(DropReason.TROUBLE)
            self._fail(error)
        finally:
            self._recordings.remove(pending)
            self.unreserve(drawn.size_bytes if drawn is not None else 0)

    def _adopt(self, manifest: Manifest, drawn: bytes) -> bool:
        try:
            return not self._trouble and self._insertion.adopt(manifest, drawn)
        except (StorageUnavailable, DataLoss) as error:
            self._fail(error)
            return False

    def _drop_section(self, layout: SectionLayout, reason: DropReason) -> None:
        self.unreserve(layout.size_bytes)
        self._counts.drop(reason)

    def _note(self, reason: DropReason | None) -> None:
        if reason is not None:
            self._counts.drop(reason)

    def _drop(self, prefix: str) -> int:
        gone = self._table.drop(prefix)
        self._insertion.release(files_of(gone))
        self._tidy()
        return len(gone)

    def _pin(self, prefix: str, *, pinned: bool) -> int:
        found = self._table.pin(prefix, pinned=pinned)
        self._tidy()
        return found
