"""The approximate cache as a service: its metrics, and the connections of workers. `service.py` converts for gRPC.

Workers ask about latents to start from, and send recordings of new pictures. The receiving thread answers questions and
stores recordings. A worker that does not read its answers gets only refusals.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from prometheus_client.metrics_core import Metric

from bottega import kinds
from bottega.addons.cache import wire
from bottega.addons.cache.wire import CacheMessage, CacheMessageKind
from bottega.cache.config import CacheConfig
from bottega.cache.eviction import FIFO, LCBFU, LFU, LRU, EvictionPolicy, decayed_lcbfu
from bottega.cache.index.device_index import indexes_on
from bottega.cache.index.key_index import KeyedIndex
from bottega.cache.index.vector_index import IndexSettings
from bottega.cache.latent import RecordedLatent, StoreAnswer
from bottega.cache.predictor import PredictorStatistics
from bottega.cache.profiles import check_configured
from bottega.cache.records import FILE_NAMES, EntryDisk
from bottega.cache.store.settings import LatentStatistics, StoreSettings
from bottega.cache.store.store import LatentStore
from bottega.errors import BottegaError, ConfigError, StorageUnavailable
from bottega.rpc.fleet_membership import Listening
from bottega.rpc.link_service import StoreLinks
from bottega.rpc.operation.metrics import counter_by, counters, gauges
from bottega.rpc.security.private_files import write_file
from bottega.rpc.server_config import LinksConfig
from bottega.rpc.store_server import StoreLinkHandler, StoreServer
from bottega.storage import BlobFiles, folders
from bottega.storage.objects import s3_location
from bottega.transport import Connection, Incoming, Layout, Limits, LinkServerSettings, kind_of
from bottega.v1 import fleet_pb2
from bottega.v1.cache_pb2 import CACHE_OUTCOME_UNAVAILABLE, CacheAnswer, CacheQuestion, CacheRecording, CacheStarts

if TYPE_CHECKING:  # PostgreSQL's client is optional
    from bottega.storage.postgresql_thread import DatabaseThread

_log = logging.getLogger(__name__)

# Upper bound on a message. The five latents of a recording take 20 MiB in float32 at 4096x4096 pixels.
_LIMITS = Limits(slots=4, slot_bytes=32 << 20)
# Number of tensors of a message before its latents: kind, header, embedding, and the picture of a recording.
_EMBEDDING, _PICTURE, _LATENTS = 2, 3, 4
_ID = re.compile("[0-9a-f]{32}")
# Upper bound on the first attempt to create the tables of shared records.
_OPEN_S = 10.0
_NOTHING = CacheAnswer(outcome=CACHE_OUTCOME_UNAVAILABLE)


class CacheWorkerLink(StoreLinkHandler):
    """The connection of one worker.

    Args:
        store: The connection's thread calls its `ask`, `record` and `count_starts`.
    """

    def __init__(self, connection: Connection, *, store: LatentStore) -> None:
        super().__init__(connection)
        self._store = store

    def on_message(self, connection: Connection, incoming: Incoming) -> None:
        """Process a question, a recording, or a report of used latents. Each is copied before it is read."""
        layout = incoming.layout
        with incoming:
            kind = CacheMessageKind(kind_of(layout))
            if kind is CacheMessageKind.ANSWER:
                raise ValueError("a worker must not send an answer")
            if kind is not CacheMessageKind.STARTS:
                wire.check_embedding(layout)
            views = connection.wait_all(incoming)
            if kind is CacheMessageKind.QUESTION:
                self._answer(layout, views)
            elif kind is CacheMessageKind.RECORDING:
                self._record(layout, views)
            else:
                _, starts = wire.read_header(layout, views, CacheStarts)
                self._store.count_starts(starts)

    def on_end(self, cause: BottegaError) -> None:
        """Return at once, because no thread waits for this connection."""

    def _answer(self, layout: Layout, views: Sequence[memoryview]) -> None:
        number, question = wire.read_header(layout, views, CacheQuestion)
        self._send_answer(
            lambda: _message(number, self._store.ask(question, _embedding(views))),
            refusal=wire.answer_message(number, _NOTHING, ()),
        )

    def _record(self, layout: Layout, views: Sequence[memoryview]) -> None:
        _, recording = wire.read_header(layout, views, CacheRecording)
        wire.check_picture(layout)
        wire.check_latents(layout, _LATENTS, len(recording.steps))
        picture = np.frombuffer(bytes(views[_PICTURE]), dtype=np.uint8).reshape(layout.specs[_PICTURE].shape)
        latents = [
            RecordedLatent(dtype=spec.dtype, shape=spec.shape, data=view)
            for spec, view in zip(layout.specs[_LATENTS:], views[_LATENTS:], strict=True)
        ]
        self._store.record(recording, embedding=_embedding(views), picture=picture, latents=latents)


class CacheLinks(StoreLinks[CacheWorkerLink]):
    """The server of workers' connections. Raises ConfigError if an address cannot be bound."""

    def __init__(self, config: LinksConfig, *, store: LatentStore) -> None:
        self._store = store
        super().__init__(
            config, kind=kinds.CACHE, what="the approximate cache", settings=LinkServerSettings(limits=_LIMITS)
        )

    def new_handler(self, connection: Connection) -> CacheWorkerLink:
        """Return the handler of one worker's connection."""
        return CacheWorkerLink(connection, store=self._store)


