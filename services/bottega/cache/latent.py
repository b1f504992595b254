"""Latents as they come in and go out, and what is known of those that are kept. Plain values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from bottega.planning.eviction import Usage
from bottega.transport import DType
from bottega.v1.cache_pb2 import CacheAnswer, CacheEntry


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedLatent:
    """A latent. shape: channels, height, width. data: its elements, row-major."""

    dtype: DType
    shape: tuple[int, ...]
    data: bytes | memoryview


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoreAnswer:
    """What a question is answered. latents: one for each of the header's hits, in their order."""

    header: CacheAnswer
    latents: tuple[RecordedLatent, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EntryDetails:
    """An entry, for people. picture: uint8 [height, width, 3]; None where its file is gone or damaged."""

    entry: CacheEntry
    picture: np.ndarray | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryPicture:
    """The picture of an entry, as RGB in a file. digest: SHA-256 of its bytes."""

    height: int
    width: int
    digest: bytes

    @property
    def size_bytes(self) -> int:
        """Of its file."""
        return self.height * self.width * 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What the latents of one picture have in common."""

    number: int
    """Unique for the life of the store."""
    name: str
    """32 hex digits."""
    noise: int
    """Seed of the picture, which says what noise it began with; a number of its own, below 0, if that is not known."""
    key: str
    model_hash: str
    dtype: DType
    """Element type of each latent."""
    shape: tuple[int, ...]
    """Shape of each latent: channels, height, width."""
    picture: EntryPicture
    recorded_s: float
    """Unix time."""

    @property
    def latent_bytes(self) -> int:
        """Of each of its latents."""
        return math.prod(self.shape) * self.dtype.item_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptLatent:
    """A latent of an entry. digest: SHA-256 of its bytes."""

    digest: bytes
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EntryRecord:
    """An entry as the records have it. embedding: float32, as bytes. parameters: a GenerationSpec, as bytes. hits: how
    often it was started from. latents: by step."""

    entry: Entry
    embedding: bytes
    parameters: bytes
    hits: int
    latents: dict[int, KeptLatent]
