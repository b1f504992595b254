"""An engine whose pictures start from what a real approximate cache holds, over a real link."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bottega.addons.cache.engine.addon import EngineCachedStarts
from bottega.addons.cache.engine.job_starts import JobCachedStarts
from bottega.addons.cache.worker import CacheLinkSettings, LatentStores
from bottega.cache.server import CacheLinks
from bottega.cache.store.settings import StoreSettings
from bottega.cache.store.store import LatentStore
from bottega.engine.job import EngineOrder
from bottega.model.model import Model
from bottega.rpc.server_config import LinksConfig
from bottega.transport import LinkCounters, ServiceOffer
from bottega.v1.cache_pb2 import CacheLengthClass, CacheProfile, CacheThreshold
from bottega.v1.fleet_pb2 import ServiceAddress
from tests.support.manual_engine import Drawing, ManualEngine
from tests.support.offers import OffersAtOnce
from tests.support.waiting import EVENTUALLY_S, wait_until


class _Offers(OffersAtOnce):
    def __init__(self, links: CacheLinks) -> None:
        super().__init__()
        self._links = links

    def answer(self, address: str, link_id: str) -> ServiceOffer:
        return ServiceOffer(offer=self._links.offer("w", link_id, caller=""), service="cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    store: LatentStore
    stores: LatentStores
    starts: EngineCachedStarts
    easel: ManualEngine

    def draw(self, order: EngineOrder) -> Drawing:
        """To the end; the cache has time to answer before the second step."""
        drawing = self.easel.submit(order)
        self.easel.turn()
        if drawing.job is not None:
            for part in drawing.job.addons.values():
                asked = part.asked if isinstance(part, JobCachedStarts) else None
                if asked is not None:
                    asked.result(EVENTUALLY_S)
        while not drawing.ended:
            self.easel.turn()
        return drawing

    def recorded(self, count: int) -> None:
        """Returns when so many entries are in the store."""
        wait_until(lambda: len(self.store.entries(self.starts.model.digest, 10)) == count, "the recording")


@contextmanager
def cache_desk(model: Model, folder: Path, engine: Callable[[EngineCachedStarts], ManualEngine]) -> Iterator[Desk]:
    """A desk whose cache is in this folder. engine: returns an engine with the add-on."""
    settings = StoreSettings(
        folder=folder / "cache",
        budget_bytes=1 << 20,
        exploration=0.0,
        row_pictures=1,
        doorkeeper=False,
        plain_for_loras=True,
    )
    store = LatentStore(settings)
    store.start()
    any_length = [CacheLengthClass(max_words=0, thresholds=[CacheThreshold(fraction=0.4, similarity=0.999)])]
    store.set_profile(CacheProfile(model_hash=model.digest, balanced=any_length, fast=any_length))
    links = CacheLinks(LinksConfig(socket=str(folder / "links.sock")), store=store)
    stores = LatentStores(
        model_name="m",
        offers=_Offers(links),
        budget_bytes=1 << 20,
        settings=CacheLinkSettings(),
        counters=LinkCounters(),
    )
    starts = EngineCachedStarts(model, stores)
    easel = engine(starts)
    try:
        starts.set_services([ServiceAddress(name="cache", address="cache")])
        wait_until(lambda: stores.linked == 1, "the link")
        yield Desk(store=store, stores=stores, starts=starts, easel=easel)
    finally:
        stores.stop()
        links.close()
        store.close()
