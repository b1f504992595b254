"""What indexes can do, however they do it: that of all entries by key, and that of one key's; and vectors as they want
them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]
"""[width], or [n, width]: of length 1, so that an inner product is a cosine."""

Numbers = NDArray[np.int64]
"""[n]: what the vectors are known by."""

MAX_COUNT = 64
"""Matches of one search; a job asks for eight pictures at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A vector that was found. similarity: cosine of it and the one that was searched, -1 to 1."""

    number: int
    similarity: float


class VectorIndex(Protocol):
    """Unit vectors of one width, by number. May be used by several threads."""

    def __len__(self) -> int:
        """Vectors in it."""
        ...

    def add(self, number: int, vector: Vectors) -> bool:
        """Takes in a vector, in the place of one with the same number. Whether there was none."""
        ...

    def remove(self, number: int) -> bool:
        """Takes a vector out: no search that begins later finds it. Whether it was there."""
        ...

    def search(self, vector: Vectors, count: int) -> list[Match]:
        """Up to so many of the most similar, the most similar first."""
        ...

    def vector(self, number: int) -> Vectors | None:
        """The vector with that number, if it is there."""
        ...

    def numbers(self) -> Numbers:
        """Of all vectors, in no order."""
        ...


class EntryIndex(Protocol):
    """Embeddings of entries, by key and number: what is found for one key was added under it. Any thread may call it.

    A vector is zero, not finite or not as wide as others of its key: ValueError.
    """

    def load(self, key: str, numbers: Numbers, vectors: NDArray[np.floating]) -> None:
        """Adds many at once. numbers: [n], each once. vectors: [n, width]."""
        ...

    def add(self, key: str, number: int, vector: NDArray[np.floating]) -> None:
        """Adds one, in the place of that number. Raises QueueFull where there are as many as may be."""
        ...

    def remove(self, key: str, number: int) -> bool:
        """No search that begins later finds it. Whether it was there."""
        ...

    def search(self, key: str, vector: NDArray[np.floating], count: int) -> list[Match]:
        """Up to so many of the key's entries, 1 to MAX_COUNT, the most similar first."""
        ...

    def similarity(self, key: str, number: int, vector: NDArray[np.floating]) -> float | None:
        """The cosine of a vector and that of an entry; None where there is no such entry."""
        ...

    def sample(self, key: str, count: int) -> Vectors:
        """Vectors of up to so many of the key's entries, any of them with the same chance."""
        ...

    def entries(self, key: str) -> int:
        """How many a key has."""
        ...

    def close(self) -> None:
        """Nothing more is taken in. May be called again."""
        ...


def unit_vectors(vectors: NDArray[np.floating]) -> Vectors:
    """The same directions with length 1, as a copy. Raises ValueError where there is none."""
    made = np.array(vectors, dtype=np.float32, order="C")
    lengths = np.linalg.norm(made, axis=-1, keepdims=True)
    if made.ndim not in {1, 2} or made.shape[-1] == 0 or not np.all(np.isfinite(lengths)) or not np.all(lengths > 0.0):
        raise ValueError("a vector is empty, zero or not finite")
    made /= lengths
    return made
