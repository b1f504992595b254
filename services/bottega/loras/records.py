"""The catalogue's record of a LoRA."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueRecord:
    """A LoRA in the catalogue. The message StoredLora explains the fields."""

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
    """Pairs of a number of steps and the latest step at which the LoRA may be applied."""
    pinned: bool = False
    added_s: float