def _embedding(views: Sequence[memoryview]) -> np.ndarray:
    return np.frombuffer(bytes(views[_EMBEDDING]), dtype=np.float32)


def _message(number: int, answer: StoreAnswer) -> CacheMessage:
    latents = [
        (wire.latent_spec(index, latent.dtype, latent.shape), memoryview(latent.data))
        for index, latent in enumerate(answer.latents)
    ]
    return wire.answer_message(number, answer.header, latents)


_PREFIX = "bottega_cache"


class CacheServer(StoreServer):
    """The approximate cache behind its gRPC server and its connections to workers.

    Raises ConfigError if a configured profile cannot be used, or an address cannot be bound.
    """

    def __init__(self, config: CacheConfig, *, folder: Path, listening: Listening) -> None:
        self._profiles = check_configured(config)
        self.store = _store(config, folder)
        super().__init__(
            config,
            kind=kinds.CACHE,
            what="the approximate cache",
            listening=listening,
            links=CacheLinks(config.links, store=self.store),
            uses=(kinds.CACHE,),
        )

    def load(self) -> fleet_pb2.Load:
        """Return the load to report to the fleet."""
        lookups = self.store.lookups()
        return fleet_pb2.Load(
            draining=self._draining,
            memory_bytes=self._memory.resident_bytes,
            activity=fleet_pb2.Activity(lookups=sum(lookups.values()), hits=lookups["hit"]),
        )

    def on_services(self, services: Sequence[fleet_pb2.ServiceAddress]) -> None:
        """Note which caches share the entries."""
        self.store.set_caches(self.name, frozenset(service.name for service in services))

    async def _open(self) -> None:
        """Open the store. Stored entries are read in the background."""
        await asyncio.to_thread(self._start_store)

    async def _close(self) -> None:
        await asyncio.to_thread(self.store.close)

    def _metrics(self) -> Iterator[Metric]:
        figures = self.store.statistics()
        yield from _store_metrics(figures)
        if figures.predictor is not None:
            yield from _predictor_metrics(figures.predictor)

    def _start_store(self) -> None:
        self.store.start()
        for profile in self._profiles:
            try:
                self.store.add_profile(profile)
            except StorageUnavailable as error:
                # Without the profile nothing is reused, but the cache can start.
                _log.warning(
                    "a configured profile could not be stored; its model reuses nothing",
                    extra={"model_hash": profile.model_hash, "text": error.message},
                )


def store_settings(config: CacheConfig, folder: Path) -> StoreSettings:
    """Convert the configuration to the store's settings."""
    return StoreSettings(
        folder=folder,
        budget_bytes=config.budget_bytes,
        policy=_policy(config),
        max_entries=config.max_entries,
        min_free_bytes=config.min_free_bytes,
        exploration=config.exploration,
        row_pictures=config.row_pictures,
        plain_for_loras=config.plain_for_loras,
        predictor=config.predictor,
    )


def _store(config: CacheConfig, folder: Path) -> LatentStore:
    """Return a store with its index in memory or in the database, and with its own or shared entries.

    Raises ConfigError.
    """
    settings = store_settings(config, folder)
    if not config.database:
        on_cpu = config.index.device == "cpu"
        make = None if on_cpu else indexes_on(config.index.device)
        return LatentStore(settings, index=KeyedIndex(settings=IndexSettings(make_device_index=make)))
    from bottega.cache.index.postgresql import PostgresIndex, cache_database

    database, cache = cache_database(config.database), cache_id(folder)
    index = PostgresIndex(database, cache=cache)
    try:
        index.open()
        disk = _shared_entries(config, folder, database, cache) if config.objects else None
    except ConfigError:
        index.close()
        raise
    return LatentStore(settings, index=index, disk=disk)


