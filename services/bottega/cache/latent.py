"""Values of the cache: latents received from and sent to workers, and entries with their latents."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from bottega.cache.eviction import Usage
from bottega.transport import DType
from bottega.v1.cache_pb2 import CacheAnswer, CacheEntry


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedLatent:
    """A latent in the form in which it is stored and sent: data type, shape and bytes."""

    dtype: DType
    shape: tuple[int, ...]
    """Channels, height, width."""
    data: bytes | memoryview
    """Its elements in row-major order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoreAnswer:
    """The answer to a worker's question."""

    header: CacheAnswer
    latents: tuple[RecordedLatent, ...]
    """The latent of each hit in the header, in the same order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EntryDetails:
    """The data of an entry that is shown to users."""

    entry: CacheEntry
    picture: np.ndarray | None
    """uint8, [height, width, 3]; None if its file is missing or damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryPicture:
    """The small picture of an entry, stored as RGB bytes in a file."""

    height: int
    width: int
    digest: bytes
    """SHA-256 of its bytes."""

    @property
    def size_bytes(self) -> int:
        """Bytes of its file."""
        return self.height * self.width * 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A cached image: the properties that all of its latents have in common."""

    number: int
    """Integer ID, unique in the store."""
    name: str
    """Public name: 32 hex digits."""
    noise: int
    """Seed of the image, which identifies its initial noise; a unique negative number if it is unknown."""
    key: str
    model_hash: str
    dtype: DType
    """Data type of its latents."""
    shape: tuple[int, ...]
    """Shape of each latent: [channels, height, width]."""
    picture: EntryPicture
    recorded_s: float
    """Time of the recording, in Unix seconds."""

    @property
    def latent_bytes(self) -> int:
        """Bytes of each of its latents."""
        return math.prod(self.shape) * self.dtype.item_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptLatent:
    """A stored latent of an entry, without its data."""

    digest: bytes
    """SHA-256 of its bytes."""
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EntryRecord:
    """An entry as it is stored in the records."""

    entry: Entry
    embedding: bytes
    """Embedding of its prompt: float32, as bytes."""
    parameters: bytes
    """Serialized GenerationSpec of its image."""
    hits: int
    """Number of images that started from it."""
    latents: dict[int, KeptLatent]
    """Its latents, by the number of steps after which they were recorded."""
