"""The configuration of an approximate cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from bottega.rpc.server_config import LinksConfig
from bottega.rpc.service_config import AtLeastOne, NotNegative, StoreConfig
from bottega.strict import STRICT

Share = Annotated[float, Field(ge=0, le=1)]

PolicyName = Literal["lcbfu", "lcbfu-decayed", "lru", "lfu", "fifo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig(StoreConfig):
    """Settings of an approximate cache."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    links: LinksConfig = field(default_factory=LinksConfig)
    budget_bytes: AtLeastOne = 16 << 30
    """Bound on the disk bytes of latents and of the small picture of each entry."""
    min_free_bytes: NotNegative = 1 << 30
    """Bytes of disk space that stay free for other programs. A value above 5 % of the disk counts as 5 %."""
    max_entries: AtLeastOne = 200_000
    """Bound on the number of pictures with cached latents."""
    policy: PolicyName = "lcbfu"
    """Eviction policy.

    "lcbfu" evicts the lowest frequency times steps first (Nirvana, NSDI'24). "lcbfu-decayed" is the same with a
    frequency that halves over time. The others exist for comparison.
    """
    half_life: AtLeastOne = 10_000
    """Number of lookups after which the frequency of lcbfu-decayed halves."""
    exploration: Share = 0.05
    """Share of hits that are drawn from noise all the same, so that pictures stay various."""
    row_pictures: AtLeastOne = 6
    """Pictures in a row for one prompt, by any caller, of which at most one starts from another's latents.

    1: all may.
    """
    plain_for_loras: bool = False
    """Let pictures with LoRAs start from latents that were recorded without LoRAs.

    They start at most at the step at which the LoRAs must be loaded. Set it only if the loss that
    `make bench-cache-quality` measures with LoRAs (lora_accuracy_drop_points) is small enough for you.
    """
    predictor: bool = True
    """Skip searches that are predicted to find nothing, as long as measurements show that skipping pays."""
    profiles: list[str] = field(default_factory=list)
    """Files of measured profiles (CacheProfile as JSON) for models that have none yet."""
