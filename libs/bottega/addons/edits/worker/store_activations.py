"""The ActivationSource of a worker: recordings in its own memory, and in the fleet's activation stores.

Each template belongs to one store, the same one for every worker. While that store is away, queries are answered at
once as if nothing were recorded, and new recordings stay in this worker. Sections in a store are loaded when they are
requested. A recording of which nothing was copied is dropped as soon as nothing reads it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from bottega.addons.edits.engine.recordings.recording import DrawnTemplate, Recording, RecordingKey, StepKey
from bottega.addons.edits.engine.recordings.source import MemoryActivations, TemplateQuery
from bottega.addons.edits.worker.load_meter import LoadMeter
from bottega.addons.edits.worker.questions import LinkAnswer, TemplateQuestions
from bottega.addons.edits.worker.store_link import ActivationLinkSettings, ActivationStoreLink
from bottega.addons.edits.worker.stored_step import StoredStep
from bottega.addons.edits.worker.template import AnsweredSection, AnsweredTemplate
from bottega.addons.interface.store_link import MAX_SERVICES, rank_stores, renew_links
from bottega.engine.spans import StoreWork
from bottega.transport import LinkCounters, OfferSource
from bottega.v1.activations_pb2 import RecordingHeader
from bottega.v1.fleet_pb2 import ServiceAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSettings:
    """The settings for a worker's recordings."""

    budget_bytes: int
    """Maximum bytes of recordings in this worker's memory."""
    model_name: str
    """Name of the engine's model in requests."""
    latent_scale: int
    """Pixels per latent element, along each side."""
    pinned: bool = False
    """Whether loads go to pinned memory, because a GPU reads them."""
    link: ActivationLinkSettings = field(default_factory=ActivationLinkSettings)


