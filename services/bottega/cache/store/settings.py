"""What the core of an approximate cache may be told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bottega.planning.eviction import LCBFU, EvictionPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """What a LatentStore may be told.

    folder: of records, latents and profiles; one process at a time has it. budget_bytes: of latents and
    the small pictures of their entries. policy: which latents go first; its clock counts questions. batch_share: of the
    budget, that an eviction frees beyond what is needed, so that deletions come together. max_entries: pictures
    of which there are latents. min_free_bytes: of the disk, that are left to others; of one smaller than 20 times that,
    a twentieth. exploration: share of the hits that are drawn from noise all the same. row_pictures: see
    PromptRows. plain_for_loras: whether
    questions are also answered with entries of their plain_key. doorkeeper: whether a key is recorded only from its
    second question on. predictor: whether searches may be spared that are predicted to find
    nothing. max_waiting, max_waiting_bytes: recordings that wait to be written. retry_s: after which a disk that failed
    is tried again, and after which what was counted is written at the latest. seed: of exploration; None is a different
    one each time.
    """

    folder: Path
    budget_bytes: int
    policy: EvictionPolicy = LCBFU
    batch_share: float = 0.02
    max_entries: int = 200_000
    min_free_bytes: int = 0
    exploration: float = 0.05
    row_pictures: int = 6
    plain_for_loras: bool = False
    doorkeeper: bool = True
    predictor: bool = True
    max_waiting: int = 256
    max_waiting_bytes: int = 256 << 20
    retry_s: float = 5.0
    seed: int | None = None