def _shared_entries(config: CacheConfig, folder: Path, database: DatabaseThread, cache: str) -> EntryDisk:
    from bottega.cache.shared_entries import READ_REQUEST_S, FilesInObjects, SharedEntries
    from bottega.cache.shared_records import OWNER_NAMES, SharedRecords
    from bottega.storage.s3 import S3Objects

    objects, reading = (
        S3Objects(s3_location(config.objects), names=FILE_NAMES, request_s=request_s)
        for request_s in (None, READ_REQUEST_S)
    )
    records = SharedRecords(database.database, objects=config.objects, name=config.name, cache=cache)
    database.start(records.open(), _OPEN_S)
    tier = BlobFiles(folder / "tier", names=FILE_NAMES, min_free_bytes=config.min_free_bytes)
    files = FilesInObjects(objects, tier, reading=reading, local_bytes=config.local_bytes)
    owner = S3Objects(s3_location(f"{config.objects}/owner"), names=OWNER_NAMES)
    entries = SharedEntries(folder, database, records, files, owner=owner, name=config.name)
    with contextlib.suppress(StorageUnavailable):  # it is checked again before something is written
        entries.check_owner()
    return entries


def cache_id(folder: Path) -> str:
    """Return the random ID in the cache's folder, which names its vectors in a database. Create it if there is none.

    The cache's name does not identify it: caches with one database may be unnamed, or have the same name. Raises
    ConfigError if the folder cannot be used.
    """
    file = folder / "id"
    try:
        folders.make(folder)
        found = file.read_text(encoding="ascii", errors="replace") if file.exists() else ""
        if _ID.fullmatch(found) is None:
            found = uuid.uuid4().hex
            write_file(file, found.encode())
    except OSError as error:
        raise ConfigError(f"the file {file} cannot be read or written: {error.strerror}") from None
    return found


def _policy(config: CacheConfig) -> EvictionPolicy:
    if config.policy == "lcbfu-decayed":
        return decayed_lcbfu(config.half_life)
    return {"lcbfu": LCBFU, "lru": LRU, "lfu": LFU, "fifo": FIFO}[config.policy]


def _store_metrics(store: LatentStatistics) -> Iterator[Metric]:
    yield counter_by("outcome", f"{_PREFIX}_lookups", "Questions of workers, by outcome.", store.lookups)
    yield counter_by("reason", f"{_PREFIX}_dropped", "Recordings that were not stored, by reason.", store.dropped)
    yield from counters(
        _PREFIX,
        ("steps_skipped", "Denoising steps that pictures skipped by using its latents.", store.steps_skipped),
        ("recorded", "Recordings that were stored.", store.recorded),
        ("evictions", "Latents that were evicted.", store.evictions),
        ("holes", "Hits that skipped fewer steps than allowed, because the best latent was evicted.", store.holes),
        ("damaged", "Latents that were found to be damaged, and deleted.", store.damaged),
    )
    yield from gauges(
        _PREFIX,
        ("bytes", "Bytes of stored latents and of the small pictures of their entries.", store.bytes),
        ("budget_bytes", "Upper bound on the bytes of latents and small pictures.", store.budget_bytes),
        ("entries", "Images with cached latents.", sum(model.entries for model in store.models)),
        ("latents", "Latents.", sum(model.latents for model in store.models)),
        ("keys", "Combinations of request settings with cached latents.", sum(model.keys for model in store.models)),
        ("elsewhere", "Entries held here that another cache owns now.", store.elsewhere),
        ("sharing", "Caches that share the entries in the database, this one included; else 1.", store.sharing),
        ("waiting_bytes", "Bytes of recordings that wait to be written.", store.waiting_bytes),
        ("in_trouble", "1 while nothing can be recorded, else 0.", int(bool(store.trouble))),
    )


def _predictor_metrics(figures: PredictorStatistics) -> Iterator[Metric]:
    outcomes = {"hit": figures.predicted_hits, "miss": figures.predicted_misses}
    text = "Searches, by whether they were predicted to find something."
    yield counter_by("outcome", f"{_PREFIX}_predictions", text, outcomes)
    yield from counters(_PREFIX, ("searches_spared", "Searches skipped as hopeless.", figures.skipped))
    yield from gauges(
        _PREFIX,
        ("predictor_on", "1 if searches that are predicted to find nothing are skipped, else 0.", float(figures.on)),
        ("predictor_precision", "Share of recently predicted hits that were hits.", figures.rates.precision),
        ("predictor_recall", "Share of recent hits that were predicted.", figures.rates.recall),
    )
