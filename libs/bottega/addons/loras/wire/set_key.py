"""The key of a set of LoRAs: requests with the same key use the same weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

LoraSetKey = tuple[tuple[str, float], ...]
"""Sorted pairs of digest and scale, so a request's order of LoRAs does not matter. It is empty without LoRAs."""


class ScaledLora(Protocol):
    """A LoRA of a request, or one in a worker's weights."""

    @property
    def digest(self) -> str:
        """SHA-256 of its canonical form, in hex."""

    @property
    def scale(self) -> float:
        """Factor of its change."""


def lora_set_key(loras: Iterable[ScaledLora]) -> LoraSetKey:
    """Return the key of a set of LoRAs, which is the same in any order."""
    return tuple(sorted((lora.digest, lora.scale) for lora in loras))
