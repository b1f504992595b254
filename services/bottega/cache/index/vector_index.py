"""The interfaces of the index of all entries and of the index of one key, the format of vectors, and settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]
"""[width] or [n, width], scaled to length 1, so that an inner product is a cosine."""

Numbers = NDArray[np.int64]
"""[n]: the integer IDs of vectors."""

MAX_COUNT = 64
"""Upper bound on the matches of one search. A job asks for at most eight images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A vector that a search has found."""

    number: int
    similarity: float
    """Cosine of this vector and the query, from -1 to 1."""


class VectorIndex(Protocol):
    """Unit vectors of one width, identified by integers ("numbers"). Several threads may use it."""

    def __len__(self) -> int: ...

    def add(self, number: int, vector: Vectors) -> bool:
        """Add a vector, or replace the one with this number. Return whether the number is new."""
        ...

    def remove(self, number: int) -> bool:
        """Remove a vector, so that later searches do not find it. Return whether it existed."""
        ...

    def search(self, vector: Vectors, count: int) -> list[Match]:
        """Return up to `count` of the most similar vectors, the most similar first."""
        ...

    def vector(self, number: int) -> Vectors | None:
        """Return the vector with that number, or None."""
        ...

    def numbers(self) -> Numbers:
        """Return the numbers of all vectors, in any order."""
        ...


class EntryIndex(Protocol):
    """Embeddings of entries, by key and number. A search finds only entries of its key. Any thread may call it.

    All methods raise ValueError for a vector that is zero, not finite or of another width than the others of its key,
    and StorageUnavailable if the vectors are in a database that is away; `remove` and `sample` never do.
    """

    def load(self, key: str, numbers: Numbers, vectors: NDArray[np.floating]) -> None:
        """Add many entries.

        Args:
            numbers: [n], without duplicates.
            vectors: [n, width].
        """
        ...

    def loaded(self) -> None:
        """Finish loading, after all entries were added. Delete stored vectors of entries that were not loaded."""
        ...

    def add(self, key: str, number: int, vector: NDArray[np.floating]) -> None:
        """Add an entry, or replace the one with that number. Raises QueueFull if there are too many."""
        ...

    def remove(self, key: str, number: int) -> bool:
        """Remove an entry, so that later searches do not find it. Return whether it existed."""
        ...

    def search(self, key: str, vector: NDArray[np.floating], count: int) -> list[Match]:
        """Return up to `count` (1 to MAX_COUNT) of the key's entries, the most similar first."""
        ...

    def similarity(self, key: str, number: int, vector: NDArray[np.floating]) -> float | None:
        """Return the cosine of a vector and an entry's vector, or None if the entry does not exist."""
        ...

    def sample(self, key: str, count: int) -> Vectors:
        """Return the vectors of up to `count` random entries of the key, all equally likely."""
        ...

    def entries(self, key: str) -> int:
        """Return the number of entries of a key."""
        ...

    def probe(self) -> None:
        """Test that entries can be added. Raises StorageUnavailable if not."""
        ...

    def close(self) -> None:
        """Refuse new entries from now on. May be called again."""
        ...


def unit_vectors(vectors: NDArray[np.floating]) -> Vectors:
    """Return a copy of the vectors, scaled to length 1. Raises ValueError for a vector that is zero or not finite."""
    made = np.array(vectors, dtype=np.float32, order="C")
    lengths = np.linalg.norm(made, axis=-1, keepdims=True)
    if made.ndim not in {1, 2} or made.shape[-1] == 0 or not np.all(np.isfinite(lengths)) or not np.all(lengths > 0.0):
        raise ValueError("a vector is empty, zero or not finite")
    made /= lengths
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSettings:
    """Settings of the index of a key."""

    flat_entries: int = 10_000
    """Number of entries of a key from which on its searches compare sketches first, or use the device."""
    candidates: int = 256
    """Number of entries, plus ties, whose vectors are compared after the sketches.

    More candidates find the nearest entries more often, and take longer (`make bench-index`).
    """
    make_device_index: Callable[[int], Any] | None = None
    """Makes the FAISS index, for vectors of a width, in which a key with many entries is; None for sketches."""
