"""An activation store's part in the recordings that several stores share in an object store.

What the store records is written to its own disk first, and to the object store in the background, so that no worker
waits for the latter. The disk is a tier in front: a template that it evicts stays in the object store. A template that
another store recorded, or this one on another host, is brought back when an edit of it is expected: its record at once,
and each file when it is first read. Failures of the object store cost time: edits compute what they do not get.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from bottega.activations.store.publisher import TemplatePublisher
from bottega.activations.store.sealed_parts import memory_file
from bottega.activations.store.settings import SharedOutcome, SharedStatistics
from bottega.activations.store.template_objects import KnownTemplate, Manifest, TemplateObjects
from bottega.activations.store.template_table import TemplateTable
from bottega.clocks import SteadyClock
from bottega.errors import StorageUnavailable
from bottega.storage import BlobFiles, SerialThread
from bottega.storage.os_errors import unavailable
from bottega.v1 import activations_pb2 as pb

_TRANSFERS = 8
_REFRESH_S = 60.0
_SWEEP_S = 3600.0
# After a failure, files are not read for so long, so that reading from the disk does not wait for the object store.
_PAUSE_S = 5.0
# Upper bound on the wait of one call to the thread, which may be uploading a recording.
_WAIT_S = 60.0
# A question of a worker waits so long for a template that is being brought back. Its other messages wait as well.
_QUESTION_S = 0.3
# A call to warm templates waits so long for their records.
_WARM_S = 10.0
_CLOSE_S = 10.0

_log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


class SharedTemplates:
    """The object store behind the disk of an activation store; it is also the files of the memory tier.

    Args:
        objects: The recordings in the object store.
        table: The templates that this store has.
        local: The files on the disk.
        adopt: Adds a template with its file of image latent and noise; see TemplateInsertion.adopt.
        retry_s: Seconds between two tries to write.
    """

    def __init__(
        self,
        objects: TemplateObjects,
        *,
        publisher: TemplatePublisher,
        table: TemplateTable,
        local: BlobFiles,
        adopt: Callable[[Manifest, bytes], bool],
        now: SteadyClock,
        retry_s: float,
    ) -> None:
        self.objects = objects
        self._pool = ThreadPoolExecutor(_TRANSFERS, thread_name_prefix="brought templates")
        self._table = table
        self._local = local
        self._adopt = adopt
        self._publisher = publisher
        self._now = now
        self._thread = SerialThread("shared-templates", tick=self._tick, tick_s=retry_s)
        self._lock = threading.Lock()
        self._bringing: dict[str, Future[None]] = {}
        self._listed = False
        self._refresh_at = self._sweep_at = 0.0
        self._paused_until = 0.0
        self.trouble = ""
        """Why the object store cannot be used now; empty if it can."""

    def publish_soon(self) -> None:
        """Write what is not in the object store yet, without waiting for it."""
        self._thread.post(self._tick)

    def close(self) -> None:
        """Write what is not in the object store yet, for a short time, and stop."""
        if not self.trouble:
            with contextlib.suppress(StorageUnavailable):
                self._thread.call(self._tick, wait_s=_CLOSE_S)
        self._thread.end(wait_s=_CLOSE_S, drop_waiting=True)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.objects.close()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything is written. Return False after the time-out, or if it cannot be written."""
        try:
            self._thread.call(self._tick, wait_s=timeout_s)
        except StorageUnavailable:
            return False
        return not self.trouble

    # The files of the memory tier.

    def size_of(self, digest: str) -> int | None:
        """Return the size of a section's file; None if no template has it."""
        file = self._table.file(digest)
        return file.size_bytes if file is not None else None

    def open_file(self, digest: str) -> int:
        """Return a descriptor of a section's file, from the disk or else from the object store.

        Raises FileNotFoundError, OSError, and StorageUnavailable if the object store cannot be used now.
        """
        try:
            return self._local.open_file(digest)
        except FileNotFoundError:
            file = self._table.file(digest)
            data = self._read(file.group, digest, file.size_bytes) if file is not None else None
            if data is None:
                raise
        with contextlib.suppress(StorageUnavailable):  # a full disk; the next use reads it from the object store again
            self._keep(digest, data)
        return memory_file([(0, data)], len(data))

    def forget_copy(self, digest: str) -> bool:
        """Delete a damaged file from the disk. Return whether the object store should have it."""
        file = self._table.file(digest)
        template = self._table.get(file.group) if file is not None else None
        if template is None or self.objects.find(template.key, template.recording) is None:
            return False
        if self._local.size(digest) is None:
            return False  # it came from the object store
        self._local.remove([digest])
        _log.error(
            "a file is damaged, and was deleted; it is read from the object storage again", extra={"digest": digest}
        )
        return True

    # Templates that this store does not have.

    def statistics(self) -> SharedStatistics:
        """Return the current statistics."""
        known = self.objects.all()
        return SharedStatistics(
            templates=len(known),
            alone=sum(self._table.get(each.header.key) is None for each in known),
            size_bytes=sum(each.size_bytes for each in known),
            budget_bytes=self.objects.budget_bytes,
            outcomes=self._publisher.outcomes(),
            trouble=self.trouble,
        )

    def has(self, key: str) -> bool:
        """Return whether the object store has a template."""
        return self.objects.find(key) is not None

    def bring(self, key: str, *, wait_s: float = _QUESTION_S) -> None:
        """Bring a template back if the object store has it. Wait for it, but not longer than `wait_s`."""
        known = self.objects.find(key)
        if known is not None:
            wait([self._bring_soon(known)], wait_s)

    def expect(self, source: str, is_own: Callable[[str], bool]) -> pb.TemplateResidence:
        """Bring back the template of a source that was used last. Return where it is until then.

        Args:
            is_own: Tells whether a template, given by its key, belongs to this store; others are left out.
        """
        known = next((known for known in self.objects.of_source(source) if is_own(known.header.key)), None)
        if known is None:
            return pb.TemplateResidence(source=source, tier=pb.TEMPLATE_TIER_NOWHERE)
        self._bring_soon(known)
        # Gateways assume the rate of the disk.
        size_bytes = known.size_bytes
        return pb.TemplateResidence(
            source=source, tier=pb.TEMPLATE_TIER_DISK, size_bytes=size_bytes, disk_bytes=size_bytes
        )

    def bring_matching(self, prefix: str) -> None:
        """Bring back the templates whose IDs begin with `prefix`, and wait for their records for a while."""
        wait([self._bring_soon(known) for known in self.matching(prefix)], _WARM_S)

    def describe(self, limit: int) -> list[pb.Template]:
        """Describe up to `limit` recordings that only the object store has, most recently used first."""
        found = sorted(self.matching(""), key=lambda known: -known.written_s)
        return [known.to_wire(self._now()) for known in found[:limit]]

    def matching(self, prefix: str) -> list[KnownTemplate]:
        """Return the recordings whose IDs begin with `prefix` and that only the object store has."""
        return [
            known
            for known in self.objects.all()
            if known.header.recording.startswith(prefix) and self._table.get(known.header.key) is None
        ]

    def drop(self, prefix: str) -> set[str]:
        """Delete recordings whose IDs begin with `prefix`, and return their IDs. Raise StorageUnavailable."""

        def drop() -> set[str]:
            found = [known for known in self.objects.all() if known.header.recording.startswith(prefix)]
            self.objects.remove(found)
            return {known.header.recording for known in found}

        return self._call(drop)

    def pin(self, prefix: str, *, pinned: bool) -> int:
        """Pin or unpin recordings. Return how many of them only the object store has. Raise StorageUnavailable."""

        def pin() -> int:
            found = self.matching(prefix)
            for known in found:
                self.objects.pin(known, pinned=pinned)
            return len(found)

        self.publish_soon()
        return self._call(pin)

    def _call(self, do: Callable[[], ResultT]) -> ResultT:
        def do_listed() -> ResultT:
            if not self._listed:
                self._refresh()
            return do()

        try:
            return self._thread.call(do_listed, wait_s=_WAIT_S)
        except StorageUnavailable as error:
            slow = error.metadata.get("cause") == "ETIMEDOUT"
            if not slow:
                self._fail(error)
            why = "it answers too slowly; try again" if slow else error.message
            raise unavailable(f"the object storage cannot be used now: {why}", cause="EIO") from error

    def _bring_soon(self, known: KnownTemplate) -> Future[None]:
        key = known.header.key
        with self._lock:
            bringing = self._bringing.get(key)
            if bringing is not None:
                return bringing
            bringing = self._bringing[key] = self._pool.submit(self._bring, known)
        bringing.add_done_callback(functools.partial(self._brought, key))  # without the lock, which it takes
        return bringing

    def _brought(self, key: str, _: Future[None]) -> None:
        with self._lock:
            self._bringing.pop(key, None)

    def _bring(self, known: KnownTemplate) -> None:
        """Add the record of a template to this store, with its image latent and noise."""
        if self._table.get(known.header.key) is not None or self._now() < self._paused_until:
            return
        try:
            manifest = self.objects.read(known)
            data = self._drawn(manifest) if manifest is not None else None
            if manifest is None or data is None:
                self._publisher.count(SharedOutcome.MISSING)
                self.objects.discard(known)
                self._refresh_at = 0.0  # another store may have replaced it
                return
            if self._adopt(manifest, data):
                self._publisher.count(SharedOutcome.BROUGHT)
                self.publish_soon()  # it is noted as published
        except StorageUnavailable as error:
            self._fail(error)

    def _drawn(self, manifest: Manifest) -> bytes | None:
        drawn = manifest.drawn
        return b"" if drawn is None else self.objects.read_file(manifest.header.key, drawn.digest, drawn.size_bytes)

    def _read(self, key: str, digest: str, size_bytes: int) -> bytes | None:
        if self._now() < self._paused_until:
            raise unavailable("the object storage has failed a moment ago", cause="EIO")
        try:
            data = self.objects.read_file(key, digest, size_bytes)
        except StorageUnavailable as error:
            self._fail(error)
            raise
        self._recover()
        self._publisher.count(SharedOutcome.READ if data is not None else SharedOutcome.MISSING)
        return data

    def _keep(self, digest: str, data: bytes) -> None:
        self._local.check_room(len(data))
        self._local.write(digest, data)
        if self._table.file(digest) is None:  # its template was evicted meanwhile
            self._local.remove([digest])

    # The methods below run in the thread.

    def _tick(self) -> None:
        try:
            if self._now() >= self._refresh_at or self.trouble:
                self._refresh()
            if self._listed:
                self._publisher.publish_all()
            if self._now() >= self._sweep_at:
                self._sweep_at = self._now() + _SWEEP_S
                self._publisher.count(SharedOutcome.ORPHANED, self.objects.sweep())
        except StorageUnavailable as error:
            self._fail(error)
        else:
            self._recover()

    def _refresh(self) -> None:
        self.objects.refresh()
        self._listed = True
        self._refresh_at = self._now() + _REFRESH_S
        self._publisher.try_refused()

    def _fail(self, error: StorageUnavailable) -> None:
        self._publisher.count(SharedOutcome.FAILED)
        self._paused_until = self._now() + _PAUSE_S
        with self._lock:
            first, self.trouble = not self.trouble, error.message
        if first:
            _log.warning(
                "the object storage cannot be used now; recordings stay on this store's disk, and edits compute what "
                "only the object storage has",
                extra={"text": error.message},
            )

    def _recover(self) -> None:
        with self._lock:
            was, self.trouble, self._paused_until = self.trouble, "", 0.0
        if was:
            _log.info("the object storage can be used again")
