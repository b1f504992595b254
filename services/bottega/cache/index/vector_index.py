"""What an index of vectors can do, however it does it; and the vectors as it wants them."""

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


def unit_vectors(vectors: NDArray[np.floating]) -> Vectors:
    """The same directions with length 1, as a copy. Raises ValueError where there is none."""
    made = np.array(vectors, dtype=np.float32, order="C")
    lengths = np.linalg.norm(made, axis=-1, keepdims=True)
    if made.ndim not in {1, 2} or made.shape[-1] == 0 or not np.all(np.isfinite(lengths)) or not np.all(lengths > 0.0):
        raise ValueError("a vector is empty, zero or not finite")
    made /= lengths
    return made
