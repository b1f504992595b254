"""Recordings of a worker: in its memory, and behind that in the fleet's activation stores. An ActivationSource.

A template belongs to one store of those that there are, the same one for every worker. Where that is away, questions
are answered at once with nothing, and what is recorded stays in this worker. What a store has is loaded as it is
requested; a recording of which nothing was copied is let go as soon as nobody reads it.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from bottega.diffusion.editing.recordings.keys import RecordingKey, StepKey
from bottega.diffusion.editing.recordings.memory import MemoryActivations
from bottega.diffusion.editing.recordings.recording import DrawnTemplate, Recording
from bottega.diffusion.editing.recordings.source import TemplateQuery
from bottega.diffusion.engine.store_work import StoreWork
from bottega.transport import LinkCounters, OfferSource
from bottega.v1.activations_pb2 import RecordingHeader
from bottega.v1.fleet_pb2 import ServiceAddress
from bottega.worker.activations.load_meter import LoadMeter
from bottega.worker.activations.questions import LinkAnswer, TemplateQuestions
from bottega.worker.activations.store_link import ActivationLinkSettings, ActivationStoreLink
from bottega.worker.activations.stored_step import StoredStep
from bottega.worker.activations.template import AnsweredSection, AnsweredTemplate

# Stores that are linked: a fleet has one, or a few.
_MOST_STORES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSettings:
    """budget_bytes: of the worker's memory. model_name: as requests call the engine's model. latent_scale: pixels of an
    element of its latents, a side. pinned: whether a GPU reads what is loaded."""

    budget_bytes: int
    model_name: str
    latent_scale: int
    pinned: bool = False
    link: ActivationLinkSettings = field(default_factory=ActivationLinkSettings)


class StoreActivations:
    """Its threads are those of the protocol."""

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
        """Links that are open."""
        return sum(link.open for link in list(self._links.values()))

    @property
    def load_bytes_per_s(self) -> float | None:
        return self.meter.bytes_per_s if self._links else None

    def set_stores(self, stores: Sequence[ServiceAddress]) -> None:
        wanted = {store.name: store for store in stores[:_MOST_STORES]}
        with self._lock:
            old = self._links
            kept = {
                name: link
                for name, link in old.items()
                if name in wanted and link.store.address == wanted[name].address
            }
            self._links = {name: kept.get(name) or self._open(store) for name, store in wanted.items()}
        for name, link in old.items():
            if name not in kept:
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

    def stop(self) -> None:
        self.set_stores(())

    def make_room(self, size_bytes: int, turns: float) -> bool:
        """Whether there is room for so much more that is used in so many turns.

        Recordings that nobody uses go for it, or else what edits under way have passed or will use later than that:
        memory for some of their steps is enough then.
        """
        if self._memory.make_room(size_bytes):
            return True
        self._let_go(size_bytes - self.spare_bytes, turns)
        return self._memory.make_room(size_bytes)

    def has_room(self, size_bytes: int) -> bool:
        """Whether there is room now. Any thread may ask."""
        return self._memory.used_bytes + size_bytes <= self._memory.budget_bytes

    def _let_go(self, lack_bytes: int, turns: float) -> None:
        """Of recordings in use, about so many bytes that were copied and that nobody takes in so many turns."""
        later = [
            (until, recording, step)
            for recording in self.recordings
            for key, step in recording.steps.items()
            if isinstance(step, StoredStep) and step.held_bytes and (until := recording.turns_until(key)) > turns
        ]
        for _, recording, step in sorted(later, key=lambda each: each[0], reverse=True):
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
        """Whether no store knows more of it, nor less."""
        kept = self._memory.get(query.key)
        if kept is None or query.recording not in ("", kept.id):
            return False
        if any(isinstance(step, StoredStep) and not step.whole for step in kept.all_steps):
            return False
        link = self._link_of(query.key)
        return not kept.complete or link is None or not link.uploads.lacks(kept)

    def _link_of(self, key: RecordingKey) -> ActivationStoreLink | None:
        name = _choose_store(self._links, key.digest)
        return None if name is None else self._links[name]

    def _take_in(self, key: RecordingKey, answer: LinkAnswer, recording: str) -> None:
        """Has the memory know what the store has said. recording: that is wanted; empty is any.

        A recording in use is never replaced by another one: they were drawn from different noise.
        """
        template, kept = answer.template, self._memory.get(key)
        if kept is not None and kept.id != template.recording:
            # Here alone, it is as good as the store's, but for an attempt that goes on with that one.
            own = not any(isinstance(step, StoredStep) for step in kept.steps.values())
            if own and kept.complete and recording in ("", kept.id):
                self._offer(kept, answer)
                return
            if own and not template.recording:
                return  # the one that is wanted is nowhere: this one is not to go for it
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
        """What the store has of a recording is loaded when it is requested; what it lacks, it is given."""
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
        """One that is in this worker alone: the store was away, or lost it. Gives it, where the store takes it."""
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
    """What the store has lost will not come: the next edit records it anew, but for what is here, which is given back.

    Nobody reads the recording now.
    """
    for key in recording.steps.keys() - {section.key for section in template.sections}:
        recording.writable(key)
    digests = {section.digest for section in template.sections}
    recording.forget_steps(
        lambda step: isinstance(step, StoredStep) and not step.whole and step.section.digest not in digests
    )


def _is_known(recording: Recording, section: AnsweredSection, link: ActivationStoreLink) -> bool:
    """Whether what is here of a forward is as good as what the store has: written here, or the same."""
    step = recording.steps.get(section.key)
    if step is None:
        return False
    if not isinstance(step, StoredStep):
        return True
    return step.section.digest == section.digest and (step.whole or (step.link is link and not step.lost))


def _choose_store(names: Iterable[str], key: str) -> str | None:
    """The name of the store for this key; None where there is none."""
    return max(names, key=lambda name: _weight(name, key), default=None)


def _weight(name: str, key: str) -> tuple[bytes, str]:
    return hashlib.sha256(f"{name}\0{key}".encode()).digest(), name
