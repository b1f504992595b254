"""From which similarity the cache bench lets latents be used: where its stream is hit as often as Nirvana's was.

The miniature's embeddings are not those of Nirvana's prompts, so its thresholds mean nothing here. What is kept of the
paper is how often which step is hit; the thresholds are the quantiles of the stream's own similarities that give that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]

NIRVANA_HITS: Mapping[float, float] = {0.1: 0.2849, 0.2: 0.2299, 0.3: 0.1855, 0.4: 0.1497, 0.5: 0.08}
"""Of all prompts, those that start after so much of the steps. Known of Nirvana (Table 3 and section 7.3) are that .93
start from a latent and save .23 of all steps, and .08 the largest part; the four others fall by one ratio, .807, which
these three fix."""

# An index may find a vector a little less similar to itself than 1.
_ROUNDING = 1e-5
_BISECTIONS = 14
_ROOM = 1024


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Nearest:
    """similarities: of each prompt to the most similar one that was recorded before it, -1 where there is none.

    recorded: how many were, as nothing similar enough was there.
    """

    similarities: NDArray[np.float32]
    recorded: int


def nearest_recorded(vectors: Vectors, least: float) -> Nearest:
    """Replays a stream without a budget: each prompt without a recorded one of at least this similarity is recorded.

    vectors: unit vectors [prompts, width].
    """
    kept, recorded = np.empty((_ROOM, vectors.shape[1]), np.float32), 0
    found = np.full(len(vectors), -1.0, np.float32)
    for number, vector in enumerate(vectors):
        if recorded:
            found[number] = (kept[:recorded] @ vector).max()
        if found[number] < least:
            if recorded == len(kept):
                kept = np.concatenate([kept, np.empty_like(kept)])
            kept[recorded] = vector
            recorded += 1
    return Nearest(similarities=found, recorded=recorded)


def thresholds(vectors: Vectors, hits: Mapping[float, float] = NIRVANA_HITS) -> dict[float, float]:
    """The least similarity by fraction of the steps, with which at least so many prompts are hit without a budget.

    What is recorded depends on the least of them alone: it is found by bisection, and the others are quantiles of the
    similarities to what is then recorded.
    """
    low, high = -1.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        enough = np.mean(nearest_recorded(vectors, middle).similarities >= middle) >= sum(hits.values())
        low, high = (middle, high) if enough else (low, middle)
    ordered = np.sort(nearest_recorded(vectors, low).similarities)[::-1]
    found = {min(hits): low}
    for fraction in sorted(hits)[1:]:
        count = sum(share for other, share in hits.items() if other >= fraction) * len(vectors)
        found[fraction] = max(low, float(ordered[max(int(np.ceil(count)) - 1, 0)]) - _ROUNDING)
    return found
