"""What an index is built with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSettings:
    """flat_entries: from so many on, a key's entries lie in lists, each around a centre.

    growth: times as many entries as when the centres were made, from which on they are made anew; the same for fewer.
    candidates: entries that a search compares, about.
    build_threads: that make centres, in the background.

    With the defaults a search among a million vectors finds the nearest in more than .98 of cases
    (`make bench-index`).
    """

    flat_entries: int = 10_000
    growth: float = 4.0
    candidates: int = 600
    build_threads: int = 2
