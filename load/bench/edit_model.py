"""The model of the benches of edits, the pictures that are edited, and their masks."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import numpy.typing as npt
import PIL.Image

from load.bench.bench_model import BenchShape
from load.bench.transformer_model import TransformerShape

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
# Stable Diffusion 2.1's, as small: its finest level has transformers too, whose tokens are single latent elements.
SD21_EDIT_SHAPE = BenchShape(
    family="sd21",
    block_out_channels=(80, 160, 320, 320),
    transformer_layers=(1, 1, 1),
    head_channels=32,
    norm_groups=16,
    sample_size=64,
    text_width=256,
)
# Stable Diffusion 3 medium's true width at 1,024 tokens, and four of its 24 blocks.
SD3_EDIT_SHAPE = TransformerShape(heads=24, blocks=4, sample_size=64)
# Flux.1's true width at as many tokens, and three of its 57 blocks.
FLUX_EDIT_SHAPE = TransformerShape(heads=24, blocks=1, single_blocks=2, sample_size=64)
SIZE = EDIT_SHAPE.side
"""Pixels a side of a picture."""
TOKEN = 2 * EDIT_SHAPE.latent_scale
"""Pixels a side of a token of the finest attention level, or of a transformer."""
SD21_TOKEN = SD21_EDIT_SHAPE.latent_scale
"""Pixels a side of such a token in Stable Diffusion 2.1."""
# Corners of squares lie on multiples of so many pixels, the side of a token of SDXL's coarsest level.
_CORNER = 2 * TOKEN
MARGIN = 1
"""Tokens around a mask that are computed with it, as in an engine by default."""
RATIOS = (0.01, 0.05, 0.11, 0.19, 0.35, 0.6)
"""Shares of the tokens of the finest attention level that are computed."""


def square_side(share: float, token: int = TOKEN) -> int:
    """Return the tokens a side of the square that is nearest to a share of all, and has a token inside its margin."""
    return max(round(SIZE // token * math.sqrt(share)), 2 * MARGIN + 1)


def square_box(share: float, token: int = TOKEN) -> tuple[int, int, int, int]:
    """Return left, top, width and height in pixels of a square in the middle that has this share with its margin.

    Its corner lies on a corner of the coarsest level's tokens: a square across them would have more of those.
    """
    side, corner = square_side(share, token), _CORNER // token
    first = (SIZE // token - side) // (2 * corner) * corner
    return _box(side, first, first, token)


def square_mask(share: float, token: int = TOKEN) -> npt.NDArray[np.uint8]:
    """Return a mask [SIZE, SIZE], 255 in that square."""
    return _mask(square_box(share, token))


def placed_mask(share: float, chance: random.Random) -> npt.NDArray[np.uint8]:
    """Return a mask of the same square anywhere, its corner on a corner of the coarsest level's tokens."""
    side = min(square_side(share), SIZE // TOKEN)
    places = range(0, SIZE // TOKEN - side + 1, 2)
    return _mask(_box(side, chance.choice(places), chance.choice(places)))


def template(number: int = 0) -> PIL.Image.Image:
    """Return a picture to edit: noise, as nobody looks at it."""
    pixels = np.random.default_rng(number).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
    return PIL.Image.fromarray(pixels)


def write_template(folder: Path, number: int = 0) -> str:
    """Write it, and return the file."""
    file = folder / f"template-{number}.png"
    template(number).save(file)
    return str(file)


def _box(side: int, top: int, left: int, token: int = TOKEN) -> tuple[int, int, int, int]:
    """Return the box inside the margin of a square, which is given in tokens."""
    inner = (side - 2 * MARGIN) * token
    return (left + MARGIN) * token, (top + MARGIN) * token, inner, inner


def _mask(box: tuple[int, int, int, int]) -> npt.NDArray[np.uint8]:
    left, top, width, height = box
    mask = np.zeros((SIZE, SIZE), np.uint8)
    mask[top : top + height, left : left + width] = 255
    return mask
