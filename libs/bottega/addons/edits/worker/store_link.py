"""The connection of a worker's engine to one activation store: queries, loads of sections, and uploads of recordings.

The connection is opened as soon as the store is known, and again after a loss, which also loses all pending messages.
Queries and requests are sent before recordings. TemplateQuestions interprets the responses.
"""

from __future__ import annotations

import itertools
import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bottega import kinds
from bottega.addons.edits.wire import messages
from bottega.addons.edits.wire.messages import WORKER_LIMITS, ActivationMessageKind
from bottega.addons.edits.worker.load_meter import LinkPace, LoadMeter
from bottega.addons.edits.worker.stored_step import SectionFetch, StoredStep
from bottega.addons.edits.worker.template import read_template
from bottega.addons.edits.worker.uploads import Uploads
from bottega.addons.interface.store_link import StoreLink
from bottega.errors import BottegaError, DataLoss, NoSharedMemory, TooLarge
from bottega.rpc.status import from_job_error, job_error_from_json
from bottega.transport import (
    Connection,
    Incoming,
    Limits,
    Link,
    LinkClientSettings,
    LinkCounters,
    OfferSource,
    kind_of,
)
from bottega.v1.activations_pb2 import ChunkHeader, SectionRequest, TemplateQuestion
from bottega.v1.fleet_pb2 import ServiceAddress
from bottega.v1.trace_pb2 import StoreTimes

if TYPE_CHECKING:
    from bottega.addons.edits.worker.questions import TemplateQuestions

_log = logging.getLogger(__name__)

# Requested sections that have not come. An engine has some tens of edits, each some steps ahead.
_MAX_FETCHES = 2048
# Smaller sections come in chunks within a host, too.
_MIN_SHARED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationLinkSettings(LinkClientSettings):
    """The settings of a connection that receives chunks, or files beside messages."""

    limits: Limits = WORKER_LIMITS
    retry_s: float = 1.0
    upload_bytes: int = 256 << 20
    """Maximum bytes of recordings that wait to be sent."""


