"""The settings of an index."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSettings:
    """Settings of an index."""

    flat_entries: int = 10_000
    """From this many entries on, searches of a key compare sketches first."""
    candidates: int = 256
    """Number of entries whose vectors are then compared, plus ties.

    More candidates find the nearest entries more often, and take longer (`make bench-index`).
    """
