"""The key of a set of LoRAs: two requests with the same key are drawn with the same weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

LoraSetKey = tuple[tuple[str, float], ...]
"""Digests and scales, sorted: the order in which a request names its LoRAs changes nothing. Empty is without."""


class ScaledLora(Protocol):
    """A LoRA of a request, or one in a worker's weights."""

    @property
    def digest(self) -> str:
        """SHA-256 of its canonical form, hex."""

    @property
    def scale(self) -> float:
        """What its change is multiplied with."""


def lora_set_key(loras: Iterable[ScaledLora]) -> LoraSetKey:
    """The key of a set."""
    return tuple(sorted((lora.digest, lora.scale) for lora in loras))
