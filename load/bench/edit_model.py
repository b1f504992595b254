"""The model of the benches of edits, and their masks."""

from __future__ import annotations

import math
import random

import numpy as np
import numpy.typing as npt

from load.bench.bench_model import BenchShape

# SDXL's topology at a quarter of its width, at 64x64 latents. Its transformers take .8 of a step, so that masked blocks
# and sparse convolutions each gain what they would of a large model.
EDIT_SHAPE = BenchShape(
    block_out_channels=(80, 160, 320),
    transformer_layers=(2, 10),
    head_channels=32,
    norm_groups=16,
    sample_size=64,
    text_width=256,
)
# Pixels a side, and those of a token of the finest attention level.
SIZE = EDIT_SHAPE.sample_size * EDIT_SHAPE.latent_scale
TOKEN = 2 * EDIT_SHAPE.latent_scale
# Tokens around a mask that are computed with it, as in an engine that is not told otherwise.
MARGIN = 1
# Shares of the tokens of the finest attention level that are computed.
RATIOS = (0.01, 0.05, 0.11, 0.19, 0.35, 0.6)


def square_side(share: float) -> int:
    """Tokens a side of the square that is nearest to this share of all of them, and has one inside its margin."""
    return max(round(SIZE // TOKEN * math.sqrt(share)), 2 * MARGIN + 1)


def square_share(share: float) -> float:
    """The share that the square really has."""
    return (square_side(share) * TOKEN / SIZE) ** 2


def square_mask(share: float) -> npt.NDArray[np.uint8]:
    """A mask [SIZE, SIZE], 255 where it is edited: a square that has this share of the tokens with its margin.

    It lies in the middle, with a corner on a corner of the coarsest level's tokens, which are twice as large: a square
    across them would have more of those.
    """
    side = square_side(share)
    first = (SIZE // TOKEN - side) // 4 * 2
    return _square(side, first, first)


def placed_mask(share: float, chance: random.Random) -> npt.NDArray[np.uint8]:
    """The same square anywhere in the picture, its corner on a corner of the coarsest level's tokens."""
    side = min(square_side(share), SIZE // TOKEN)
    places = range(0, SIZE // TOKEN - side + 1, 2)
    return _square(side, chance.choice(places), chance.choice(places))


def _square(side: int, top: int, left: int) -> npt.NDArray[np.uint8]:
    """All in tokens, margin included."""
    rows, columns = (slice((first + MARGIN) * TOKEN, (first + side - MARGIN) * TOKEN) for first in (top, left))
    mask = np.zeros((SIZE, SIZE), np.uint8)
    mask[rows, columns] = 255
    return mask
