"""A small random model of SDXL's shape, for what is seen with any weights, and sooner than with the miniature.

Mistakes move its latents far beyond the tolerance of the same image: at 64 x 64, after eight steps, another word of the
prompt by 670 times it, Karras' sigmas by 690, guidance_rescale by 370, DDIM for Euler by 200 times.
"""

from __future__ import annotations

import atexit
import functools
import tempfile
from pathlib import Path

from load.bench.bench_model import BenchShape, write_bench_model

# Width and height of its pictures where nothing else is said: half of the miniature's.
SIZE = 32

# The miniature's levels and blocks, with a third of its channels.
_SHAPE = BenchShape(
    block_out_channels=(16, 32),
    transformer_layers=(1,),
    layers_per_block=1,
    head_channels=16,
    norm_groups=8,
    sample_size=8,
    latent_scale=4,
    vae_channels=8,
    text_width=32,
    dtype="float32",
)


@functools.cache
def small_model() -> Path:
    """Its folder, written once for this process and gone with it."""
    folder = tempfile.TemporaryDirectory(prefix="bottega-small-model-")
    atexit.register(folder.cleanup)
    write_bench_model(Path(folder.name) / "small", _SHAPE)
    return Path(folder.name) / "small"
