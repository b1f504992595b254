"""The engine's add-on for LoRAs from the fleet's stores."""

from __future__ import annotations

from bottega import kinds
from bottega.addons.interface.engine_context import EngineAddOnContext
from bottega.addons.loras.config import LorasConfig
from bottega.addons.loras.engine.addon import EngineLoras
from bottega.addons.loras.worker.cache import LoraCache
from bottega.addons.loras.worker.store_link import LoraLinkSettings
from bottega.v1.engine_pb2 import EngineBeat
from bottega.v1.hosted_pb2 import HOSTED_STATE_APPLIED, HOSTED_STATE_LOADED

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
