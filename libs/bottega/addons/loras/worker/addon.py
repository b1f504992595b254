"""The engine's add-on for LoRAs, and its source: a memory cache of LoRAs from the fleet's stores.

Requests for the same LoRA share one download. If a store is lost while the engine waits, the LoRA is requested again,
from the same or another store. The engine decides when to give up.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence

import torch

from bottega import kinds
from bottega.addons.loras.config import LorasConfig
from bottega.addons.loras.engine import LoraHandle, LoraRef
from bottega.addons.loras.engine.addon import EngineLoras
from bottega.addons.loras.worker.download import DownloadHandle, LoraDownload
from bottega.addons.loras.worker.store_link import LoraLinkSettings, LoraStoreLink
from bottega.caching.lru_cache import LruCache
from bottega.engine.addon import EngineAddOnContext
from bottega.errors import BottegaError, DataLoss, LoraNotFound
from bottega.transport import LinkCounters, OfferSource
from bottega.v1.engine_pb2 import EngineBeat
from bottega.v1.fleet_pb2 import ServiceAddress
from bottega.v1.hosted_pb2 import HOSTED_STATE_APPLIED, HOSTED_STATE_LOADED

_log = logging.getLogger(__name__)

# Links that are kept. A fleet has one store, or a few.
_MAX_STORES = 16


class LoraCache:
    """A cache of LoRAs, called by one thread of the engine.

    Args:
        device: Device of the model.
        dtype: Element type of the model.
        budget_bytes: Maximum bytes of LoRAs that no job uses. Those in use have no limit.
    """

    def __init__(
        self,
        *,
        offers: OfferSource,
        device: torch.device,
        dtype: torch.dtype,
        budget_bytes: int,
        settings: LoraLinkSettings,
        counters: LinkCounters,
    ) -> None:
        self._offers = offers
        self._device = device
        self._dtype = dtype
        self._settings = settings
        self._counters = counters
        self._stores: tuple[ServiceAddress, ...] = ()
        self._without_store: list[LoraDownload] = []  # downloads that no store can be asked for now
        self._links: OrderedDict[str, LoraStoreLink] = OrderedDict()
        self._refusals: dict[LoraDownload, dict[str, BottegaError]] = {}  # by address
        self._downloads = LruCache[LoraDownload](
            budget_bytes=budget_bytes, on_evict=lambda _, download: self._refusals.pop(download, None)
        )
        self._changed = threading.Condition()
        self._version = 0
        self._seen_version = 0  # as the last `settle` returned

    @property
    def resident(self) -> list[str]:
        """Digests of the LoRAs in memory, the most recently used last."""
        return [digest for digest, download in self._downloads.items() if download.ready]

    @property
    def used_bytes(self) -> int:
        """Bytes of the LoRAs in memory."""
        return self._downloads.used_bytes

    @property
    def linked(self) -> int:
        """Number of connected stores."""
        return sum(link.open for link in list(self._links.values()))

    def set_stores(self, stores: Sequence[ServiceAddress]) -> None:
        with self._changed:
            self._stores = tuple(stores)
            waiting, self._without_store = self._without_store, []
            for download in waiting:
                self._ask(download)

    def begin(self, ref: LoraRef) -> LoraHandle:
        with self._changed:
            download = self._downloads.get(ref.digest)
            if download is None or download.error is not None:
                download = LoraDownload(ref, device=self._device, dtype=self._dtype)
                self._downloads.add(ref.digest, download)
                self._ask(download)
            download.users += 1
            if download.error is None:
                self._downloads.use(ref.digest)
        return DownloadHandle(download)

    def settle(self, handles: Sequence[LoraHandle], timeout_s: float) -> None:
        with self._changed:
            # Wait although one of several may have come: the caller knows it and waits for the others.
            if not all(_settled(handle) for handle in handles):
                self._changed.wait_for(lambda: self._version != self._seen_version, timeout_s)
            self._seen_version = self._version

    def close(self, handles: Sequence[LoraHandle]) -> None:
        with self._changed:
            for handle in handles:
                assert isinstance(handle, DownloadHandle), "`begin` made every handle"
                if handle.open:
                    handle.open = False
                    handle.download.users -= 1
                    if not handle.download.users and not handle.download.ready:
                        self._give_up(handle.download)
            self._downloads.trim_idle()

    def stop(self) -> None:
        for link in list(self._links.values()):
            link.close()

    def _ask(self, download: LoraDownload) -> None:
        """Request a LoRA from the best store that has not refused it. Call it under the lock."""
        store = self._next_store(download)
        if store is not None:
            self._link_to(store).fetch(download)
        else:
            self._without_store.append(download)

    def _next_store(self, download: LoraDownload, *, but: str = "") -> ServiceAddress | None:
        """Return the best store that has not refused a LoRA; None if there is none.

        Args:
            but: Address of a store to exclude as well.
        """
        passed = {but, *self._refusals.get(download, ())}
        return next((store for store in self._stores if store.address not in passed), None)

    def _link_to(self, store: ServiceAddress) -> LoraStoreLink:
        link = self._links.get(store.address)
        if link is None:
            link = self._links[store.address] = LoraStoreLink(
                store,
                offers=self._offers,
                settings=self._settings,
                counters=self._counters,
                on_progress=self._notify,
                on_refused=self._refused,
                on_lost=self._lost,
            )
            idle = [address for address, other in self._links.items() if other is not link and not other.wanted()]
            for address in idle[: max(0, len(self._links) - _MAX_STORES)]:
                self._links.pop(address).close()
        self._links.move_to_end(store.address)
        return link

    def _refused(self, link: LoraStoreLink, download: LoraDownload, error: BottegaError) -> None:
        """Request a LoRA that a store refused from another store, or fail. Called in a thread of the connection."""
        if isinstance(error, DataLoss):  # the operator must know, whether or not another store has it undamaged
            facts = {"service": link.store.name, "lora": download.ref.name, "text": error.message}
            _log.warning("a LoRA is damaged in its store; delete it and upload it again", extra=facts)
        with self._changed:
            if download.given_up:
                return
            refused = self._refusals.setdefault(download, {})
            refused[link.store.address] = error
            if self._next_store(download) is None:
                # An error of a store that has the LoRA says more than "not found" of another one.
                telling = (refusal for refusal in refused.values() if not isinstance(refusal, LoraNotFound))
                self._fail(download, next(telling, error))
            else:
                download.restart()
                self._ask(download)

    def _lost(self, link: LoraStoreLink, _error: BottegaError) -> None:
        """Fetch the pending LoRAs of a lost store from other stores, or again over its connection if there are none."""
        with self._changed:
            for download in link.wanted():
                if (other := self._next_store(download, but=link.store.address)) is not None:
                    link.give_up(download)
                    self._link_to(other).fetch(download)

    def _give_up(self, download: LoraDownload) -> None:
        """Drop a download that no job waits for. The next request starts it from the beginning.

        If it were completed, short requests would fill the memory and delay others on the connection. Call it under the
        lock.
        """
        download.given_up = True
        self._refusals.pop(download, None)
        self._without_store = [other for other in self._without_store if other is not download]
        if self._downloads.get(download.ref.digest) is download:
            self._downloads.remove(download.ref.digest)
        for link in self._links.values():
            link.give_up(download)

    def _fail(self, download: LoraDownload, error: BottegaError) -> None:
        download.error = error
        self._refusals.pop(download, None)
        if self._downloads.get(download.ref.digest) is download:
            self._downloads.remove(download.ref.digest)
        self._version += 1
        self._changed.notify_all()

    def _notify(self) -> None:
        with self._changed:
            self._version += 1
            self._changed.notify_all()


def _settled(handle: LoraHandle) -> bool:
    try:
        return handle.ready
    except BottegaError:
        return True


# Share of the memory that the model and earlier add-ons leave; the rest is for forward passes.
_MEMORY_SHARE = 0.25
# The API's bound on reported LoRAs.
_MAX_HOSTED = 256


def create(context: EngineAddOnContext) -> WorkerLoras:
    """Return the add-on for an engine. The manifest names this function."""
    return WorkerLoras(context)


class WorkerLoras(EngineLoras):
    """The add-on for LoRAs."""

    def __init__(self, context: EngineAddOnContext) -> None:
        config = context.section(LorasConfig)
        # The cache of LoRAs, and half as much for stacks of them that groups need.
        reserved_bytes = context.model.memory.reserve_up_to(
            "LoRAs", config.budget_bytes + config.budget_bytes // 2, share=_MEMORY_SHARE
        )
        budget_bytes = -(-2 * reserved_bytes // 3)
        self._cache = LoraCache(
            offers=context.offers,
            device=context.model.device,
            dtype=context.model.dtype,
            budget_bytes=budget_bytes,
            settings=LoraLinkSettings(silence_s=config.silence_s),
            counters=context.counters,
        )
        super().__init__(
            context.model,
            self._cache,
            patches=not context.fixed_rows,
            merges_half=config.merge_half_precision,
            pristine_on_host=config.pristine == "host",
            stacked_bytes=budget_bytes // 2,
            timeout_s=config.timeout_s,
        )

    def fill_beat(self, beat: EngineBeat) -> None:
        """Add the most recently used LoRAs in memory, and those in the weights, to the engine's periodic report."""
        super().fill_beat(beat)
        for digest in self._cache.resident[-_MAX_HOSTED:]:
            beat.hosted.add(kind=kinds.LORAS, digest=digest, state=HOSTED_STATE_LOADED)
        for digest, scale in self.weights.patched_key:
            beat.hosted.add(kind=kinds.LORAS, digest=digest, state=HOSTED_STATE_APPLIED, scale=scale)
        beat.links.open += self._cache.linked

    def stop(self) -> None:
        self._cache.stop()
