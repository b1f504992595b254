"""The settings of a LatentStore."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bottega.addons.cache.planning.eviction import LCBFU, EvictionPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """Settings of a LatentStore."""

    folder: Path
    """Folder of database, latents and profiles. Only one process at a time may use it."""
    budget_bytes: int
    """Upper bound on the bytes of latents and of the small pictures of their entries."""
    policy: EvictionPolicy = LCBFU
    """Determines which latents are evicted first. Its clock counts questions of workers."""
    batch_share: float = 0.02
    """Share of the budget that each eviction frees in addition, so that evictions are rare."""
    max_entries: int = 200_000
    """Upper bound on the number of pictures with latents."""
    min_free_bytes: int = 0
    """Bytes of disk space that stay free for other programs. At most 5 % of the disk counts."""
    exploration: float = 0.05
    """Share of hits that are not used, so that some pictures are still drawn from noise."""
    row_pictures: int = 6
    """Number of pictures in a row of one prompt; see `PromptRows`."""
    plain_for_loras: bool = False
    """Whether a question with LoRAs may also get entries without LoRAs (those of its plain_key)."""
    doorkeeper: bool = True
    """Whether a key is recorded only from its second question on."""
    predictor: bool = True
    """Whether searches that are predicted to find nothing may be skipped."""
    max_waiting: int = 256
    """Upper bound on the number of recordings that wait to be written."""
    max_waiting_bytes: int = 256 << 20
    """Upper bound on the bytes of recordings that wait to be written."""
    retry_s: float = 5.0
    """Seconds between attempts to use a failed disk, and longest time until counts are written."""
    seed: int | None = None
    """Seed of the random choice of unused hits; None means a different one each time."""
