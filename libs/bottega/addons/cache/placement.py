"""The placement of entries in several caches: which part of the entries a prompt belongs to.

The exact key alone is not enough, because most requests of a service may share one: its other caches would be idle. So
the entries of a key are divided into cells of similar prompts. All workers find the same cell without any agreement,
and a prompt and its variations nearly always share one, so a lookup asks one cache.
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np
from numpy.typing import NDArray

CELLS = 16
"""Number of cells of a key.

More cells are spread more evenly over caches, and separate more similar prompts. Three caches with room for 150 latents
each save .183 of all steps of a stream of prompts with one key, one cache with room for 450 saves .185, and three that
share the entries by the exact key alone save .117 (`make bench-cache`).

Embeddings that lie in a cone make shares unequal: of random ones under one key (width 768), the largest of three /
eight caches has .43 / .25 if the mean cosine of two is 0, .63 / .57 at .6, and .74 / .72 at .8. With 256 cells it has
.54 / .36 at .6, but only 72 % of pairs with cosine .98 share a cell, not 82 %.
"""


def placement_key(key: str, embedding: NDArray[np.float32]) -> str:
    """Return the key by which caches are ranked: the exact key, and the cell of the embedding.

    Args:
        key: Exact key of the request without its LoRAs if it has one, because LoRAs may use entries of that, too.
        embedding: Embedding of the prompt, [width].
    """
    return f"{key}/{cell_of(embedding)}"


def cell_of(embedding: NDArray[np.float32]) -> int:
    """Return the cell of an embedding: the fixed random direction with the greatest inner product.

    Source: Andoni et al., NIPS 2015 (cross-polytope hashing), with fewer directions than dimensions.
    """
    return int(np.argmax(_directions(embedding.size) @ embedding))


@functools.lru_cache(maxsize=8)
def _directions(width: int) -> NDArray[np.float32]:
    """Return the directions, [CELLS, width], elements 1 or -1: bits of a hash, the same in every version of NumPy."""
    bits = hashlib.shake_256(f"cells of {width}".encode()).digest(CELLS * -(-width // 8))
    rows = np.unpackbits(np.frombuffer(bits, np.uint8)).reshape(CELLS, -1)[:, :width]
    return 2 * rows.astype(np.float32) - 1
