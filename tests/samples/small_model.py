"""A small random model of SDXL's shape, for what is seen with any weights, and sooner than with the miniature.

Mistakes move its latents far beyond the tolerance of the same image: with two residual blocks a level, at 64 x 64 and
after eight steps, another word of the prompt by 670 times it, Karras' sigmas by 690, guidance_rescale by 370, DDIM for
Euler by 200 times.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

from load.bench.bench_model import BenchShape, write_bench_model
from tests.support.shared_folders import written_once

# Width and height of its pictures where nothing else is said: half of the miniature's.
SIZE = 32

# The miniature's levels, with a third of its channels.
_SHAPE = BenchShape(
    block_out_channels=(16, 32),
    transformer_layers=(1,),
    head_channels=16,
    norm_groups=8,
    sample_size=8,
    latent_scale=4,
    vae_channels=8,
    text_width=32,
    dtype="float32",
)


@functools.cache
def small_model(*, layers_per_block: int = 1) -> Path:
    """Its folder.

    Args:
        layers_per_block: Residual blocks of a level; the miniature has 2.
    """
    shape = replace(_SHAPE, layers_per_block=layers_per_block)
    folder = written_once(f"small-{layers_per_block}", lambda folder: write_bench_model(folder / "small", shape))
    return folder / "small"
