"""All that a store writes, in one thread: sections, templates, deletions, uses; and what it reads at its start.

Where the disk is full, templates go for new ones as they do beyond the budget. One that is full of what cannot go, or
fails, makes the store read-only: what comes is dropped, what is there is served, and every `retry_s` seconds the disk
is tried again. Sections that wait are bounded in bytes.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from bottega.activations.disk.disk import ActivationDisk
from bottega.activations.store.insertion import IncomingSection, TemplateInsertion
from bottega.activations.store.recordings import PendingRecording, PendingRecordings
from bottega.activations.store.settings import ActivationStoreSettings
from bottega.activations.store.statistics import ActivationCounts, DropReason
from bottega.activations.store.template_table import TemplateTable, files_of
from bottega.errors import DataLoss, StorageUnavailable
from bottega.process import open_files
from bottega.sections import DrawnTensors
from bottega.storage.store_thread import StoreThread
from bottega.v1.activations_pb2 import RecordingHeader

# For ends of recordings, of half a MiB each: without it the last section that waits would cost the whole template.
_SPARE_BYTES = 64 << 20
# That sections may have that wait, each of which has one: a disk that hangs takes none from links and callers.
_SHARE_OF_OPEN_FILES = 0.125

_log = logging.getLogger(__name__)


class ActivationWriter:
    """Start it with `start`, end it with `close`. Any thread may call it."""

    def __init__(
        self,
        settings: ActivationStoreSettings,
        *,
        table: TemplateTable,
        recordings: PendingRecordings,
        disk: ActivationDisk,
        insertion: TemplateInsertion,
        counts: ActivationCounts,
    ) -> None:
        self._settings = settings
        self._table = table
        self._recordings = recordings
        self._disk = disk
        self._insertion = insertion
        self._counts = counts
        self._thread = StoreThread("activation-writer", tick=self._tick, every_s=settings.retry_s)
        self._most_waiting = max(1, int(_SHARE_OF_OPEN_FILES * open_files.limit()))
        self._lock = threading.Lock()
        self._waiting = self._waiting_bytes = 0
        self._trouble = ""
        # Of the thread alone.
        self._opened = self._loaded = False

    @property
    def trouble(self) -> str:
        """Why nothing can be recorded now; empty when all is well."""
        return self._trouble

    @property
    def waiting(self) -> tuple[int, int]:
        """Sections that wait, and their bytes."""
        with self._lock:
            return self._waiting, self._waiting_bytes

    def start(self) -> None:
        """Reads what is there. Raises ConfigError where the records are somebody else's."""
        self._thread.start()
        self._thread.call(self._open)

    def close(self) -> None:
        """Ends after what waits."""
        self._thread.post(self._tidy)
        if self._thread.end():
            self._disk.records.close()
        else:
            _log.error("the disk of the activation store does not answer; what waits for it is lost")

    def flush(self, timeout_s: float) -> bool:
        """Whether all that was handed in before is written, in that time."""
        try:
            self._thread.call(self._tidy, wait_s=timeout_s)
        except StorageUnavailable:
            return False
        return self._loaded and not self._trouble

    def reserve(self, size_bytes: int, *, is_end: bool = False) -> DropReason | None:
        """Room for so many bytes, until they are written; or why there is none.

        is_end: of a recording, whose sections are here already: it may wait where no further section may.
        """
        if self._trouble:
            return DropReason.TROUBLE
        most_bytes = self._settings.max_waiting_bytes + (_SPARE_BYTES if is_end else 0)
        with self._lock:
            too_many = self._waiting >= self._most_waiting and not is_end
            if too_many or (self._waiting and self._waiting_bytes + size_bytes > most_bytes):
                return DropReason.BUSY
            self._waiting += 1
            self._waiting_bytes += size_bytes
        return None

    def unreserve(self, size_bytes: int) -> None:
        """It was written, or will not be."""
        with self._lock:
            self._waiting -= 1
            self._waiting_bytes -= size_bytes

    def write(self, incoming: IncomingSection) -> None:
        """Has a section written soon, for which room was reserved. Its descriptor is the writer's from now on."""
        self._thread.post(lambda: self._write(incoming))

    def complete(self, pending: PendingRecording, header: RecordingHeader, drawn: DrawnTensors | None) -> None:
        """Has a template made of what was recorded, when its sections are written. Room was reserved for `drawn`."""
        self._thread.post(lambda: self._complete(pending, header, drawn))

    def forget(self, pending: PendingRecording) -> None:
        """A recording came to nothing: its files go soon."""
        self._thread.post(lambda: self._insertion.forget(pending))
        self._thread.post(self._tidy)

    def lose(self, digest: str) -> None:
        """A file is damaged or gone, and with it what has it; the rest of its template stays."""
        gone = self._table.lose(digest)
        if gone:
            self._counts.add("damaged")
            _log.error("a section is damaged, and forgotten", extra={"digest": digest})
            self._thread.post(lambda: self._insertion.release(gone))
            self._thread.post(self._tidy)

    def drop(self, prefix: str) -> int:
        """Forgets templates. How many. Raises StorageUnavailable where the disk does not answer."""
        return self._thread.call(lambda: self._drop(prefix))

    def pin(self, prefix: str, *, pinned: bool) -> int:
        """Pins templates, or lets them go. How many. Raises StorageUnavailable where the disk does not answer."""
        return self._thread.call(lambda: self._pin(prefix, pinned=pinned))

    def _tick(self) -> None:
        self._recordings.expire()
        if self._trouble:
            self._heal()
        else:
            self._tidy()

    def _open(self) -> None:
        """Raises ConfigError."""
        if self._try(self._disk.open):
            self._opened = True
            self._load()

    def _load(self) -> None:
        """Takes in what the disk has, in place of all that is known."""
        for pending in self._recordings.end_all():
            self._insertion.forget(pending)
        self._insertion.release(files_of(self._table.drop("")))
        self._table.take_changes()
        if not self._try(lambda: self._insertion.load(self._disk.load())):
            return
        self._loaded = True
        _log.info("the activation store has read its templates", extra={"templates": self._table.totals().templates})
        self._try(self._insertion.room.probe, self._disk.drop_strays)
        self._tidy()

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
        except (StorageUnavailable, DataLoss) as error:
            self._counts.drop(DropReason.TROUBLE)
            self._fail(error)
        finally:
            self._recordings.remove(pending)
            self.unreserve(drawn.size_bytes if drawn is not None else 0)

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

    def _tidy(self) -> None:
        """Deletes and notes what is to be."""
        if self._loaded:
            self._try(lambda: self._disk.tidy(self._table.take_changes()))

    def _try(self, *steps: Callable[[], object]) -> bool:
        """Whether the disk has done all of it."""
        try:
            for step in steps:
                step()
        except (StorageUnavailable, DataLoss) as error:
            self._fail(error)
            return False
        return True

    def _fail(self, error: StorageUnavailable | DataLoss) -> None:
        if isinstance(error, DataLoss):
            self._loaded = False  # the records are to be opened anew, and read
        if not self._trouble:
            text = {"text": error.message}
            _log.error("the activation store records nothing until its disk can be written", extra=text)
        self._trouble = error.message

    def _heal(self) -> None:
        """Tries the disk again. Where the records have failed, or are gone, what is there then is read anew."""
        try:
            self._loaded = self._disk.open() and self._loaded
            self._opened = True
            self._insertion.room.probe()
            if self._loaded:
                self._disk.tidy(self._table.take_changes())
        except (StorageUnavailable, DataLoss) as error:
            self._fail(error)
            return
        self._trouble = ""
        _log.info("the disk of the activation store can be written again")
        if not self._loaded:
            self._load()
