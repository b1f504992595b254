"""Queries to stores about templates that are pending, and responses that the engine has not read yet.

Both are limited in number and time. The engine's thread sends queries, and the connections' threads deliver responses.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from bottega.addons.edits.engine.recordings.recording import RecordingKey
from bottega.addons.edits.engine.recordings.source import TemplateQuery
from bottega.addons.edits.worker.store_link import ActivationStoreLink
from bottega.addons.edits.worker.template import AnsweredTemplate
from bottega.engine.spans import StoreWork
from bottega.v1.activations_pb2 import TemplateQuestion

# Questions without an answer. A worker holds at most some tens of jobs.
_MAX_QUESTIONS = 1024
# Answers whose jobs have not begun. Each has an image latent and a noise, some megabytes for the largest images.
_MAX_ANSWERS = 64
# A store that does not answer in this time counts as having nothing. The engine waits for a shorter time.
_ANSWER_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinkAnswer:
    """A response, and the store that sent it."""

    template: AnsweredTemplate
    link: ActivationStoreLink
    """The connection to the store."""
    origin: str
    """Name of the source image at the gateway; see Recording."""


@dataclass(slots=True, kw_only=True, eq=False)
class _PendingQuestion:
    """A query without a response yet."""

    query: TemplateQuery
    known: Future[StoreWork | None]
    link: ActivationStoreLink
    asked_s: float
    """Time at which the query was last sent, or queued if the connection is not open yet."""
    until_s: float


class TemplateQuestions:
    """The queries and responses over all connections of a worker."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._questions: dict[int, _PendingQuestion] = {}
        self._answers: OrderedDict[str, LinkAnswer] = OrderedDict()  # by digest of the key

    def ask(self, query: TemplateQuery, link: ActivationStoreLink) -> Future[StoreWork | None]:
        """Send a query to a store. The future is done once `take` has the response, or at once if the store is away.

        See ActivationSource.ask.
        """
        known: Future[StoreWork | None] = Future()
        if (link.tried and not link.open) or not self._put(query, known, link):
            known.set_result(None)
        return known

    def take(self, key: RecordingKey) -> LinkAnswer | None:
        """Return the newest response about a template, and drop it; None if there is none."""
        with self._lock:
            return self._answers.pop(key.digest, None)

    def keep(self, key: RecordingKey, answer: LinkAnswer) -> None:
        """Store a response again, for the next `take`."""
        with self._lock:
            self._answers[key.digest] = answer
            self._answers.move_to_end(key.digest)
            while len(self._answers) > _MAX_ANSWERS:
                self._answers.popitem(last=False)

    def on_link(self, link: ActivationStoreLink) -> None:
        """Send the queries that waited for this connection."""
        with self._lock:
            for number, pending in self._questions.items():
                if pending.link is link and not pending.known.done():
                    pending.asked_s = self._clock()
                    link.ask(number, _question(pending.query))

    def on_answer(self, link: ActivationStoreLink, number: int, template: AnsweredTemplate) -> None:
        """Store a response for `take`. Drop it if it is too late."""
        with self._lock:
            pending = self._questions.pop(number, None)
        # The job may just have cancelled its question.
        if pending is None or pending.link is not link or not pending.known.set_running_or_notify_cancel():
            return
        self.keep(pending.query.key, LinkAnswer(template=template, link=link, origin=pending.query.origin))
        now_s = self._clock()
        work = StoreWork(store=link.store.name, times=template.times, asked_s=pending.asked_s, answered_s=now_s)
        pending.known.set_result(work)

    def on_lost(self, link: ActivationStoreLink) -> None:
        """Fail the queries to a lost store, and drop its responses."""
        with self._lock:
            self._answers = OrderedDict(
                (key, answer) for key, answer in self._answers.items() if answer.link is not link
            )
        self._give_up(lambda pending: pending.link is link)

    def on_quiet(self) -> None:
        """Fail queries that have waited too long for a response."""
        now_s = self._clock()
        self._give_up(lambda pending: pending.until_s < now_s)

    def _put(self, query: TemplateQuery, known: Future[StoreWork | None], link: ActivationStoreLink) -> bool:
        """Send a query, or keep it until the connection is open. Return False if neither is possible."""
        with self._lock:
            self._questions = {key: pending for key, pending in self._questions.items() if not pending.known.done()}
            if len(self._questions) >= _MAX_QUESTIONS:
                return False
            number = next(self._numbers)
            now_s = self._clock()
            self._questions[number] = _PendingQuestion(
                query=query, known=known, link=link, asked_s=now_s, until_s=now_s + _ANSWER_S
            )
            waits = link.ask(number, _question(query)) or not link.tried
            if not waits:
                del self._questions[number]
        return waits

    def _give_up(self, which: Callable[[_PendingQuestion], bool]) -> None:
        with self._lock:
            gone = {number: pending for number, pending in self._questions.items() if which(pending)}
            for number in gone:
                del self._questions[number]
        for pending in gone.values():
            if pending.known.set_running_or_notify_cancel():
                pending.known.set_result(None)


def _question(query: TemplateQuery) -> TemplateQuestion:
    return TemplateQuestion(
        key=query.key.digest,
        recording=query.recording,
        would_record=query.would_record,
        source=query.origin,
        model_hash=query.key.model_hash,
        dtype=query.key.dtype,
        width=query.width,
        height=query.height,
    )
