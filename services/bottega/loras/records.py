"""What the store knows of a LoRA. Plain values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueRecord:
    """A LoRA in the catalogue. See StoredLora for the fields; bounds: the latest step by number of steps."""

    name: str
    digest: str
    base: str
    rank: int
    modules: int
    size_bytes: int
    text_bytes: int
    trigger_words: tuple[str, ...]
    format: str
    bounds: tuple[tuple[int, int], ...] = ()
    pinned: bool = False
    added_s: float
