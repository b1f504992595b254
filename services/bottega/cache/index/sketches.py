"""Sketches of vectors: on which side of some hundred random planes through the middle of a key's vectors each lies.

The share of planes between two vectors is the angle between them, nearly: over 256 planes the share of a pair with a
cosine of .96 is .09, give or take .02, and that of two prompts of one topic (.55) .31. Source: Charikar, STOC 2002.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from bottega.cache.index.vector_index import Vectors

Codes = NDArray[np.uint8]
"""[n, CODE_BYTES]: a bit for each plane."""

_PLANES = 256
CODE_BYTES = _PLANES // 8
# Of a code, what all are compared by; the rest is compared of those that differ least.
FIRST_BYTES = CODE_BYTES // 2


class Sketcher:
    """Makes sketches of vectors that have so many numbers. centre: [width], through which the planes go.

    Prompts lie in a narrow cone: planes through the origin would have most of them on one side.
    """

    def __init__(self, centre: Vectors) -> None:
        self._planes = _planes(len(centre))
        self._offsets = centre @ self._planes

    def codes(self, vectors: Vectors) -> Codes:
        """Of [n, width]."""
        return np.packbits(vectors @ self._planes > self._offsets, axis=1)


@functools.lru_cache(maxsize=8)
def _planes(width: int) -> NDArray[np.float32]:
    """The planes' normals: [width, planes], the same for all keys."""
    return np.random.default_rng(width).standard_normal((width, _PLANES), dtype=np.float32)
