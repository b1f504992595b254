"""Writes the recordings of an activation store to the object store that it shares with others.

The object store decides which recordings exist: one that it had, and has no more, was dropped or evicted by another
store, perhaps while this one was stopped. It is then deleted here as well instead of being written again. For that,
the IDs of the recordings that the object store had are in a file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from bottega.activations.records import SectionKey, SectionRecord, TemplateRecord
from bottega.activations.store.settings import SharedOutcome
from bottega.activations.store.template_objects import SETTLED_S, KnownTemplate, TemplateObjects, manifest_of
from bottega.activations.store.template_table import TemplateTable
from bottega.rpc.security.private_files import write_file
from bottega.storage import BlobFiles

# A template in use is marked as used so often, which is a small write: before it may be evicted as unused.
_TOUCH_S = SETTLED_S / 2

_log = logging.getLogger(__name__)


class TemplatePublisher:
    """Brings the object store up to date with the templates of this store, in one thread.

    Args:
        objects: The recordings in the object store.
        table: The templates that this store has.
        local: The files on the disk.
        file: Where the IDs of the recordings that the object store had are stored.
        address: Address of the object store. IDs that were stored for another one do not count.
        drop: Deletes a recording from the disk, by its ID.
        lose: Removes the sections that use a file which cannot be read.
    """

    def __init__(
        self,
        objects: TemplateObjects,
        *,
        table: TemplateTable,
        local: BlobFiles,
        file: Path,
        address: str,
        drop: Callable[[str], object],
        lose: Callable[[str], None],
    ) -> None:
        self._objects = objects
        self._table = table
        self._local = local
        self._file = file
        self._address = address
        self._drop = drop
        self._lose = lose
        self._lock = threading.Lock()
        self._counts = Counter(dict.fromkeys(SharedOutcome, 0))
        self._states: dict[str, tuple[Mapping[SectionKey, SectionRecord], bool]] = {}
        """Sections and pins of templates, by recording, as they are in the object store."""
        self._published: set[str] | None = None
        """IDs of this store's recordings whose templates the object store had; None before the file was read."""
        self._is_saved = True
        self._too_large: set[str] = set()
        """IDs of recordings for which there was no room."""

    def outcomes(self) -> dict[str, int]:
        """Return the counts of all outcomes of work with the object store. Any thread may call it."""
        with self._lock:
            return {outcome.value: number for outcome, number in self._counts.items()}

    def count(self, outcome: SharedOutcome, number: int = 1) -> None:
        """Count an outcome. Any thread may call it."""
        with self._lock:
            self._counts[outcome] += number

    def try_refused(self) -> None:
        """Try recordings again for which there was no room."""
        self._too_large.clear()

    def publish_all(self) -> None:
        """Write what has changed, and delete what the object store has no more. Raise StorageUnavailable.

        The object store must have been listed.
        """
        published = self._published = self._read_published() if self._published is None else self._published
        for template in self._table.newest():
            known = self._objects.find(template.key)
            if known is None and template.recording in published:
                if not self._objects.exists(template.key):
                    self._drop(template.recording)
            elif known is not None and known.header.recording != template.recording:
                self._note(template)  # another store has recorded it at the same time; either recording is good
            elif known is None or self._is_changed(template):
                self._publish(template, known)
            elif template.use.used_s > known.written_s + _TOUCH_S:
                self._objects.touch(manifest_of(template))
        self._save()

    def _is_changed(self, template: TemplateRecord) -> bool:
        state = self._states.get(template.recording)
        return state is None or state[0] is not template.sections or state[1] != template.use.pinned

    def _publish(self, template: TemplateRecord, known: KnownTemplate | None) -> None:
        """Write a template to the object store, unless it is there already, or there is no room."""
        if template.recording in self._too_large:
            return
        state, manifest = (template.sections, template.use.pinned), manifest_of(template)
        if known is None or known.name != manifest.name:
            evicted = self._objects.make_room(manifest.size_bytes - (known.size_bytes if known is not None else 0))
            if evicted is None:
                self._refuse(template.recording)
                return
            self.count(SharedOutcome.EVICTED, len(evicted))
            if not self._objects.publish(manifest, self._read_local):
                return
            self.count(SharedOutcome.STORED)
            self._note(template)
            self._save()
        self._note(template)
        self._states[template.recording] = state

    def _refuse(self, recording: str) -> None:
        self._too_large.add(recording)
        if not self._counts[SharedOutcome.NO_ROOM]:
            _log.warning(
                "objects_bytes is full of pinned recordings and ones younger than 10 min; new ones stay on this disk"
            )
        self.count(SharedOutcome.NO_ROOM)

    def _read_local(self, digest: str) -> bytes | None:
        size_bytes = self._local.size(digest)
        data = None
        if size_bytes is not None:
            data = self._local.read(digest, digest=bytes.fromhex(digest), size_bytes=size_bytes)
        if data is None:
            self._lose(digest)
        return data

    def _note(self, template: TemplateRecord) -> None:
        assert self._published is not None, "publish_all has read it"
        if template.recording not in self._published:
            self._published.add(template.recording)
            self._is_saved = False

    def _read_published(self) -> set[str]:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            found = json.loads(self._file.read_bytes())
            if found["address"] == self._address:
                return set(map(str, found["recordings"]))
        return set()

    def _save(self) -> None:
        """Store the IDs of the recordings that this store still has. After a failure, try again the next time."""
        if self._is_saved or self._published is None:
            return
        there = {template.recording for template in self._table.newest()}
        self._published &= there
        self._states = {recording: state for recording, state in self._states.items() if recording in there}
        content = {"address": self._address, "recordings": sorted(self._published)}
        with contextlib.suppress(OSError):  # the disk's trouble is reported by the writer of the store
            write_file(self._file, json.dumps(content).encode())
            self._is_saved = True
