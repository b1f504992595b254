"""The activation store: it keeps templates in memory and on disk, answers questions, and adds recordings.

Any thread may call it. Calls for worker connections return at once, except that an answer reads a template's image
latent and noise from disk. `service.py` converts between the store and gRPC.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future

from bottega.activations.profiles import profile_folder
from bottega.activations.records import TemplateRecord, TemplateReply, activation_disk
from bottega.activations.store.answers import DrawnCache, TemplateLoader, add_profile, template_answer
from bottega.activations.store.checks import (
    check_header,
    check_key,
    check_question,
    check_recording,
    checked_section_key,
)
from bottega.activations.store.insertion import TemplateInsertion
from bottega.activations.store.publisher import TemplatePublisher
from bottega.activations.store.recordings import PendingRecording, PendingRecordings, SectionIntake
from bottega.activations.store.settings import ActivationStatistics, ActivationStoreSettings, DropReason
from bottega.activations.store.shared_templates import SharedTemplates
from bottega.activations.store.template_objects import Manifest, TemplateObjects
from bottega.activations.store.template_table import TemplateTable
from bottega.activations.store.writer import ActivationWriter
from bottega.addons.edits.wire import DrawnTensors, SectionLayout
from bottega.blobstore.writer import StoreCounts
from bottega.caching.tiered_cache import TieredCache
from bottega.caching.tiers import CacheLease, FilesByPath, Tier
from bottega.clocks import Clock, SteadyClock
from bottega.errors import Unavailable
from bottega.process import open_files
from bottega.storage import BlobFiles
from bottega.storage.objects import ObjectStore
from bottega.store_times import LapTimer
from bottega.v1 import activations_pb2 as pb
from bottega.v1.trace_pb2 import StoreTimes

# Share of the process's descriptors for sections in memory. The others are for connections and other sections.
_SHARE_OF_OPEN_FILES = 0.5
# Further loads at once with an object store, whose answers take longer than those of a disk.
_SHARED_LOADS = 8


class ActivationStore:
    """The store of one folder. Call `start` first and `close` last.

    `link` arguments are any object that identifies a worker's connection. A worker's recordings end with its
    connection.

    Args:
        objects: Where recordings are shared with other stores: the stores of manifests and of files, see
            TemplateObjects. None: this store has recordings of its own, on its disk.
    """

    def __init__(
        self,
        settings: ActivationStoreSettings,
        *,
        objects: tuple[ObjectStore, ObjectStore] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._settings = settings
        self._now = SteadyClock(clock or Clock())
        self._counts = StoreCounts(DropReason)
        self._table = TemplateTable(
            budget_bytes=settings.disk_budget_bytes, max_templates=settings.max_templates, now=self._now
        )
        disk = activation_disk(settings.folder, min_free_bytes=settings.min_free_bytes)
        self._profiles = profile_folder(settings.folder / "profiles")
        self._shared = self._share(objects, disk.files) if objects is not None else None
        self._memory = TieredCache(
            self._shared or FilesByPath(disk.files.path),
            what="section",
            missing=self._missing,
            budget_bytes=settings.memory_budget_bytes,
            max_entries=max(1, int(_SHARE_OF_OPEN_FILES * open_files.limit())),
            max_loads=settings.max_loads + (_SHARED_LOADS if objects is not None else 0),
            on_damaged=self._lose,
            spared=lambda: self._table.pinned,
        )
        self._loader = TemplateLoader(self._memory, budget_bytes=settings.memory_budget_bytes)
        self._recordings = PendingRecordings(idle_s=settings.record_idle_s, now=self._now, on_over=self._forget)
        self._insertion = TemplateInsertion(
            settings,
            table=self._table,
            disk=disk,
            memory=self._memory,
            counts=self._counts,
            now=self._now,
            shared=objects is not None,
        )
        self._writer = ActivationWriter(
            settings,
            table=self._table,
            recordings=self._recordings,
            now=self._now,
            disk=disk,
            insertion=self._insertion,
            counts=self._counts,
            on_recorded=self._shared.publish_soon if self._shared is not None else lambda: None,
        )
        self._drawn = DrawnCache(disk.files, lost=self._lose)

    def start(self) -> None:
        """Lock the folder and read its content. A failing disk is reported in the statistics and retried.

        Raise Unavailable if another process uses the folder, StorageUnavailable if it cannot be created, or ConfigError
        if its database belongs to another program.
        """
        self._profiles.open()
        self._writer.start()
        if self._shared is not None:
            self._shared.publish_soon()  # it lists the object store first

    def close(self) -> None:
        """Write the pending templates, and stop. Does nothing if the store was not started."""
        self._writer.close()
        if self._shared is not None:
            self._shared.close()
        self._memory.close()

    def flush(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` until all earlier changes are written. Return whether they are."""
        return self._writer.flush(timeout_s) and (self._shared is None or self._shared.flush(timeout_s))

    def wait_idle(self, seconds: float) -> bool:
        """Wait up to `seconds` until no section is leased. Return False if one still is."""
        return self._memory.wait_idle(seconds)

    # Calls for links.

    def answer(self, question: pb.TemplateQuestion, link: Hashable) -> TemplateReply:
        """Return the recorded sections of a template, or else whether the worker may record it.

        Raises ValueError if the question is malformed.
        """
        check_question(question)
        times, timer = StoreTimes(), LapTimer()
        if self._shared is not None and self._table.get(question.key) is None:
            self._shared.bring(question.key)
        template = self._table.find(question.key, question.recording)
        reply = self._reply(template, times) if template is not None else None
        self._counts.add("hits" if reply is not None else "misses")
        if reply is None:
            reply = TemplateReply(header=pb.TemplateAnswer(record=self._may_record(question, link)))
        reply.header.template_budget_bytes = self._settings.template_budget_bytes
        size = (question.width, question.height)
        if template is not None and not all(size):
            size = (template.header.width, template.header.height)
        add_profile(reply.header, self._profiles.get((question.model_hash, question.dtype, *size)))
        times.search_s = max(0.0, timer.lap() - times.read_s)
        reply.header.times.CopyFrom(times)
        return reply

    def fetch(self, digest: str) -> Future[CacheLease]:
        """Lease a section's complete and verified file. Return the lease with `give_back`.

        The future fails with DataLoss if the file is damaged, Unavailable if it is missing, and StorageUnavailable if
        it cannot be read now. After a failure, the section counts as missing.
        """
        file = self._table.file(digest)
        if file is None:
            gone: Future[CacheLease] = Future()
            gone.set_exception(_gone())
            return gone
        return self._memory.borrow(digest, file)

    def give_back(self, lease: CacheLease) -> None:
        """End a lease."""
        self._memory.give_back(lease)

    def layout_of(self, digest: str) -> SectionLayout | None:
        """Return the layout of a section's tensors, or None if the section no longer exists."""
        section = self._table.section(digest)
        return section.layout if section is not None else None

    def begin_section(
        self, header: pb.SectionHeader, layout: SectionLayout, link: Hashable
    ) -> SectionIntake | DropReason:
        """Return an object that receives the chunks of a new section, or the reason why the section is dropped.

        A section of an existing template replaces the one with the same key. Raise ValueError for a malformed header.
        """
        return self._writer.begin_section(header, checked_section_key(header), layout, link)

    @property
    def record_idle_s(self) -> float:
        """Seconds without a message after which a recording is abandoned."""
        return self._settings.record_idle_s

    def complete(self, header: pb.RecordingHeader, drawn: DrawnTensors | None, link: Hashable) -> None:
        """Make a template of a sent recording, unless it is one already. Raise ValueError if it is malformed."""
        check_header(header, drawn)
        template = self._table.get(header.key)
        if template is not None and template.recording == header.recording:
            return
        size_bytes = drawn.size_bytes if drawn is not None else 0
        reason = self._writer.reserve(size_bytes, is_end=True)
        if reason is not None:
            self._recordings.abandon(header.key, header.recording, link)
            self._counts.drop(reason)
            return
        pending = self._recordings.complete(header.key, header.recording, link)
        if pending is None:
            self._writer.unreserve(size_bytes)
            self._counts.drop(DropReason.NOT_GRANTED)
        else:
            self._writer.complete(pending, header, drawn)

    def abandon(self, header: pb.AbandonHeader, link: Hashable) -> None:
        """Abandon a recording, if there is one. Raise ValueError for a malformed header."""
        check_recording(header.recording)
        check_key(header.key)
        self._recordings.abandon(header.key, header.recording, link)

    def link_ended(self, link: Hashable) -> None:
        """Drop the recordings that the worker of this connection has not finished."""
        self._recordings.end_link(link)

    # Calls for gateways and operators.

    def prefetch(
        self, sources: Sequence[str], is_own: Callable[[str], bool] = lambda key: True
    ) -> list[pb.TemplateResidence]:
        """Start to load the templates of these sources into memory. Return where each source's template is now.

        Args:
            is_own: Tells whether a template, given by its key, belongs to this store; others are left out.
        """
        found = self._loader.prefetch([(source, self._table.expect(source, is_own)) for source in sources])
        shared = self._shared
        if shared is None:
            return found
        return [shared.expect(at.source, is_own) if at.tier == pb.TEMPLATE_TIER_NOWHERE else at for at in found]

    def warm(self, prefix: str) -> pb.WarmTemplateResponse:
        """Start to load templates whose IDs begin with `prefix` into memory, most recently used first."""
        if self._shared is not None and prefix:
            self._shared.bring_matching(prefix)
        found = [coming for coming in self._loader.load(self._table.matching(prefix)) if coming >= 0]
        return pb.WarmTemplateResponse(templates=len(found), loading_bytes=sum(found))

    def templates(self, limit: int) -> list[pb.Template]:
        """Return up to `limit` templates, most recently used first. The caller sets `holder`.

        Those that only the object store has come last.
        """
        own = [self._loader.describe(template, self._now()) for template in self._table.newest(limit)]
        return own + (self._shared.describe(limit - len(own)) if self._shared is not None else [])

    def drop(self, prefix: str) -> int:
        """Delete templates whose IDs begin with `prefix`, and return how many. Running edits keep their activations.

        Raise StorageUnavailable if the disk or the object store does not answer.
        """
        if self._shared is None:
            return self._writer.drop(prefix)
        own = {template.recording for template in self._table.matching(prefix)}
        self._writer.drop(prefix)
        return len(own | self._shared.drop(prefix))

    def pin(self, prefix: str, pinned: bool) -> int:
        """Pin templates whose IDs begin with `prefix` so that they are not evicted, or unpin them. Return how many.

        Raise StorageUnavailable if the disk or the object store does not answer.
        """
        own = self._writer.pin(prefix, pinned=pinned)
        return own + (self._shared.pin(prefix, pinned=pinned) if self._shared is not None else 0)

    def profiles(self) -> list[pb.BlockProfile]:
        """Return all block profiles."""
        return self._profiles.all()

    def set_profile(self, profile: pb.BlockProfile) -> None:
        """Store a block profile; one without blocks deletes the stored one. Raise ValueError or StorageUnavailable."""
        self._profiles.set(profile)

    @property
    def memory_bytes(self) -> int:
        """Bytes of sections that are in memory or being loaded."""
        return self._memory.used_bytes

    @property
    def disk_bytes_per_s(self) -> float:
        """Recent rate of loads from disk in bytes per second; 0 if unknown."""
        return self._loader.disk_bytes_per_s

    def lookups(self) -> tuple[int, int]:
        """Return how many questions found their template recorded, and how many did not, since the start."""
        return self._counts.total("hits"), self._counts.total("misses")

    def statistics(self) -> ActivationStatistics:
        """Return the current statistics."""
        totals, counts, loads = self._table.totals(), self._counts, self._memory.counts
        waiting, waiting_bytes = self._writer.waiting
        return ActivationStatistics(
            templates=totals.templates,
            sections=totals.sections,
            pinned=totals.pinned,
            disk_bytes=totals.size_bytes + self._insertion.pending_bytes,
            disk_budget_bytes=self._settings.disk_budget_bytes,
            memory_bytes=self._memory.used_bytes,
            memory_budget_bytes=self._settings.memory_budget_bytes,
            template_budget_bytes=self._settings.template_budget_bytes,
            hits=counts.total("hits"),
            misses=counts.total("misses"),
            fetches={tier.value: loads.by_tier[tier] for tier in Tier},
            loads=loads.loads,
            load_s=loads.load_s,
            loaded_bytes=loads.loaded_bytes,
            disk_bytes_per_s=self.disk_bytes_per_s,
            recorded=counts.total("recorded"),
            recorded_sections=counts.total("recorded_sections"),
            dropped=counts.dropped(),
            evictions=counts.total("evictions"),
            memory_evictions=loads.evictions,
            damaged=counts.total("damaged"),
            recording=len(self._recordings),
            waiting=waiting,
            waiting_bytes=waiting_bytes,
            trouble=self._writer.trouble,
            shared=self._shared.statistics() if self._shared is not None else None,
        )

    def _reply(self, template: TemplateRecord, times: StoreTimes) -> TemplateReply | None:
        """Return a template's answer; None if its image latent and noise are unreadable. Sets `times.read_s`."""
        if template.drawn is None:
            return TemplateReply(header=template_answer(template, self._memory))
        timer = LapTimer()
        drawn = self._drawn.get(template)
        times.read_s = timer.lap()
        return TemplateReply(header=template_answer(template, self._memory), drawn=drawn) if drawn is not None else None

    def _may_record(self, question: pb.TemplateQuestion, link: Hashable) -> bool:
        wanted = question.would_record and not self._writer.trouble and self._settings.disk_budget_bytes > 0
        there = self._table.get(question.key) or (self._shared is not None and self._shared.has(question.key))
        return bool(wanted and not there and self._recordings.grant(question.key, link))

    def _missing(self, digest: str) -> Unavailable:
        self._lose(digest)
        return _gone()

    def _lose(self, digest: str) -> None:
        if self._shared is not None and self._shared.forget_copy(digest):
            self._counts.add("damaged")
        else:
            self._writer.lose(digest)

    def _adopt(self, manifest: Manifest, drawn: bytes) -> bool:
        """Add a template that was brought back, and load it into memory, because an edit of it is expected."""
        adopted = self._writer.adopt(manifest, drawn)
        template = self._table.get(manifest.header.key)
        if adopted and template is not None:
            self._loader.load([template])
        return adopted

    def _share(self, objects: tuple[ObjectStore, ObjectStore], local: BlobFiles) -> SharedTemplates:
        manifests, files = objects
        settings = self._settings
        shared = TemplateObjects(
            manifests=manifests, files=files, budget_bytes=settings.shared_budget_bytes, now=self._now
        )
        publisher = TemplatePublisher(
            shared,
            table=self._table,
            local=local,
            file=settings.folder / "published.json",
            address=settings.shared_address,
            drop=lambda recording: self._writer.drop(recording),
            lose=lambda digest: self._writer.lose(digest),
        )
        return SharedTemplates(
            shared,
            publisher=publisher,
            table=self._table,
            local=local,
            adopt=self._adopt,
            now=self._now,
            retry_s=settings.retry_s,
        )

    def _forget(self, pending: PendingRecording) -> None:
        self._writer.forget(pending)


def _gone() -> Unavailable:
    return Unavailable("the section no longer exists: it was deleted, replaced or damaged")