class StoreActivations:
    """The recordings of a worker. Methods may be called by the same threads as in ActivationSource."""

    def __init__(
        self,
        settings: ActivationSettings,
        *,
        offers: OfferSource,
        counters: LinkCounters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.meter = LoadMeter()
        self.pinned = settings.pinned
        self.arrivals = threading.Condition()
        self._settings = settings
        self._offers = offers
        self._counters = counters
        self._memory = MemoryActivations(settings.budget_bytes, clock)
        self._numbers = itertools.count(1)
        self._of_store: WeakKeyDictionary[Recording, ActivationStoreLink] = WeakKeyDictionary()
        self._questions = TemplateQuestions(clock)
        self._links: dict[str, ActivationStoreLink] = {}  # by the name of the store
        self._lock = threading.Lock()

    @property
    def linked(self) -> int:
        """Number of connected stores."""
        return sum(link.open for link in list(self._links.values()))

    @property
    def load_bytes_per_s(self) -> float | None:
        return self.meter.bytes_per_s if self._links else None

    def set_stores(self, stores: Sequence[ServiceAddress]) -> None:
        with self._lock:
            self._links, lost = renew_links(self._links, stores[:MAX_SERVICES], self._open)
        for link in lost:
            link.close()

    def ask(self, query: TemplateQuery) -> Future[StoreWork | None]:
        link = None if self._is_here(query) else self._link_of(query.key)
        if link is not None:
            return self._questions.ask(query, link)
        known: Future[StoreWork | None] = Future()
        known.set_result(None)
        return known

    def find(self, key: RecordingKey, recording: str = "") -> Recording | None:
        answer = self._questions.take(key)
        if answer is not None:
            self._take_in(key, answer, recording)
        found = self._memory.find(key, recording)
        if found is None and answer is not None:
            self._questions.keep(key, answer)  # for `begin`
        return found

    def begin(
        self, key: RecordingKey, shape: tuple[int, int], drawn: DrawnTemplate | None = None, *, origin: str = ""
    ) -> Recording | None:
        answer = self._questions.take(key)
        begun = self._memory.begin(key, shape, drawn, origin=origin)
        if begun is None or answer is None:
            return begun
        begun.budget_bytes, begun.profile = answer.template.budget_bytes, answer.template.profile
        if answer.template.record and answer.link.open:
            self._of_store[begun] = answer.link
            answer.link.uploads.begin(begun)
        return begun

    def changed(self, recording: Recording, key: StepKey) -> None:
        link = self._of_store.get(recording)
        if link is not None:
            link.uploads.add(recording, key)

    def reserve(self, recording: Recording, size_bytes: int) -> bool:
        return self._memory.reserve(recording, size_bytes)

    def complete(self, recording: Recording) -> None:
        self._memory.complete(recording)
        link = self._of_store.get(recording)
        if link is not None:
            link.uploads.complete(recording, self._header(recording))

    def abandon(self, recording: Recording) -> None:
        self._memory.abandon(recording)
        link = self._of_store.pop(recording, None)
        if link is not None:
            link.uploads.abandon(recording)

    def release(self, recording: Recording) -> None:
        self._memory.release(recording)
        if recording.readers:
            return
        for step in recording.all_steps:
            if isinstance(step, StoredStep):
                step.rest()
        if not recording.held_bytes:
            self._memory.forget(recording)

    @property
    def budget_bytes(self) -> int:
        return self._memory.budget_bytes

    @property
    def spare_bytes(self) -> int:
        return self._memory.spare_bytes

    @property
    def recordings(self) -> Sequence[Recording]:
        return self._memory.recordings

    @property
    def counts(self) -> Mapping[str, int]:
        return {**self._memory.counts, **self.meter.counts}

    def drop(self, prefix: str) -> int:
        return self._memory.drop(prefix)

    def make_room(self, size_bytes: int, turns: float) -> bool:
        """Free memory for `size_bytes` that are used in `turns` forward passes, and return whether there is enough.

        Unused recordings are dropped first. Then parts of used recordings are dropped that running edits have passed or
        will need later than in `turns` forward passes: an edit needs only some of its steps in memory.
        """
        if self._memory.make_room(size_bytes):
            return True
        self._let_go(size_bytes - self.spare_bytes, turns)
        return self._memory.make_room(size_bytes)

    def has_room(self, size_bytes: int) -> bool:
        """Return whether `size_bytes` fit now. Thread-safe."""
        return self._memory.used_bytes + size_bytes <= self._memory.budget_bytes

    def _let_go(self, lack_bytes: int, turns: float) -> None:
        """Drop about `lack_bytes` copied bytes of used recordings that no edit needs within `turns` forward passes."""
        later = [
            (until, recording, step)
            for recording in self.recordings
            for key, step in recording.steps.items()
            if isinstance(step, StoredStep) and step.held_bytes and (until := recording.turns_until(key)) > turns
        ]
        for _, recording, step in sorted(later, key=lambda item: item[0], reverse=True):
            if lack_bytes <= 0:
                return
            freed_bytes = step.let_go()
            recording.reserved_bytes = max(0, recording.reserved_bytes - freed_bytes)
            lack_bytes -= freed_bytes

    def _open(self, store: ServiceAddress) -> ActivationStoreLink:
        return ActivationStoreLink(
            store,
            owner=self._questions,
            offers=self._offers,
            settings=self._settings.link,
            meter=self.meter,
            counters=self._counters,
        )

    def _is_here(self, query: TemplateQuery) -> bool:
        """Return whether this worker has the recording and can use it without asking a store."""
        kept = self._memory.get(query.key)
        if kept is None or query.recording not in ("", kept.id):
            return False
        if any(isinstance(step, StoredStep) and not step.whole for step in kept.all_steps):
            return False
        link = self._link_of(query.key)
        return not kept.complete or link is None or not link.uploads.lacks(kept)

    def _link_of(self, key: RecordingKey) -> ActivationStoreLink | None:
        links = self._links
        return links[rank_stores(links, key.digest)[0]] if links else None

    def _take_in(self, key: RecordingKey, answer: LinkAnswer, recording: str) -> None:
        """Update the recordings in memory from a store's response.

        A recording in use is never replaced by another one, because they were drawn from different noise.

        Args:
            recording: ID of the only acceptable recording; empty for any.
        """
        template, kept = answer.template, self._memory.get(key)
        if kept is not None and kept.id != template.recording:
            # A recording of this worker alone is as good as the store's, unless an attempt needs the other one.
            own = not any(isinstance(step, StoredStep) for step in kept.steps.values())
            if own and kept.complete and recording in ("", kept.id):
                self._offer(kept, answer)
                return
            if own and not template.recording:
                return  # the wanted one is lost, so this one stays
            if not kept.is_idle:
                return
            self._memory.forget(kept)
            kept = None
        if not template.recording:
            return
        if kept is None:
            kept = Recording(key, template.shape, template.drawn, origin=answer.origin, id=template.recording)
            self._memory.adopt(kept)
        self._use_stored(kept, answer)

    def _use_stored(self, recording: Recording, answer: LinkAnswer) -> None:
        """Use a recording in a store: load sections on request, and upload sections that the store lacks."""
        template, link = answer.template, answer.link
        recording.budget_bytes, recording.profile = template.budget_bytes, template.profile
        self._of_store[recording] = link
        link.uploads.adopt(recording)
        edit = next(self._numbers)
        for section in template.sections:
            if not _is_known(recording, section, link):
                step = StoredStep(section, recording=recording, link=link, room=self, edit=edit)
                recording.put(section.key, step)
        if not recording.readers:
            _forget_lost(recording, template)
        for key in recording.steps.keys() - {section.key for section in template.sections}:
            link.uploads.add(recording, key)

    def _offer(self, recording: Recording, answer: LinkAnswer) -> None:
        """Upload a recording that only this worker has, if the store accepts it."""
        uploads = answer.link.uploads
        if answer.template.recording:
            uploads.pass_over(recording)
        elif answer.template.record and answer.link.open:
            self._of_store[recording] = answer.link
            uploads.begin(recording)
            for key in list(recording.steps):
                uploads.add(recording, key)
            uploads.complete(recording, self._header(recording))

    def _header(self, recording: Recording) -> RecordingHeader:
        height, width = recording.shape
        key, scale = recording.key, self._settings.latent_scale
        return RecordingHeader(
            recording=recording.id,
            key=key.digest,
            source=recording.origin,
            tenant=key.tenant,
            digest=key.template,
            model=self._settings.model_name,
            model_hash=key.model_hash,
            dtype=key.dtype,
            width=width * scale,
            height=height * scale,
            latent_height=height,
            latent_width=width,
            has_drawn=recording.drawn is not None,
            seed=0 if recording.drawn is None else recording.drawn.seed,
        )


def _forget_lost(recording: Recording, template: AnsweredTemplate) -> None:
    """Drop sections that the store has lost, so that the next edit records them again. Nothing reads the recording now.

    Sections that this worker still has are uploaded again.
    """
    for key in recording.steps.keys() - {section.key for section in template.sections}:
        recording.writable(key)
    digests = {section.digest for section in template.sections}
    recording.forget_steps(
        lambda step: isinstance(step, StoredStep) and not step.whole and step.section.digest not in digests
    )


def _is_known(recording: Recording, section: AnsweredSection, link: ActivationStoreLink) -> bool:
    """Return whether this worker's section needs no update: this worker wrote it, or it equals the store's."""
    step = recording.steps.get(section.key)
    if step is None:
        return False
    if not isinstance(step, StoredStep):
        return True
    return step.section.digest == section.digest and (step.whole or (step.link is link and not step.lost))
