"""Sketches of vectors: on which side of random planes through the centre of a key's vectors each vector lies.

The share of planes between two vectors is approximately the angle between them. Over 256 planes, the share of a pair
with a cosine of .96 is .09, give or take .02, and that of two prompts of one topic (.55) is .31. Source: Charikar, STOC
2002.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from bottega.cache.index.vector_index import Vectors

Codes = NDArray[np.uint8]
"""[n, CODE_BYTES]: one bit for each plane."""

_PLANES = 256
CODE_BYTES = _PLANES // 8
# The part of a code that is compared for all vectors. The rest is compared only for the nearest ones.
FIRST_BYTES = CODE_BYTES // 2


class Sketcher:
    """Makes sketches of vectors.

    Prompts lie in a narrow cone: most of them would lie on one side of planes through the origin.

    Args:
        centre: [width], the point through which the planes go.
    """

    def __init__(self, centre: Vectors) -> None:
        self._planes = _planes(len(centre))
        self._offsets = centre @ self._planes

    def codes(self, vectors: Vectors) -> Codes:
        """Return the codes of vectors [n, width]."""
        return np.packbits(vectors @ self._planes > self._offsets, axis=1)


@functools.lru_cache(maxsize=8)
def _planes(width: int) -> NDArray[np.float32]:
    """Return the planes' normals: [width, planes], the same for all keys."""
    return np.random.default_rng(width).standard_normal((width, _PLANES), dtype=np.float32)
