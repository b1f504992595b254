"""What an index is built with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSettings:
    """flat_entries: from so many on, a key's entries lie in lists, each around a centre.

    growth: times as many entries as when the centres were made, from which on they are made anew; the same for fewer.
    candidates: entries that a search compares, about.
    build_threads: that make centres, in the background.

    More candidates find the nearest more often, and take longer: 600 among a million vectors found it in .95 of cases,
    in 2.5 ms (`make bench-index`).
    """

    flat_entries: int = 10_000
    growth: float = 4.0
    candidates: int = 1_000
    build_threads: int = 2