class ActivationStoreLink(StoreLink):
    """A connection to one store. Thread-safe."""

    def __init__(
        self,
        store: ServiceAddress,
        *,
        owner: TemplateQuestions,
        offers: OfferSource,
        settings: ActivationLinkSettings,
        meter: LoadMeter,
        counters: LinkCounters,
    ) -> None:
        self.tried = False
        """Whether the connection was opened, or failed to open, at least once."""
        self.uploads = Uploads(budget_bytes=settings.upload_bytes, meter=meter, wake=self._wake_uploads)
        self._owner = owner
        self._meter = meter
        self._pace = LinkPace(meter)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._fetches: dict[int, SectionFetch] = {}
        self._files: bool | None = None  # whether the last large section came as a file; None before the first
        super().__init__(
            store,
            kind=kinds.ACTIVATIONS,
            title="an activation store",
            offers=offers,
            settings=settings,
            counters=counters,
        )
        self.start()

    @property
    def shares(self) -> bool:
        """Whether the store may send sections as files: it is on this host, and did not send the last one in chunks."""
        link = self._connection.link if self._connection is not None else None
        return link is not None and link.passes_files and self._files is not False

    @property
    def gives_whole(self) -> bool:
        """Whether the store sent the last section as a file."""
        return self.shares and self._files is True

    def ask(self, number: int, question: TemplateQuestion) -> bool:
        """Send a query. Return False if the connection is not open."""
        connection = self._connection
        return connection is not None and connection.send(messages.question_message(number, question))

    def fetch(self, fetch: SectionFetch) -> bool:
        """Request tensors of a section. Return False without an open connection, or with too many pending requests."""
        with self._lock:
            connection = self._connection
            if connection is None or len(self._fetches) >= _MAX_FETCHES:
                return False
            self._pace.asked(idle=not self._fetches)
            number = next(self._numbers)
            self._fetches[number] = fetch
        step = fetch.step
        request = SectionRequest(digest=step.section.digest, tensors=fetch.tensors, edit=step.edit)
        if connection.send(messages.fetch_message(number, request)):
            return True
        with self._lock:
            self._fetches.pop(number, None)
        return False

    def cancel(self, step: StoredStep) -> None:
        """Cancel the pending requests of a step."""
        with self._lock:
            gone = {number: fetch for number, fetch in self._fetches.items() if fetch.step is step}
            for number in gone:
                del self._fetches[number]
            connection = self._connection
        for number, fetch in gone.items():
            step.give_up(fetch)
            self._meter.note("loads_cancelled")
            if connection is not None:
                connection.send(messages.cancel_message(number))

    def on_open(self, connection: Connection) -> None:
        self.uploads.lose()  # recordings that were begun without a link cannot be completed
        with self._lock:
            super().on_open(connection)
            self._files = None
        self.tried = True
        self._owner.on_link(self)

    def on_message(self, connection: Connection, incoming: Incoming) -> None:
        """Handle a message. Raise ValueError for parts of a section that were not requested."""
        layout = incoming.layout
        with incoming:
            match ActivationMessageKind(kind_of(layout)):
                case ActivationMessageKind.ANSWER:
                    views = connection.wait_all(incoming)
                    number, header = messages.read_answer(layout, views)
                    drawn = messages.read_drawn(layout, views, has_drawn=header.has_drawn)
                    self._owner.on_answer(self, number, read_template(header, drawn))
                case ActivationMessageKind.CHUNK:
                    views = connection.wait_all(incoming)
                    number, chunk = messages.read_chunk(layout, views)
                    self._take_chunk(number, chunk, views[-1])
                case ActivationMessageKind.WHOLE:
                    number, times = messages.read_whole(layout, connection.wait_all(incoming))
                    self._take_whole(number, times, incoming.file)
                case ActivationMessageKind.REFUSED:
                    self._take_refusal(*messages.read_refused(layout, connection.wait_all(incoming)))
                case ActivationMessageKind.ABANDON:
                    self.uploads.forget(messages.read_abandon(layout, connection.wait_all(incoming)).recording)
                case kind:
                    raise ValueError(f"an activation store must not send a {kind} message")

    def on_end(self, cause: BottegaError) -> None:
        """Fail the pending requests; edits compute those steps instead."""
        with self._lock:
            super().on_end(cause)
            lost, self._fetches = self._fetches, {}
        self.tried = True
        for fetch in lost.values():
            fetch.step.give_up(fetch)
        self._meter.note("loads_lost", len(lost))
        self.uploads.lose()
        self._owner.on_lost(self)

    def check(self) -> None:
        """Fail old queries, even if no message arrives."""
        self._owner.on_quiet()

    @property
    def idle_s(self) -> float | None:
        """0 while recordings wait to be sent, after any queries and requests; None otherwise."""
        return 0.0 if self.uploads.waiting else None

    def send_idle(self, link: Link) -> None:
        connection, upload = self._connection, self.uploads.next()
        if upload is None or connection is None:
            return
        try:
            size_bytes = upload.send(connection, link)
        except (NoSharedMemory, TooLarge) as error:  # nothing was sent, and the link goes on
            _log.warning("the store refused a section", extra={"service": self.store.name, "text": error.message})
            self.uploads.refused(upload)
        else:
            self.uploads.sent(upload, size_bytes)

    def _wake_uploads(self) -> None:
        connection = self._connection
        if connection is not None:
            connection.post(lambda _link: None)  # wakes the thread that sends

    def _take_chunk(self, number: int, chunk: ChunkHeader, data: memoryview) -> None:
        fetch = self._fetches.get(number)
        if fetch is None:
            return  # it was cancelled
        if chunk.HasField("times"):
            fetch.note_answer(self.store.name, chunk.times)
        fetch.step.take_chunk(fetch, chunk.tensor, chunk.start, data)
        self._pace.came(len(data))
        if fetch.step.section.layout.size_bytes >= _MIN_SHARED_BYTES:
            self._files = False
        if not fetch.left:
            self._finish(number)

    def _take_whole(self, number: int, times: StoreTimes, file: memoryview | None) -> None:
        if file is None:
            raise ValueError("a whole section arrived without its file")
        fetch = self._fetches.get(number)
        if fetch is None:
            return
        fetch.note_answer(self.store.name, times)
        try:
            fetch.step.take_whole(file)
        except DataLoss as error:
            self._refuse(number, error)
            return
        self._pace.came(len(file), mapped=fetch.step.section.in_memory)
        self._files = True
        with self._lock:  # the file answers all requests for this section
            answered = [other for other, pending in self._fetches.items() if pending.step is fetch.step]
        for other in answered:
            self._finish(other)

    def _take_refusal(self, number: int, packed: bytes) -> None:
        self._refuse(number, from_job_error(job_error_from_json(packed)))

    def _refuse(self, number: int, error: BottegaError) -> None:
        with self._lock:
            fetch = self._fetches.pop(number, None)
        if fetch is None:
            return
        self._meter.note("loads_refused")
        _log.info("a section is not loaded but computed", extra={"service": self.store.name, "text": error.message})
        fetch.step.give_up(fetch, lost=True)

    def _finish(self, number: int) -> None:
        with self._lock:
            done = self._fetches.pop(number, None)
        if done is not None:
            self._meter.note("loads")
