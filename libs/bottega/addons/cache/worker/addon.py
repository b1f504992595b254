"""The engine's add-on for cached latents from the fleet's approximate caches."""

from __future__ import annotations

from bottega.addons.cache.config import CachedStartsConfig
from bottega.addons.cache.engine.addon import EngineCachedStarts
from bottega.addons.cache.worker.latent_stores import LatentStores
from bottega.addons.cache.worker.store_link import CacheLinkSettings
from bottega.addons.interface.engine_context import EngineAddOnContext
from bottega.v1.engine_pb2 import EngineBeat


def create(context: EngineAddOnContext) -> WorkerCachedStarts:
    """Return the add-on for an engine. The manifest names this function."""
    return WorkerCachedStarts(context)


class WorkerCachedStarts(EngineCachedStarts):
    """The add-on for cached latents."""

    def __init__(self, context: EngineAddOnContext) -> None:
        config = context.section(CachedStartsConfig)
        self._stores = LatentStores(
            model_name=context.model.name,
            offers=context.offers,
            budget_bytes=config.recording_bytes,
            settings=CacheLinkSettings(silence_s=config.silence_s),
            counters=context.counters,
        )
        super().__init__(context.model, self._stores, timeout_s=config.timeout_s)

    def fill_beat(self, beat: EngineBeat) -> None:
        super().fill_beat(beat)
        beat.links.open += self._stores.linked

    def stop(self) -> None:
        self._stores.stop()
