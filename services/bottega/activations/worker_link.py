"""Links to workers: answers questions about templates, sends sections, and receives recordings.

The receiving thread answers questions. A worker that does not read its answers gets empty ones. The same thread takes
in recordings, which the store writes later.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from bottega import kinds
from bottega.activations.section_sender import SectionSender
from bottega.activations.store.intake import SectionIntake
from bottega.activations.store.statistics import DropReason
from bottega.activations.store.store import ActivationStore
from bottega.addons.edits.wire import SectionLayout, messages
from bottega.addons.edits.wire.messages import ActivationMessage, ActivationMessageKind
from bottega.errors import BottegaError
from bottega.rpc.links_config import LimitedLinksConfig
from bottega.rpc.store_links import StoreLinkHandler, StoreLinks
from bottega.transport import (
    Connection,
    Incoming,
    Layout,
    Link,
    LinkServerSettings,
    kind_of,
    read_number,
)
from bottega.v1.activations_pb2 import ChunkHeader, SectionHeader, TemplateAnswer

_NOTHING = TemplateAnswer()


class ActivationWorkerLink(StoreLinkHandler):
    """The link of one worker, limited to `bytes_per_s` unless 0. The store identifies the worker by this object."""

    def __init__(self, connection: Connection, *, store: ActivationStore, bytes_per_s: int) -> None:
        super().__init__(connection)
        self._store = store
        self._sections = SectionSender(connection, store=store, bytes_per_s=bytes_per_s)
        self._recorded = SectionReceiver(store, self, on_not_granted=self._say_not_granted)

    def on_message(self, connection: Connection, incoming: Incoming) -> None:
        """Handle a message. Headers are read from copies; a section's tensors are copied by the store."""
        layout = incoming.layout
        with incoming:
            kind = ActivationMessageKind(kind_of(layout))
            views = connection.wait_all(incoming)
            match kind:
                case ActivationMessageKind.QUESTION:
                    self._answer(layout, views)
                case ActivationMessageKind.FETCH:
                    self._sections.fetch(*messages.read_fetch(layout, views))
                case ActivationMessageKind.CANCEL:
                    self._sections.cancel(read_number(layout, views))
                case _:
                    self._record(kind, layout, views)

    def on_end(self, cause: BottegaError) -> None:
        """Release the sections that were being sent, and drop the recordings that the worker has not finished."""
        self._sections.end()
        self._recorded.drop()
        self._store.link_ended(self)

    def check(self) -> None:
        """Expire an idle section; called when no message has come for a moment."""
        self._recorded.expire()

    @property
    def idle_s(self) -> float | None:
        """Seconds of silence before the next piece of a section; other messages go first."""
        return self._sections.idle_s

    def send_idle(self, link: Link) -> None:
        """Send the next piece of a section."""
        self._sections.send_piece(link)

    def _answer(self, layout: Layout, views: Sequence[memoryview]) -> None:
        number, question = messages.read_question(layout, views)

        def answer() -> ActivationMessage:
            found = self._store.answer(question, self)
            return messages.answer_message(number, found.header, found.drawn)

        self._send_answer(answer, refusal=messages.answer_message(number, _NOTHING, None))

    def _say_not_granted(self, header: SectionHeader) -> None:
        """Tell the worker that it may not record, so that it stops sending sections and asks again later."""
        self._connection.send(messages.abandon_message(header.recording, header.key))

    def _record(self, kind: ActivationMessageKind, layout: Layout, views: Sequence[memoryview]) -> None:
        match kind:
            case ActivationMessageKind.SECTION:
                self._recorded.begin(*messages.read_section(layout, views))
            case ActivationMessageKind.CHUNK:
                number, chunk = messages.read_chunk(layout, views)
                self._recorded.take(number, chunk, views[-1])
            case ActivationMessageKind.RECORDING:
                recording = messages.read_recording(layout, views)
                drawn = messages.read_drawn(layout, views, has_drawn=recording.has_drawn)
                self._store.complete(recording, drawn, self)
            case ActivationMessageKind.ABANDON:
                self._store.abandon(messages.read_abandon(layout, views), self)
                self._recorded.expire()
            case _:
                raise ValueError(f"a worker sends no {kind} message")


class ActivationLinks(StoreLinks[ActivationWorkerLink]):
    """The links of all workers. Raises ConfigError if an address cannot be bound."""

    def __init__(self, config: LimitedLinksConfig, *, store: ActivationStore) -> None:
        self._store = store
        self._bytes_per_s = config.bytes_per_s
        super().__init__(
            config,
            kind=kinds.ACTIVATIONS,
            what="the activation store",
            settings=LinkServerSettings(limits=messages.STORE_LIMITS),
        )

    def new_handler(self, connection: Connection) -> ActivationWorkerLink:
        """Return the handler of one worker's link."""
        return ActivationWorkerLink(connection, store=self._store, bytes_per_s=self._bytes_per_s)


class SectionReceiver:
    """Receives the sections of one link, in the receiving thread.

    `on_not_granted` is called for sections of a recording that the worker may not make.
    """

    def __init__(
        self, store: ActivationStore, link: Hashable, *, on_not_granted: Callable[[SectionHeader], None]
    ) -> None:
        self._store = store
        self._link = link
        self._on_not_granted = on_not_granted
        self._number: int | None = None
        self._intake: SectionIntake | None = None

    def begin(self, number: int, header: SectionHeader, layout: SectionLayout) -> None:
        """Begin a section, dropping one that is incomplete. Raise ValueError if the header breaks a rule."""
        self.drop()
        self._number = number
        begun = self._store.begin_section(header, layout, self._link)
        if begun is DropReason.NOT_GRANTED:
            self._on_not_granted(header)
        self._intake = begun if isinstance(begun, SectionIntake) else None

    def take(self, number: int, chunk: ChunkHeader, data: memoryview) -> None:
        """Add the next chunk. Raise ValueError if it is out of order or of another section."""
        if number != self._number:
            raise ValueError("a chunk must belong to the section that the worker has begun")
        if self._intake is not None and self._intake.is_open:
            self._intake.write(chunk.tensor, chunk.start, data)

    def expire(self) -> None:
        """Drop the section if it is idle or its recording was abandoned. Call it periodically."""
        if self._intake is not None:
            self._intake.expire(self._store.record_idle_s)

    def drop(self) -> None:
        """Drop the section that has begun, if any."""
        if self._intake is not None:
            self._intake.drop(DropReason.ABANDONED)
            self._intake = None
