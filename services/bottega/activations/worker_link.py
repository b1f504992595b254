"""Connections to workers: answers questions about templates, sends sections, and receives recordings.

The receiving thread answers questions. A worker that does not read its answers gets empty ones. The same thread
receives recordings, which the store writes later. `bottega.rpc.file_links` describes how sections are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from bottega import kinds
from bottega.activations.store.recordings import SectionIntake
from bottega.activations.store.statistics import DropReason
from bottega.activations.store.store import ActivationStore
from bottega.addons.edits.wire import SectionLayout, messages
from bottega.addons.edits.wire.messages import ActivationMessage, ActivationMessageKind
from bottega.addons.edits.wire.pieces import SectionPieces, send_chunk
from bottega.caching import CacheLease
from bottega.errors import BottegaError, DataLoss, InvalidRequest
from bottega.rpc.file_links import FileLimits, FileLinkHandler, FileRequest, FileTransfer
from bottega.rpc.server_config import LimitedLinksConfig
from bottega.rpc.store_server import StoreLinks
from bottega.transport import (
    Connection,
    Incoming,
    Layout,
    Link,
    LinkServerSettings,
    WholeMessage,
    kind_of,
    read_number,
)
from bottega.v1.activations_pb2 import ChunkHeader, SectionHeader, SectionRequest, TemplateAnswer
from bottega.v1.trace_pb2 import StoreTimes

_NOTHING = TemplateAnswer()


_LIMITS = FileLimits(
    piece_bytes=messages.CHUNK_BYTES,
    slots=messages.WORKER_LIMITS.slots,
    # Upper bound on a worker's requests: it has some tens of edits that request the sections of upcoming steps.
    most_open=4096,
    most_at_once=16,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SectionRequested(FileRequest):
    """A worker's request for a section. Its `owner` is an edit."""

    tensors: tuple[int, ...]
    """Indices of the requested tensors in the section; empty means all."""


class ActivationWorkerLink(FileLinkHandler[SectionRequested]):
    """The connection of one worker, which sends at most `bytes_per_s` (0: no bound) and identifies the worker."""

    def __init__(self, connection: Connection, *, store: ActivationStore, bytes_per_s: int) -> None:
        super().__init__(connection, what="sections", bytes_per_s=bytes_per_s, limits=_LIMITS)
        self._store = store
        self._recorded = SectionReceiver(store, self, on_not_granted=self._say_not_granted)

    def on_message(self, connection: Connection, incoming: Incoming) -> None:
        """Handle a message. Headers are read from copies; the store copies a section's tensors."""
        layout = incoming.layout
        with incoming:
            kind = ActivationMessageKind(kind_of(layout))
            views = connection.wait_all(incoming)
            match kind:
                case ActivationMessageKind.QUESTION:
                    self._answer(layout, views)
                case ActivationMessageKind.FETCH:
                    self._fetch(_requested(*messages.read_fetch(layout, views)))
                case ActivationMessageKind.CANCEL:
                    self._cancel(read_number(layout, views))
                case _:
                    self._record(kind, layout, views)

    def on_end(self, cause: BottegaError) -> None:
        """Release the sections that were being sent, and drop the recordings that the worker has not finished."""
        super().on_end(cause)
        self._recorded.drop()
        self._store.link_ended(self)

    def check(self) -> None:
        """Drop a section that has been idle for too long. Called when no message has arrived for a moment."""
        self._recorded.expire()

    def _borrow(self, request: SectionRequested) -> Future[CacheLease]:
        return self._store.fetch(request.digest)

    def _return(self, lease: CacheLease) -> None:
        self._store.give_back(lease)

    def _transfer(self, request: SectionRequested, lease: CacheLease) -> FileTransfer:
        layout = self._store.layout_of(request.digest)
        if layout is None:
            raise DataLoss("the section no longer exists")
        return SectionTransfer(request, lease, layout)

    def _whole_message(self, number: int, times: StoreTimes) -> WholeMessage:
        return messages.whole_message(number, times)

    def _refused_message(self, number: int, error: bytes) -> WholeMessage:
        return messages.refused_message(number, error)

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
                raise ValueError(f"a worker must not send a {kind} message")


class ActivationLinks(StoreLinks[ActivationWorkerLink]):
    """The server of all workers' connections. Raises ConfigError if an address cannot be bound."""

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
        """Return the handler of one worker's connection."""
        return ActivationWorkerLink(connection, store=self._store, bytes_per_s=self._bytes_per_s)


class SectionTransfer(FileTransfer):
    """A section that is being sent. Raises InvalidRequest if a requested tensor is not in the section."""

    def __init__(self, request: SectionRequested, lease: CacheLease, layout: SectionLayout) -> None:
        super().__init__(request, lease)
        self._request = request
        self._begun = False
        self._layout = layout
        try:
            self._pieces = SectionPieces(layout, request.tensors or None)
        except ValueError as error:
            raise InvalidRequest(str(error)) from None

    @property
    def done(self) -> bool:
        """Whether all requested tensors were sent."""
        return self._pieces.done

    def send_piece(self, link: Link, max_bytes: int) -> int:
        """Send the next chunk. The first one includes the times that the store took."""
        times = None if self._begun else self._request.times(self.lease)
        self._begun = True
        return send_chunk(
            link,
            self.number,
            self._pieces.take(max_bytes),
            lambda piece, view: self._fill(view, self._layout.offsets[piece.tensor] + piece.start),
            times=times,
        )


class SectionReceiver:
    """Receives the sections of one connection, in its receiving thread.

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
        """Begin a section, dropping an incomplete one. Raise ValueError if the header breaks a rule."""
        self.drop()
        self._number = number
        begun = self._store.begin_section(header, layout, self._link)
        if begun is DropReason.NOT_GRANTED:
            self._on_not_granted(header)
        self._intake = begun if isinstance(begun, SectionIntake) else None

    def take(self, number: int, chunk: ChunkHeader, data: memoryview) -> None:
        """Add the next chunk. Raise ValueError if it is out of order or belongs to another section."""
        if number != self._number:
            raise ValueError("a chunk must belong to the section that the worker began last")
        if self._intake is not None and self._intake.is_open:
            self._intake.write(chunk.tensor, chunk.start, data)

    def expire(self) -> None:
        """Drop the section if it is idle or its recording was abandoned. Call this periodically."""
        if self._intake is not None:
            self._intake.expire(self._store.record_idle_s)

    def drop(self) -> None:
        """Drop the incomplete section, if there is one."""
        if self._intake is not None:
            self._intake.drop(DropReason.ABANDONED)
            self._intake = None


def _requested(number: int, request: SectionRequest) -> SectionRequested:
    return SectionRequested(number=number, digest=request.digest, tensors=tuple(request.tensors), owner=request.edit)
