"""The activation store itself, in one: templates in memory and on the disk, questions, recordings, profiles.

Its calls come from any thread, and those of links return at once: nothing waits for the disk, but for a template's
image latent and noise, which an answer carries. `service.py` translates between it and gRPC.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from concurrent.futures import Future

from bottega.activations.disk.disk import ActivationDisk
from bottega.activations.disk.profiles import BlockProfileFolder
from bottega.activations.disk.record_rows import layout_part, read_layout
from bottega.activations.disk.records import TemplateRecords
from bottega.activations.disk.section_files import SectionFiles
from bottega.activations.store.answers import DrawnCache, add_profile, template_answer
from bottega.activations.store.checks import (
    check_header,
    check_key,
    check_question,
    check_recording,
    checked_section_key,
)
from bottega.activations.store.insertion import IncomingSection, TemplateInsertion
from bottega.activations.store.intake import SectionIntake
from bottega.activations.store.recordings import PendingRecording, PendingRecordings
from bottega.activations.store.residence import TemplateLoader
from bottega.activations.store.sealed_parts import SectionFile
from bottega.activations.store.settings import ActivationStoreSettings
from bottega.activations.store.statistics import ActivationCounts, ActivationStatistics, DropReason
from bottega.activations.store.template_table import TemplateTable
from bottega.activations.store.writer import ActivationWriter
from bottega.activations.template import TemplateRecord, TemplateReply
from bottega.caching import CacheLease, Tier, TieredCache
from bottega.clocks import Clock, SteadyClock
from bottega.errors import StorageUnavailable, Unavailable
from bottega.process import open_files
from bottega.sections import DrawnTensors, SectionLayout
from bottega.storage import folders, os_errors
from bottega.storage.process_lock import HeldElsewhere, ProcessLock
from bottega.store_times import LapTimer
from bottega.v1 import activations_pb2 as pb
from bottega.v1.trace_pb2 import StoreTimes

# That sections in memory may have; the others are for links, callers, and sections that memory has no room for.
_SHARE_OF_OPEN_FILES = 0.5


class ActivationStore:
    """Start it with `start`, end it with `close`.

    A link, as its calls take it, is whatever stands for one worker's link: what it records is its own while it lives.
    """

    def __init__(self, settings: ActivationStoreSettings, *, clock: Clock | None = None) -> None:
        self._settings = settings
        self._lock = ProcessLock(settings.folder)
        self._now = SteadyClock(clock or Clock())
        self._counts = ActivationCounts()
        self._table = TemplateTable(
            budget_bytes=settings.disk_budget_bytes, max_templates=settings.max_templates, now=self._now
        )
        self._files = SectionFiles(settings.folder / "sections", min_free_bytes=settings.min_free_bytes)
        self._profiles = BlockProfileFolder(settings.folder / "profiles")
        self._memory = TieredCache(
            self._files.path,
            what="section",
            missing=self._missing,
            budget_bytes=settings.memory_budget_bytes,
            max_entries=max(1, int(_SHARE_OF_OPEN_FILES * open_files.limit())),
            max_loads=settings.max_loads,
            on_damaged=self._lose,
            spared=lambda: self._table.pinned,
        )
        self._loader = TemplateLoader(self._memory, budget_bytes=settings.memory_budget_bytes)
        self._recordings = PendingRecordings(idle_s=settings.record_idle_s, now=self._now, on_over=self._forget)
        disk = ActivationDisk(files=self._files, records=TemplateRecords(settings.folder / "records.db"))
        self._insertion = TemplateInsertion(
            settings, table=self._table, disk=disk, memory=self._memory, counts=self._counts, now=self._now
        )
        self._writer = ActivationWriter(
            settings,
            table=self._table,
            recordings=self._recordings,
            disk=disk,
            insertion=self._insertion,
            counts=self._counts,
        )
        self._drawn = DrawnCache(self._files, lost=self._lose)

    def start(self) -> None:
        """Takes the folder, and reads what is there.

        A disk that fails is told of in the statistics, and tried again. Raises Unavailable where another process has
        the folder, StorageUnavailable where there can be none, ConfigError where its records are somebody else's.
        """
        with os_errors.translated():
            folders.make_own(self._settings.folder)
            try:
                self._lock.acquire()
            except HeldElsewhere as held:
                raise Unavailable(f"{held} (key folder)") from None
        self._profiles.open()
        self._writer.start()

    def close(self) -> None:
        """Writes what waits, and ends. Harmless when it was not started."""
        self._writer.close()
        self._memory.close()
        self._lock.release()

    def flush(self, timeout_s: float) -> bool:
        """Whether all that came before is written, within that time."""
        return self._writer.flush(timeout_s)

    def wait_idle(self, seconds: float) -> bool:
        """Whether no section is lent, or will not be within so many seconds. It blocks."""
        return self._memory.wait_idle(seconds)

    # What links bring.

    def answer(self, question: pb.TemplateQuestion, link: Hashable) -> TemplateReply:
        """What there is of a template, and whether the worker may record it.

        Raises ValueError for what breaks a rule of activations.proto.
        """
        check_question(question)
        times, timer = StoreTimes(), LapTimer()
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
        """A section's file, as soon as it can be read: whole, and checked. Give it back.

        It fails with DataLoss where it is damaged, Unavailable where it is gone, StorageUnavailable where it cannot be
        read now; the section counts as missing then.
        """
        file = self._table.file(digest)
        if file is None:
            gone: Future[CacheLease] = Future()
            gone.set_exception(_gone())
            return gone
        return self._memory.borrow(digest, file)

    def give_back(self, lease: CacheLease) -> None:
        """Ends a lease."""
        self._memory.give_back(lease)

    def layout_of(self, digest: str) -> SectionLayout | None:
        """Where the tensors of a section lie; None where the section is gone."""
        section = self._table.section(digest)
        return section.layout if section is not None else None

    def begin_section(
        self, header: pb.SectionHeader, layout: SectionLayout, link: Hashable
    ) -> SectionIntake | DropReason:
        """What takes the chunks of a section, which is kept soon after the last one; or why it is dropped, and counted.

        Of a template that is there it takes the place of the section with its key. Raises ValueError for what breaks a
        rule of activations.proto.
        """
        key = checked_section_key(header)
        template = self._table.get(header.key)
        pending = None if template is not None else self._recordings.begin_section(header.key, header.recording, link)
        if pending is None and (template is None or template.recording != header.recording):
            # Told that it may not, the worker would forget what it has just recorded.
            early = template is None and self._recordings.is_being_written(header.key, header.recording, link)
            refused = DropReason.EARLY if early else DropReason.NOT_GRANTED
            self._counts.drop(refused)
            return refused
        reason = self._writer.reserve(layout.size_bytes)
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
            on_whole=lambda descriptor: self._writer.write(incoming(descriptor=descriptor)),
            on_drop=lambda why: self._drop_section(layout, why),
        )

    @property
    def record_idle_s(self) -> float:
        """After which a recording of which nothing comes is given up."""
        return self._settings.record_idle_s

    def complete(self, header: pb.RecordingHeader, drawn: DrawnTensors | None, link: Hashable) -> None:
        """All sections of a recording were sent: soon it is a template. Harmless where it is one.

        Raises ValueError for what breaks a rule of activations.proto.
        """
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
        """A recording is worth nothing. Harmless where there is none such.

        Raises ValueError for what breaks a rule of activations.proto.
        """
        check_recording(header.recording)
        check_key(header.key)
        self._recordings.abandon(header.key, header.recording, link)

    def link_ended(self, link: Hashable) -> None:
        """What the worker was recording is forgotten."""
        self._recordings.end_link(link)

    # What gateways and operators ask for.

    def prefetch(self, sources: Sequence[str]) -> list[pb.TemplateResidence]:
        """Begins to bring into memory what edits of these sources will use; where it is now, for each."""
        return self._loader.prefetch([(source, self._table.expect(source)) for source in sources])

    def warm(self, prefix: str) -> pb.WarmTemplateResponse:
        """Begins to bring templates into memory whose recordings' names begin so, those used last first."""
        found = [coming for coming in self._loader.load(self._table.matching(prefix)) if coming >= 0]
        return pb.WarmTemplateResponse(templates=len(found), loading_bytes=sum(found))

    def templates(self, limit: int) -> list[pb.Template]:
        """The one used last first. holder is left to the caller."""
        return [self._describe(template) for template in self._table.newest(limit)]

    def drop(self, prefix: str) -> int:
        """Forgets templates whose recordings' names begin so; edits under way keep what they have been given.

        Raises StorageUnavailable where the disk does not answer.
        """
        return self._writer.drop(prefix)

    def pin(self, prefix: str, pinned: bool) -> int:
        """Keeps such templates from being evicted from the disk, or no longer; how many.

        Raises StorageUnavailable where the disk does not answer.
        """
        return self._writer.pin(prefix, pinned=pinned)

    def profiles(self) -> list[pb.BlockProfile]:
        """Of all models and sizes that have one."""
        return self._profiles.all()

    def set_profile(self, profile: pb.BlockProfile) -> None:
        """Keeps it in place of that of the same model, element type and size; without blocks, that one is forgotten.

        Raises ValueError for what is none, StorageUnavailable.
        """
        self._profiles.set(profile)

    @property
    def memory_bytes(self) -> int:
        """Of sections in memory, or on their way there."""
        return self._memory.used_bytes

    @property
    def disk_bytes_per_s(self) -> float:
        """That loads from the disk have had of late; 0 is not known."""
        return self._loader.disk_bytes_per_s

    def lookups(self) -> tuple[int, int]:
        """Questions since the start that found their template recorded, and those that did not."""
        return self._counts.total("hits"), self._counts.total("misses")

    def statistics(self) -> ActivationStatistics:
        """Its figures of this moment."""
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
        )

    def _reply(self, template: TemplateRecord, times: StoreTimes) -> TemplateReply | None:
        """None where what it was drawn with cannot be read, which takes the times' read_s."""
        if template.drawn is None:
            return TemplateReply(header=template_answer(template, self._memory))
        timer = LapTimer()
        drawn = self._drawn.get(template)
        times.read_s = timer.lap()
        return TemplateReply(header=template_answer(template, self._memory), drawn=drawn) if drawn is not None else None

    def _may_record(self, question: pb.TemplateQuestion, link: Hashable) -> bool:
        wanted = question.would_record and not self._writer.trouble and self._settings.disk_budget_bytes > 0
        return wanted and self._table.get(question.key) is None and self._recordings.grant(question.key, link)

    def _describe(self, template: TemplateRecord) -> pb.Template:
        header, use = template.header, template.use
        memory_bytes = self._loader.memory_bytes(template)
        return pb.Template(
            id=template.recording,
            digest=header.digest,
            model=header.model,
            model_hash=header.model_hash,
            width=header.width,
            height=header.height,
            size_bytes=template.size_bytes,
            steps=template.step_count,
            uses=use.uses,
            idle_s=max(0.0, self._now() - use.used_s),
            in_use=any(self._memory.leases(section.digest) for section in template.sections.values()),
            valid_share=template.valid_share,
            tier=pb.TEMPLATE_TIER_MEMORY if memory_bytes == template.size_bytes else pb.TEMPLATE_TIER_DISK,
            pinned=use.pinned,
            memory_bytes=memory_bytes,
        )

    def _drop_section(self, layout: SectionLayout, reason: DropReason) -> None:
        """One for which room was reserved."""
        self._writer.unreserve(layout.size_bytes)
        self._counts.drop(reason)

    def _missing(self, digest: str) -> Unavailable:
        self._lose(digest)
        return _gone()

    def _lose(self, digest: str) -> None:
        self._writer.lose(digest)

    def _forget(self, pending: PendingRecording) -> None:
        self._writer.forget(pending)


def _gone() -> Unavailable:
    return Unavailable("the section is gone: its template was dropped, or it was recorded anew, or damaged")
