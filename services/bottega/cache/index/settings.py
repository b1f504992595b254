"""What an index is built with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSettings:
    """flat_entries: from so many on, a key's entries have a graph.

    recent_entries: beside a graph, so many are searched one by one before they go into it together.
    deleted_share: of a graph's nodes, from which on it is built anew without those that were deleted.
    links: of a node to others, twice as many in the lowest layer (M). build_width, search_width: candidates that are
    kept while a node is linked and while one is searched (efConstruction, efSearch).
    build_threads: of a build, which runs in the background.

    The defaults of the graph reach a recall of .98 among a million vectors (`make bench-index`).
    """

    flat_entries: int = 10_000
    recent_entries: int = 2_000
    deleted_share: float = 0.2
    links: int = 32
    build_width: int = 128
    search_width: int = 192
    build_threads: int = 2
