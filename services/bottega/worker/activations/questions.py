"""What stores were asked about templates, and what they have said: no question lasts, and no answer is kept for long.

The engine's thread asks, links' threads answer.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from bottega.diffusion.editing.recordings.keys import RecordingKey
from bottega.diffusion.editing.recordings.source import TemplateQuery
from bottega.diffusion.engine.store_work import StoreWork
from bottega.v1.activations_pb2 import TemplateQuestion
from bottega.worker.activations.store_link import ActivationStoreLink
from bottega.worker.activations.template import AnsweredTemplate

# That wait for their answers: a worker holds at most some tens of jobs.
_MOST_QUESTIONS = 1024
# Answers whose jobs have not begun; each has an image latent and a noise, some megabytes for the largest pictures.
_MOST_ANSWERS = 64
# An engine waits for less; a store that does not answer in this time does not know.
_ANSWER_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinkAnswer:
    """link: whose it is. origin: see Recording."""

    template: AnsweredTemplate
    link: ActivationStoreLink
    origin: str


@dataclass(slots=True, kw_only=True, eq=False)
class _PendingQuestion:
    """asked_s: when it went out last, or was to."""

    query: TemplateQuery
    known: Future[StoreWork | None]
    link: ActivationStoreLink
    asked_s: float
    until_s: float


class TemplateQuestions:
    """An ActivationLinkOwner of all links of a worker."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._questions: dict[int, _PendingQuestion] = {}
        self._answers: OrderedDict[str, LinkAnswer] = OrderedDict()  # by digest of the key

    def ask(self, query: TemplateQuery, link: ActivationStoreLink) -> Future[StoreWork | None]:
        """Done when `take` has what there is to know: at once where the store is away. See ActivationSource.ask."""
        known: Future[StoreWork | None] = Future()
        if (link.tried and not link.open) or not self._put(query, known, link):
            known.set_result(None)
        return known

    def take(self, key: RecordingKey) -> LinkAnswer | None:
        """The newest answer about a template, once."""
        with self._lock:
            return self._answers.pop(key.digest, None)

    def keep(self, key: RecordingKey, answer: LinkAnswer) -> None:
        """For whoever takes it next."""
        with self._lock:
            self._answers[key.digest] = answer
            self._answers.move_to_end(key.digest)
            while len(self._answers) > _MOST_ANSWERS:
                self._answers.popitem(last=False)

    def on_link(self, link: ActivationStoreLink) -> None:
        """What was asked before there was a link, is asked."""
        with self._lock:
            for number, asked in self._questions.items():
                if asked.link is link and not asked.known.done():
                    asked.asked_s = self._clock()
                    link.ask(number, _question(asked.query))

    def on_answer(self, link: ActivationStoreLink, number: int, template: AnsweredTemplate) -> None:
        """One that comes too late is thrown away."""
        with self._lock:
            asked = self._questions.pop(number, None)
        # Cancelled at this moment, perhaps: then nobody wants it.
        if asked is None or asked.link is not link or not asked.known.set_running_or_notify_cancel():
            return
        self.keep(asked.query.key, LinkAnswer(template=template, link=link, origin=asked.query.origin))
        now_s = self._clock()
        work = StoreWork(store=link.store.name, times=template.times, asked_s=asked.asked_s, answered_s=now_s)
        asked.known.set_result(work)

    def on_lost(self, link: ActivationStoreLink) -> None:
        """What it was asked it does not know, and what it has said counts no more."""
        with self._lock:
            self._answers = OrderedDict((key, each) for key, each in self._answers.items() if each.link is not link)
        self._give_up(lambda asked: asked.link is link)

    def on_quiet(self) -> None:
        """Gives up what is not answered in time."""
        now_s = self._clock()
        self._give_up(lambda asked: asked.until_s < now_s)

    def _put(self, query: TemplateQuery, known: Future[StoreWork | None], link: ActivationStoreLink) -> bool:
        """Asks it, now or when the link is open. False where it cannot be asked."""
        with self._lock:
            self._questions = {number: each for number, each in self._questions.items() if not each.known.done()}
            if len(self._questions) >= _MOST_QUESTIONS:
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
            gone = {number: each for number, each in self._questions.items() if which(each)}
            for number in gone:
                del self._questions[number]
        for asked in gone.values():
            if asked.known.set_running_or_notify_cancel():
                asked.known.set_result(None)


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
