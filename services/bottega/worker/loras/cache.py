"""Brings LoRAs to the engine: from its cache, or from the stores that there are. See LoraSource.

Downloads are shared by all that requested them. A store that is lost is asked again, where it is now, or another one,
for as long as the engine waits; when that is over the engine gives up, and says so.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence

import torch

from bottega.caching import LruCache
from bottega.diffusion.loras import LoraHandle, LoraRef
from bottega.errors import BottegaError, DataLoss, LoraNotFound
from bottega.transport import LinkCounters, OfferSource
from bottega.v1.fleet_pb2 import ServiceAddress
from bottega.worker.loras.download import DownloadHandle, LoraDownload
from bottega.worker.loras.store_link import LoraLinkSettings, StoreLink

_log = logging.getLogger(__name__)

# Links that are kept: a fleet has one store, or a few.
_MOST_STORES = 16


class LoraCache:
    """One thread of the engine's calls it.

    device, dtype: of the model. budget_bytes: of LoRAs that nobody waits for; those that somebody does are as many as
    the engine's jobs have.
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
        self._without_store: list[LoraDownload] = []  # for want of a store
        self._links: OrderedDict[str, StoreLink] = OrderedDict()
        self._refusals: dict[LoraDownload, dict[str, BottegaError]] = {}  # by address
        self._downloads = LruCache[LoraDownload](
            budget_bytes=budget_bytes, on_evict=lambda _, download: self._refusals.pop(download, None)
        )
        self._changed = threading.Condition()
        self._version = 0
        self._seen_version = 0  # as the last `settle` returned

    @property
    def resident(self) -> list[str]:
        """Digests of what is here, the newest used last."""
        return [digest for digest, download in self._downloads.items() if download.ready]

    @property
    def used_bytes(self) -> int:
        """Of what is here."""
        return self._downloads.used_bytes

    @property
    def linked(self) -> int:
        """Links that are open."""
        return sum(link.linked for link in list(self._links.values()))

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
            # Not when one of several is here: its caller was told of it once, and waits for the others.
            if not all(_settled(handle) for handle in handles):
                self._changed.wait_for(lambda: self._version != self._seen_version, timeout_s)
            self._seen_version = self._version

    def close(self, handles: Sequence[LoraHandle]) -> None:
        with self._changed:
            for handle in handles:
                assert isinstance(handle, DownloadHandle), "every handle was made here"
                if handle.open:
                    handle.open = False
                    handle.download.users -= 1
                    if not handle.download.users and not handle.download.ready:
                        self._give_up(handle.download)
            self._downloads.trim_idle()

    def stop(self) -> None:
        """Ends all links."""
        for link in list(self._links.values()):
            link.close()

    def _ask(self, download: LoraDownload) -> None:
        """Asks the best store that has not refused it. Under the lock."""
        store = self._next_store(download)
        if store is not None:
            self._link_to(store).fetch(download)
        else:
            self._without_store.append(download)

    def _next_store(self, download: LoraDownload, *, but: str = "") -> ServiceAddress | None:
        """The best that has not refused it. but: the address of another one that is not meant."""
        passed = {but, *self._refusals.get(download, ())}
        return next((store for store in self._stores if store.address not in passed), None)

    def _link_to(self, store: ServiceAddress) -> StoreLink:
        link = self._links.get(store.address)
        if link is None:
            link = self._links[store.address] = StoreLink(
                store,
                offers=self._offers,
                settings=self._settings,
                counters=self._counters,
                on_progress=self._notify,
                on_refused=self._refused,
                on_lost=self._lost,
            )
            idle = [address for address, each in self._links.items() if each is not link and not each.wanted()]
            for address in idle[: max(0, len(self._links) - _MOST_STORES)]:
                self._links.pop(address).close()
        self._links.move_to_end(store.address)
        return link

    def _refused(self, link: StoreLink, download: LoraDownload, error: BottegaError) -> None:
        """A store will not send it: another one may. In a thread of its link's."""
        if isinstance(error, DataLoss):  # for its operator, whether or not another one has it whole
            facts = {"store": link.store.name, "lora": download.ref.name, "text": error.message}
            _log.warning("a LoRA is damaged in its store; bring it again", extra=facts)
        with self._changed:
            if download.given_up:
                return
            refused = self._refusals.setdefault(download, {})
            refused[link.store.address] = error
            if self._next_store(download) is None:
                # That one has it not says nothing beside what is wrong with it elsewhere.
                told = (each for each in refused.values() if not isinstance(each, LoraNotFound))
                self._fail(download, next(told, error))
            else:
                download.restart()
                self._ask(download)

    def _lost(self, link: StoreLink, _error: BottegaError) -> None:
        """A store is lost: what it has not sent is asked for elsewhere, or there again."""
        with self._changed:
            for download in link.wanted():
                if (other := self._next_store(download, but=link.store.address)) is not None:
                    link.give_up(download)
                    self._link_to(other).fetch(download)

    def _give_up(self, download: LoraDownload) -> None:
        """Forgets a download that nobody waits for; the next request starts it from its beginning.

        Were it kept until it is here, requests that come and go at once would fill the memory, and the link, too, for
        which others wait. Under the lock.
        """
        download.given_up = True
        self._refusals.pop(download, None)
        self._without_store = [each for each in self._without_store if each is not download]
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
    """Whether there is nothing more to wait for."""
    try:
        return handle.ready
    except BottegaError:
        return True
