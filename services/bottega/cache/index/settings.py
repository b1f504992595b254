"""What an index is built with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSettings:
    """flat_entries: from so many on, searches compare a key's sketches first.

    candidates: entries whose vectors are then compared, and those that differ no more. More of them find the nearest
    more often, and take longer (`make bench-index`).
    """

    flat_entries: int = 10_000
    candidates: int = 256
