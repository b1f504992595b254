"""The engine's add-on for cached latents, with the fleet's approximate caches as its one source.

The caches share the entries: each query and each recording goes to the connected cache that is responsible for its
prompt (`placement_key`). If a cache is lost, the next one in the order takes over, and queries that it has not answered
are sent there while their jobs still wait. A query for certain entries is sent to one cache after the other, because an
entry stays where it was recorded when caches join or leave. Recordings wait in a buffer of limited size. No call
blocks.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from torch import Tensor

from bottega.addons.cache.config import CachedStartsConfig
from bottega.addons.cache.engine import JobRecording, LatentQuestion, LatentReply
from bottega.addons.cache.engine.addon import EngineCachedStarts
from bottega.addons.cache.placement import placement_key
from bottega.addons.cache.wire import CacheMessage
from bottega.addons.cache.worker.store_link import CacheLinkSettings, CacheStoreLink, recording_of
from bottega.addons.interface.store_link import MAX_SERVICES, rank_stores, renew_links
from bottega.engine.addon import EngineAddOnContext
from bottega.engine.spans import StoreWork
from bottega.transport import LinkCounters, OfferSource
from bottega.v1.cache_pb2 import CACHE_OUTCOME_UNAVAILABLE, CacheAnswer, CacheQuestion, CacheStarts
from bottega.v1.engine_pb2 import EngineBeat
from bottega.v1.fleet_pb2 import ServiceAddress

_log = logging.getLogger(__name__)

# Questions without an answer. A worker holds at most some tens of jobs.
_MAX_QUESTIONS = 1024
# Connections that one question may break, so that it does not break all of them.
_MAX_LOSSES = 3

_UNAVAILABLE = LatentReply(header=CacheAnswer(outcome=CACHE_OUTCOME_UNAVAILABLE))


@dataclass(slots=True, kw_only=True, eq=False)
class _Question:
    """A query without a response yet."""

    question: LatentQuestion
    place: str
    """See `placement_key`."""
    answer: Future[LatentReply]
    link: CacheStoreLink | None = None
    """The connection to the cache that was asked; None while no cache is connected."""
    asked_s: float = 0.0
    """Time at which the query was sent, on CLOCK_MONOTONIC."""
    losses: int = 0
    """Number of connections that were lost before they answered."""
    missing: LatentReply | None = None
    """The best response so far of caches that lack some of the wanted entries."""
    lacking: set[str] = field(default_factory=set)
    """Names of caches that lack some of the wanted entries."""


class LatentStores:
    """The caches of the fleet, called by one thread of the engine and by the connections' threads.

    Args:
        model_name: Name of the engine's model in requests.
        budget_bytes: Maximum bytes of recordings that wait.
    """

    def __init__(
        self,
        *,
        model_name: str,
        offers: OfferSource,
        budget_bytes: int,
        settings: CacheLinkSettings,
        counters: LinkCounters,
    ) -> None:
        self._model_name = model_name
        self._offers = offers
        self._budget_bytes = budget_bytes
        self._settings = settings
        self._counters = counters
        self._lock = threading.Lock()
        self._links: dict[str, CacheStoreLink] = {}  # by the name of the cache
        self._questions: dict[int, _Question] = {}
        self._numbers = itertools.count(1)
        self._recordings: dict[str, deque[JobRecording]] = {}  # by the name of the cache
        self._waiting_bytes = 0

    @property
    def linked(self) -> int:
        """Number of connected caches."""
        return sum(link.open for link in list(self._links.values()))

    def set_stores(self, stores: Sequence[ServiceAddress]) -> None:
        with self._lock:
            self._links, lost = renew_links(self._links, stores[:MAX_SERVICES], self._open)
        for link in lost:
            link.close()
        with self._lock:
            self._resume()

    def ask(self, question: LatentQuestion) -> Future[LatentReply]:
        answer = Future[LatentReply]()
        with self._lock:
            self._drop_done()
            if len(self._questions) >= _MAX_QUESTIONS:
                answer.set_result(_UNAVAILABLE)
                return answer
            number = next(self._numbers)
            place = _place(question.header.plain_key or question.header.key, question.embedding)
            asked = self._questions[number] = _Question(question=question, place=place, answer=answer)
            self._send(number, asked)
        return answer

    def report(self, reply: LatentReply, starts: CacheStarts) -> None:
        if not reply.header.counts_starts or reply.work is None:
            return
        link = self._links.get(reply.work.store)
        if link is not None:
            link.report(starts)

    def record(self, recording: JobRecording) -> bool:
        place = _place(recording.plain_key or recording.key, recording.embedding)
        with self._lock:
            link = self._responsible(place)
            if link is None or self._waiting_bytes + recording.size_bytes > self._budget_bytes:
                return False
            self._recordings.setdefault(link.store.name, deque()).append(recording)
            self._waiting_bytes += recording.size_bytes
        link.record()
        return True

    def stop(self) -> None:
        self.set_stores(())

    def on_link(self, link: CacheStoreLink) -> None:
        """Send pending queries and recordings to a cache that has just been connected."""
        with self._lock:
            self._resume()
        link.record()

    def on_answer(self, link: CacheStoreLink, number: int, answer: LatentReply) -> None:
        """Pass on a response, even if it is late or the query was sent again elsewhere.

        If it lacks entries that the query names, ask the next cache first.
        """
        with self._lock:
            asked = self._questions.get(number)
            if asked is None:
                return
            times, now_s = answer.header.times, time.monotonic()
            work = StoreWork(store=link.store.name, times=times, asked_s=asked.asked_s, answered_s=now_s)
            answer = replace(answer, work=work)
            if _lacks(asked.question.header, answer.header) and not asked.answer.done():
                asked.lacking.add(link.store.name)
                before, asked.link = asked.missing, None
                asked.missing = _better(before, answer)
                self._report_unused(asked, before if asked.missing is answer else answer)
                self._send(number, asked)
                return
            del self._questions[number]
            self._report_unused(asked, asked.missing)
        if not _answer(asked, answer):  # the job has ended, or does not need it any more
            self._report_unused(asked, answer)

    def on_lost(self, link: CacheStoreLink) -> None:
        """Send the queries and recordings of a lost connection to the next cache, or to the same one again."""
        with self._lock:
            for asked in self._questions.values():
                if asked.link is link:
                    asked.link = None
                    asked.losses += 1
            self._resume()

    def next_recording(self, link: CacheStoreLink) -> CacheMessage | None:
        """Return the oldest recording for a cache; None if there is none. Called by the thread that sends."""
        while True:
            with self._lock:
                waiting = self._recordings.get(link.store.name)
                if not waiting:
                    return None
                recording = waiting.popleft()
                self._waiting_bytes -= recording.size_bytes
            try:
                return recording_of(recording, model_name=self._model_name)
            except Exception:  # noqa: BLE001 - the boundary of a recording, which must not end the link
                _log.exception("latents could not be encoded for the cache, and are not recorded")

    def _open(self, store: ServiceAddress) -> CacheStoreLink:
        return CacheStoreLink(store, owner=self, offers=self._offers, settings=self._settings, counters=self._counters)

    def _responsible(self, place: str, lacking: Collection[str] = ()) -> CacheStoreLink | None:
        """Return the connection to the first connected cache for a place, except for those in `lacking`, or None."""
        links = self._links
        names = (name for name in rank_stores(links, place) if links[name].open and name not in lacking)
        name = next(names, None)
        return None if name is None else links[name]

    def _report_unused(self, asked: _Question, reply: LatentReply | None) -> None:
        """Report to its cache that the latents of a response are not used."""
        if reply is not None and reply.header.hits:
            self.report(reply, _unused(asked.question.header, reply.header))

    # Called under the lock.

    def _drop_done(self) -> None:
        """Forget the queries that are answered, or whose jobs do not wait any more."""
        for number, asked in list(self._questions.items()):
            if asked.answer.done():
                del self._questions[number]
                self._report_unused(asked, asked.missing)

    def _resume(self) -> None:
        """Send pending queries that no cache has, and pass the recordings for lost caches to the next ones."""
        for number, asked in self._questions.items():
            if asked.link is None and not asked.answer.done():
                self._send(number, asked)
        for name in [name for name in self._recordings if not (name in self._links and self._links[name].open)]:
            for recording in self._recordings.pop(name):
                link = self._responsible(_place(recording.plain_key or recording.key, recording.embedding))
                self._recordings.setdefault(name if link is None else link.store.name, deque()).append(recording)
                if link is not None:
                    link.record()

    def _send(self, number: int, asked: _Question) -> None:
        """Send a query to the first connected cache that may answer it. Answer it if there is none left to ask.

        A query for certain entries waits for a cache that is away, which may have them.
        """
        if asked.losses == _MAX_LOSSES:
            if _answer(asked, _UNAVAILABLE):
                self._report_unused(asked, asked.missing)
                asked.missing = None
        elif asked.missing is not None and asked.lacking.issuperset(self._links):
            if _answer(asked, asked.missing):
                asked.missing = None
        else:
            link, now_s = self._responsible(asked.place, asked.lacking), time.monotonic()
            if link is not None and link.ask(number, asked.question):
                asked.link, asked.asked_s = link, now_s


def _place(key: str, embedding: Tensor) -> str:
    return placement_key(key, embedding.numpy())


def _answer(asked: _Question, reply: LatentReply) -> bool:
    """Answer a query, and return whether its job still waits."""
    waits = not asked.answer.done() and asked.answer.set_running_or_notify_cancel()
    if waits:
        asked.answer.set_result(reply)
    return waits


def _lacks(question: CacheQuestion, answer: CacheAnswer) -> bool:
    """Return whether a response lacks entries that the query names."""
    wanted = {start.entry for start in question.pinned if start.entry}
    return not wanted.issubset(hit.entry for hit in answer.hits)


def _better(one: LatentReply | None, other: LatentReply) -> LatentReply:
    """Return the response with more hits. All entries that a job names are in one cache, so they are not joined.

    Of responses without hits, return the one whose cache could not look, because it may have the entries.
    """
    known = [other] if one is None else [one, other]
    return max(known, key=lambda reply: (len(reply.latents), reply.header.outcome == CACHE_OUTCOME_UNAVAILABLE))


def _unused(question: CacheQuestion, answer: CacheAnswer) -> CacheStarts:
    """Return the message that tells a cache which of its latents arrived too late for their job."""
    entries = [hit.entry for hit in answer.hits]
    return CacheStarts(key=question.key, prompt_digest=question.prompt_digest, unused=entries)


def create(context: EngineAddOnContext) -> WorkerCachedStarts:
    """Return the add-on for an engine. The manifest names this function."""
    return WorkerCachedStarts(context)


class WorkerCachedStarts(EngineCachedStarts):
    """The add-on for cached latents."""

    def __init__(self, context: EngineAddOnContext) -> None:
        config = context.section(CachedStartsConfig)
        self._stores = LatentStores(
            model_name=context.model.name,
            offers=context.offers,
            budget_bytes=config.recording_bytes,
            settings=CacheLinkSettings(silence_s=config.silence_s),
            counters=context.counters,
        )
        super().__init__(context.model, self._stores, timeout_s=config.timeout_s)

    def fill_beat(self, beat: EngineBeat) -> None:
        super().fill_beat(beat)
        beat.links.open += self._stores.linked

    def stop(self) -> None:
        self._stores.stop()
