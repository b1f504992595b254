"""LoRAs as an add-on of a worker's engine: from the fleet's stores."""

from __future__ import annotations

from collections.abc import Sequence

from bottega import kinds
from bottega.diffusion.loras.addon import EngineLoras
from bottega.v1.hosted_pb2 import HOSTED_STATE_APPLIED, HOSTED_STATE_LOADED, Hosted
from bottega.worker.engine.addons import EngineAddOnContext
from bottega.worker.loras.cache import LoraCache
from bottega.worker.loras.store_link import LoraLinkSettings

# Of what is left beside the model, and whatever add-ons before this one have; the rest is for forwards.
_MEMORY_SHARE = 0.25
# Of those at hand, that are reported: by the contract.
_MOST_HOSTED = 256


def create(context: EngineAddOnContext) -> WorkerLoras:
    """The add-on that the manifest names."""
    return WorkerLoras(context)


class WorkerLoras(EngineLoras):
    """All LoRAs of a worker."""

    def __init__(self, context: EngineAddOnContext) -> None:
        config = context.config
        # What is kept of LoRAs, and half as much of them stacked for groups.
        reserved_bytes = context.model.memory.reserve_up_to(
            "LoRAs", config.lora_budget_bytes + config.lora_budget_bytes // 2, share=_MEMORY_SHARE
        )
        budget_bytes = -(-2 * reserved_bytes // 3)
        self._cache = LoraCache(
            offers=context.offers,
            device=context.model.device,
            dtype=context.model.dtype,
            budget_bytes=budget_bytes,
            settings=LoraLinkSettings(silence_s=config.lora_silence_s),
            counters=context.counters,
        )
        super().__init__(
            context.model,
            self._cache,
            patches=not config.fixed_rows,
            merges_half=config.lora_merge_half_precision,
            pristine_on_host=config.lora_pristine == "host",
            stacked_bytes=budget_bytes // 2,
            timeout_s=config.lora_timeout_s,
        )

    def hosted(self) -> Sequence[Hosted]:
        """Those in memory, the newest ones, and those in the weights."""
        here = self._cache.resident[-_MOST_HOSTED:]
        return [
            *(Hosted(kind=kinds.LORAS, digest=digest, state=HOSTED_STATE_LOADED) for digest in here),
            *(
                Hosted(kind=kinds.LORAS, digest=digest, state=HOSTED_STATE_APPLIED, scale=scale)
                for digest, scale in self.weights.patched_key
            ),
        ]

    @property
    def open_links(self) -> int:
        return self._cache.linked

    def stop(self) -> None:
        self._cache.stop()
