"""The engine's add-on for cached latents, with the fleet's approximate caches as its one source.

The source queries the first cache that is connected. If a cache is lost before it has answered, the query is sent
again, to the next cache or to the same one, while its job still waits. Recordings wait in a buffer of limited size for
the first cache that is connected. No call blocks.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from bottega.addons.cache.config import CachedStartsConfig
from bottega.addons.cache.engine import JobRecording, LatentQuestion, LatentReply
from bottega.addons.cache.engine.addon import EngineCachedStarts
from bottega.addons.cache.wire import CacheMessage
from bottega.addons.cache.worker.store_link import CacheLinkSettings, CacheStoreLink, recording_of
from bottega.engine.addon import EngineAddOnContext
from bottega.engine.spans import StoreWork
from bottega.transport import LinkCounters, OfferSource
from bottega.v1.cache_pb2 import CACHE_OUTCOME_UNAVAILABLE, CacheAnswer, CacheQuestion, CacheStarts
from bottega.v1.engine_pb2 import EngineBeat
from bottega.v1.fleet_pb2 import ServiceAddress

_log = logging.getLogger(__name__)

# Questions without an answer. A worker holds at most some tens of jobs.
_MAX_QUESTIONS = 1024
# How often one question is sent, so that a question that breaks links does not break all of them.
_MAX_TRIES = 3
# Caches that are linked. A fleet has one, or a few.
_MAX_STORES = 4

_UNAVAILABLE = LatentReply(header=CacheAnswer(outcome=CACHE_OUTCOME_UNAVAILABLE))


@dataclass(slots=True, kw_only=True, eq=False)
class _Question:
    """A query without a response yet."""

    question: LatentQuestion
    answer: Future[LatentReply]
    link: CacheStoreLink | None = None
    """The connection to the cache that was asked; None while no cache is connected."""
    asked_s: float = 0.0
    """Time at which the query was sent, on CLOCK_MONOTONIC."""
    tries: int = 0
    """Number of connections over which the query was sent."""


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
        self._links: dict[str, CacheStoreLink] = {}
        self._questions: dict[int, _Question] = {}
        self._numbers = itertools.count(1)
        self._recordings: deque[JobRecording] = deque()
        self._waiting_bytes = 0

    @property
    def linked(self) -> int:
        """Number of connected caches."""
        return sum(link.open for link in list(self._links.values()))

    def set_stores(self, stores: Sequence[ServiceAddress]) -> None:
        wanted = {store.address: store for store in stores[:_MAX_STORES]}
        with self._lock:
            gone = [link for address, link in self._links.items() if address not in wanted]
            self._links = {address: self._links.get(address) or self._open(store) for address, store in wanted.items()}
        for link in gone:
            link.close()

    def ask(self, question: LatentQuestion) -> Future[LatentReply]:
        answer = Future[LatentReply]()
        with self._lock:
            self._questions = {key: asked for key, asked in self._questions.items() if not asked.answer.done()}
            if len(self._questions) >= _MAX_QUESTIONS:
                answer.set_result(_UNAVAILABLE)
                return answer
            number = next(self._numbers)
            asked = self._questions[number] = _Question(question=question, answer=answer)
            self._send(number, asked)
        return answer

    def report(self, reply: LatentReply, starts: CacheStarts) -> None:
        if not reply.header.counts_starts or reply.work is None:
            return
        for link in list(self._links.values()):
            if link.store.name == reply.work.store:
                link.report(starts)
                return

    def record(self, recording: JobRecording) -> bool:
        with self._lock:
            link = self._first_open()
            if link is None or self._waiting_bytes + recording.size_bytes > self._budget_bytes:
                return False
            self._recordings.append(recording)
            self._waiting_bytes += recording.size_bytes
        link.record()
        return True

    def stop(self) -> None:
        self.set_stores(())

    def on_link(self, link: CacheStoreLink) -> None:
        """Send pending queries to a cache that has just been connected."""
        with self._lock:
            self._ask_pending()
        link.record()

    def on_answer(self, link: CacheStoreLink, number: int, answer: LatentReply) -> None:
        """Pass on a response, even if it is late or the query was sent again elsewhere."""
        with self._lock:
            asked = self._questions.pop(number, None)
        if asked is None:
            return
        if not asked.answer.set_running_or_notify_cancel():  # the job has ended, or does not need it any more
            if answer.header.hits and answer.header.counts_starts:
                link.report(_unused(asked.question.header, answer.header))
        else:
            times, now_s = answer.header.times, time.monotonic()
            work = StoreWork(store=link.store.name, times=times, asked_s=asked.asked_s, answered_s=now_s)
            asked.answer.set_result(replace(answer, work=work))

    def on_lost(self, link: CacheStoreLink) -> None:
        """Send the queries of a lost connection again, to the next cache or to the same one."""
        with self._lock:
            for asked in self._questions.values():
                if asked.link is link:
                    asked.link = None
            self._ask_pending()

    def next_recording(self) -> CacheMessage | None:
        """Return the oldest recording; None if there is none. Called by the thread that sends."""
        while True:
            with self._lock:
                if not self._recordings:
                    return None
                recording = self._recordings.popleft()
                self._waiting_bytes -= recording.size_bytes
            try:
                return recording_of(recording, model_name=self._model_name)
            except Exception:  # noqa: BLE001 - the boundary of a recording, which must not end the link
                _log.exception("latents could not be encoded for the cache, and are not recorded")

    def _open(self, store: ServiceAddress) -> CacheStoreLink:
        return CacheStoreLink(store, owner=self, offers=self._offers, settings=self._settings, counters=self._counters)

    def _first_open(self) -> CacheStoreLink | None:
        return next((link for link in self._links.values() if link.open), None)

    def _ask_pending(self) -> None:
        """Send pending queries that no cache has. Call it under the lock."""
        for number, asked in self._questions.items():
            if asked.link is None and not asked.answer.done():
                self._send(number, asked)

    def _send(self, number: int, asked: _Question) -> None:
        """Send a query to the first connected cache, or answer it as a miss after too many tries. Needs the lock."""
        if asked.tries == _MAX_TRIES:
            if asked.answer.set_running_or_notify_cancel():
                asked.answer.set_result(_UNAVAILABLE)
            return
        link, now_s = self._first_open(), time.monotonic()
        if link is not None and link.ask(number, asked.question):
            asked.link, asked.asked_s = link, now_s
            asked.tries += 1


def _unused(question: CacheQuestion, answer: CacheAnswer) -> CacheStarts:
    """Return the report to a cache about latents that arrived after their job had stopped waiting."""
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
