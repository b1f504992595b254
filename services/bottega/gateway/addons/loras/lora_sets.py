"""Which LoRAs a picture is drawn with, as workers have them in their weights. Knows no jobs and no workers."""

from __future__ import annotations

from collections.abc import Iterable

from bottega.v1.fleet_pb2 import PatchedLora
from bottega.v1.generation_pb2 import Lora

LoraSetKey = tuple[tuple[str, float], ...]
"""Digests and scales, sorted: the order in which a request names its LoRAs changes nothing. Empty is without."""


def lora_set(loras: Iterable[Lora] | Iterable[PatchedLora]) -> LoraSetKey:
    """Of complete LoRAs."""
    return tuple(sorted((lora.digest, lora.scale) for lora in loras))
