"""Room on the disk: if it is fuller than the budget assumes, templates are evicted for new ones.

A disk may be smaller than the budget, or filled by others; its free room is the budget then. Calls must come from one
thread at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from bottega.activations.disk.disk import ActivationDisk
from bottega.activations.disk.section_files import PROBE_BYTES
from bottega.activations.store.statistics import ActivationCounts
from bottega.activations.store.template_table import TemplateTable, files_of
from bottega.errors import StorageUnavailable
from bottega.storage import os_errors

RECORD_BYTES = 256 << 10
"""Typical upper bound on what a transaction adds to the records: a template's sections, layouts and maps."""

# Attempts at one write: others may use the room that evictions have freed.
_TRIES = 3

_log = logging.getLogger(__name__)


class DiskRoom:
    """Makes room on the disk. `release` is called with the digests of evicted templates' files, once for each use."""

    def __init__(
        self,
        *,
        table: TemplateTable,
        disk: ActivationDisk,
        counts: ActivationCounts,
        release: Callable[[Iterable[str]], None],
    ) -> None:
        self._table = table
        self._disk = disk
        self._counts = counts
        self._release = release
        self._is_small = False

    def write(self, size_bytes: int, write: Callable[[], None], *, but: str = "") -> None:
        """Call `write`; if the disk lacks room for `size_bytes`, evict the least recently used templates and retry.

        The template with key `but` stays. Raise StorageUnavailable if that cannot free enough; nothing is evicted in
        vain, as far as the disk reports its free room.
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
        """Test that the disk can be written. Raise StorageUnavailable if not."""
        self._disk.make_room()  # Deletes discarded files before templates are evicted.
        self.write(PROBE_BYTES, self._disk.files.probe)

    def _free(self, size_bytes: int, but: str) -> bool:
        """Evict templates until this many bytes should fit on the disk, and return whether any were evicted."""
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
            text = "the disk has less room than disk_bytes: templates within the budget are evicted for new ones"
            _log.warning(text, extra={"disk": error.message})
