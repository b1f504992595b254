"""The settings of a LatentStore."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bottega.addons.cache.planning.eviction import LCBFU, EvictionPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """Settings of a LatentStore."""

    folder: Path
    """Folder of records, latents and profiles, for one process at a time."""
    budget_bytes: int
    """Budget for latents and the small pictures of their entries."""
    policy: EvictionPolicy = LCBFU
    """Determines which latents are evicted first. Its clock counts questions."""
    batch_share: float = 0.02
    """Share of the budget that an eviction frees in addition, so that deletions come together."""
    max_entries: int = 200_000
    """Maximum number of pictures with latents."""
    min_free_bytes: int = 0
    """Bytes of disk space that stay free for other programs. A value above 5 % of the disk counts as 5 %."""
    exploration: float = 0.05
    """Share of the hits that are not used, so that some pictures are still drawn from noise."""
    row_pictures: int = 6
    """Pictures of a row; see `PromptRows`."""
    plain_for_loras: bool = False
    """Whether a query with LoRAs may also get entries without LoRAs (its plain_key)."""
    doorkeeper: bool = True
    """Whether a key is recorded only from its second query on."""
    predictor: bool = True
    """Whether searches that are predicted to find nothing may be skipped."""
    max_waiting: int = 256
    """Maximum number of recordings that wait to be written."""
    max_waiting_bytes: int = 256 << 20
    """Maximum size of recordings that wait to be written."""
    retry_s: float = 5.0
    """Seconds between attempts to use a failed disk, and longest time until counts are written."""
    seed: int | None = None
    """Seed of the exploration; None is a different one each time."""
