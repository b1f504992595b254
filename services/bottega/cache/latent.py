"""Values of the cache: latents received from and sent to workers, and entries with their latents."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from bottega.addons.cache.planning.eviction import Usage
from bottega.transport import DType
from bottega.v1.cache_pb2 import CacheAnswer, CacheEntry


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedLatent:
    """A latent as it is stored and sent: its element type, shape and bytes."""

    dtype: DType
    shape: tuple[int, ...]
    """Channels, height, width."""
    data: bytes | memoryview
    """Its elements, row-major."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoreAnswer:
    """The response to a worker's query."""

    header: CacheAnswer
    latents: tuple[RecordedLatent, ...]
    """One latent for each of the header's hits, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EntryDetails:
    """The facts about an entry that are shown to users."""

    entry: CacheEntry
    picture: np.ndarray | None
    """uint8, [height, width, 3]; None if its file is gone or damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryPicture:
    """The picture of an entry, as RGB in a file."""

    height: int
    width: int
    digest: bytes
    """SHA-256 of its bytes."""

    @property
    def size_bytes(self) -> int:
        """Size of its file."""
        return self.height * self.width * 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A cached picture: the facts that all of its latents share."""

    number: int
    """Unique for the life of the store."""
    name: str
    """32 hex digits."""
    noise: int
    """Seed of the picture, which identifies its initial noise; a unique negative number if it is unknown."""
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
        """Size of each of its latents."""
        return math.prod(self.shape) * self.dtype.item_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptLatent:
    """A latent of an entry."""

    digest: bytes
    """SHA-256 of its bytes."""
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EntryRecord:
    """An entry in the records."""

    entry: Entry
    embedding: bytes
    """float32, as bytes."""
    parameters: bytes
    """A GenerationSpec, as bytes."""
    hits: int
    """How many pictures started from it."""
    latents: dict[int, KeptLatent]
    """By step."""
