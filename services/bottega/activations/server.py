"""The activation store as a service: its metrics, and the connections of workers. `service.py` converts for gRPC.

Workers ask about templates, load sections, and send recordings. The receiving thread answers questions. A worker that
does not read its answers gets empty ones. The same thread receives recordings, which the store writes later.
`bottega.rpc.file_links` describes how sections are sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.metrics_core import Metric

from bottega import kinds
from bottega.activations.config import ActivationsConfig
from bottega.activations.store.recordings import SectionIntake
from bottega.activations.store.settings import ActivationStatistics, ActivationStoreSettings, DropReason
from bottega.activations.store.store import ActivationStore
from bottega.activations.store.template_objects import OBJECT_NAMES
from bottega.addons.edits.wire import SectionLayout, messages
from bottega.addons.edits.wire.messages import ActivationMessage, ActivationMessageKind
from bottega.addons.edits.wire.pieces import SectionPieces, send_chunk
from bottega.caching.tiers import CacheLease
from bottega.errors import BottegaError, DataLoss, InvalidRequest
from bottega.rpc.file_links import FileLimits, FileLinkHandler, FileRequest, FileTransfer
from bottega.rpc.fleet_membership import Listening
from bottega.rpc.link_service import StoreLinks
from bottega.rpc.operation.metrics import counter_by, counters, gauge_by, gauges
from bottega.rpc.server_config import LimitedLinksConfig
from bottega.rpc.store_server import StoreServer
from bottega.storage.objects import ObjectStore, s3_location
from bottega.transport import Connection, Incoming, Layout, Link, LinkServerSettings, WholeMessage, kind_of, read_number
from bottega.v1 import fleet_pb2
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


_PREFIX = "bottega_activations"


class ActivationServer(StoreServer):
    """An activation store with its servers. Raises ConfigError if an address for connections cannot be bound."""

    def __init__(self, config: ActivationsConfig, *, folder: Path, listening: Listening) -> None:
        self._config = config
        self.store = ActivationStore(store_settings(config, folder), objects=_objects(config))
        super().__init__(
            config,
            kind=kinds.ACTIVATIONS,
            what="the activation store",
            listening=listening,
            links=ActivationLinks(config.links, store=self.store),
        )

    def load(self) -> fleet_pb2.Load:
        """Return the load to report to the fleet."""
        # Files in memory are not part of this process's resident memory. A worker that maps some counts them as well.
        memory_bytes = self._memory.resident_bytes + self.store.memory_bytes
        hits, misses = self.store.lookups()
        activity = fleet_pb2.Activity(lookups=hits + misses, hits=hits)
        return fleet_pb2.Load(draining=self._draining, memory_bytes=memory_bytes, activity=activity)

    async def drain(self) -> None:
        """Refuse new connections, and wait until no section is being sent. Edits compute what they lack."""
        await super().drain()
        await asyncio.to_thread(self.store.wait_idle, self._config.server.drain_grace_s)

    async def _open(self) -> None:
        await asyncio.to_thread(self.store.start)

    async def _close(self) -> None:
        await asyncio.to_thread(self.store.close)

    def _metrics(self) -> Iterator[Metric]:
        figures = self.store.statistics()
        yield from _counters(figures)
        yield from _gauges(figures)


def store_settings(config: ActivationsConfig, folder: Path) -> ActivationStoreSettings:
    """Convert the configuration to the store's settings."""
    return ActivationStoreSettings(
        folder=folder,
        memory_budget_bytes=config.budget_bytes,
        disk_budget_bytes=config.disk_bytes,
        shared_budget_bytes=config.objects_bytes,
        shared_address=config.objects,
        template_budget_bytes=config.template_mib << 20,
        min_free_bytes=config.min_free_bytes,
        max_waiting_bytes=config.waiting_bytes,
        max_loads=config.loads_at_once,
    )


def _objects(config: ActivationsConfig) -> tuple[ObjectStore, ObjectStore] | None:
    """Return the stores of manifests and of files in the bucket; None without one. Raise ConfigError."""
    if not config.objects:
        return None
    from bottega.storage.s3 import S3Objects  # it needs obstore, which is an extra

    parts = (s3_location(f"{config.objects}/{part}") for part in ("templates", "sections"))
    manifests, files = (S3Objects(part, names=OBJECT_NAMES) for part in parts)
    return manifests, files


def _counters(store: ActivationStatistics) -> Iterator[Metric]:
    lookups = {"hit": store.hits, "miss": store.misses}
    text = "Questions of workers, by whether the image was recorded."
    yield counter_by("outcome", f"{_PREFIX}_lookups", text, lookups)
    text = "Sections given to workers: from memory, loaded into memory, or from disk because memory was full."
    yield counter_by("tier", f"{_PREFIX}_fetches", text, store.fetches)
    text = "Sections and recordings that were dropped, by reason."
    yield counter_by("reason", f"{_PREFIX}_dropped", text, store.dropped)
    if store.shared is not None:
        text = "Recordings and their files in the object storage, and failures of it, by outcome."
        yield counter_by("outcome", f"{_PREFIX}_objects", text, store.shared.outcomes)
    yield from counters(
        _PREFIX,
        ("loads", "Files that were loaded into memory.", store.loads),
        ("loaded_bytes", "Bytes of the files that were loaded into memory.", store.loaded_bytes),
        ("load_seconds", "Seconds that loading files into memory took.", store.load_s),
        ("recorded", "Images that were recorded.", store.recorded),
        ("recorded_sections", "Sections that were recorded, including replacements.", store.recorded_sections),
        ("evictions", "Images whose recordings were evicted.", store.evictions),
        ("memory_evictions", "Files that were evicted from memory.", store.memory_evictions),
        ("damaged", "Damaged files that were found and deleted.", store.damaged),
    )


def _gauges(store: ActivationStatistics) -> Iterator[Metric]:
    used = {"memory": store.memory_bytes, "disk": store.disk_bytes}
    budgets = {"memory": store.memory_budget_bytes, "disk": store.disk_budget_bytes}
    if store.shared is not None:  # of all stores that share it
        used["objects"], budgets["objects"] = store.shared.size_bytes, store.shared.budget_bytes
    text = "Bytes of activations, by tier. Everything in memory is on disk as well."
    yield gauge_by("tier", f"{_PREFIX}_bytes", text, used)
    yield gauge_by("tier", f"{_PREFIX}_budget_bytes", "Upper bound on the bytes of activations, by tier.", budgets)
    yield from gauges(
        _PREFIX,
        ("templates", "Templates.", store.templates),
        ("sections", "Stored sections: recorded forward passes of all images.", store.sections),
        ("pinned", "Pinned images, whose recordings are never evicted.", store.pinned),
        ("recording", "Images that are being recorded.", store.recording),
        ("waiting_bytes", "Bytes of sections that wait to be written.", store.waiting_bytes),
        ("disk_bytes_per_second", "Recent rate of loads from disk; 0 if unknown.", store.disk_bytes_per_s),
        ("objects_in_trouble", "1 if the object storage cannot be used, else 0.", int(bool(store.shared_trouble))),
        ("in_trouble", "1 if nothing can be recorded now, else 0.", int(bool(store.trouble))),
    )
