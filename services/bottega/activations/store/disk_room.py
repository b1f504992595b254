"""Room on the disk for what a store writes: where it has less than the budget, templates go for what is new.

A disk may be smaller than the budget, or fill with what others keep there: then what it has room for is the budget. One
thread at a time calls it.
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
"""That a transaction adds to the records at most, in general: a template's sections, their layouts and maps."""

# Of a write for which templates went: others may take what has become free, but not for ever.
_TRIES = 3

_log = logging.getLogger(__name__)


class DiskRoom:
    """release: called with the digests of files that evicted templates have used, one for each use."""

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
        """Has so much written; where the disk lacks room, the templates used longest ago go, and it is tried again.

        but: the key of one that stays. Raises StorageUnavailable where room is lacking all the same; nothing goes in
        vain then, as far as the disk tells how much is free.
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
        """Returns when something could be written, and was taken away again. Raises StorageUnavailable."""
        self._disk.make_room()  # of what is to go, before anything that is of use
        self.write(PROBE_BYTES, self._disk.files.probe)

    def _free(self, size_bytes: int, but: str) -> bool:
        """Evicts templates until so many more bytes should fit on the disk. Whether any could go for that."""
        # A quota, or what a file system needs for itself, is not in the figures of the disk.
        gone = self._table.free(max(self._disk.files.lack(size_bytes), size_bytes), but=but)
        if not gone:
            return False
        self._counts.add("evictions", len(gone))
        self._release(files_of(gone))
        self._disk.make_room()
        return True

    def _say_small(self, error: StorageUnavailable) -> None:
        """Once: from then on it is as it is."""
        if not self._is_small:
            self._is_small = True
            says = "the disk has less room than disk_bytes: templates go for new ones that the budget would keep"
            _log.warning(says, extra={"disk": error.message})
