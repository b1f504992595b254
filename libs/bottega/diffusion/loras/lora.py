"""The layers of a LoRA in canonical form."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

# Components of a pipeline in the order of a LoRA's file: text encoders first, because prompts wait for them.
TEXT_ENCODERS = ("text_encoder", "text_encoder_2")
UNET = "unet"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoraLayer:
    """The change of one module: scale * up(down(x))."""

    down: Tensor
    """[rank, in], or [rank, in, kernel, kernel] for a convolution."""
    up: Tensor
    """[out, rank], or [out, rank, 1, 1] for a convolution."""
    scale: float
    """alpha / rank."""


Layers = Mapping[str, LoraLayer]
"""Layers of one component, by module path below it."""


def has_mixed_alphas(layers: Layers) -> bool:
    """Return whether modules of one component have different alphas (scale times rank).

    From kohya's files, stock Diffusers takes the most frequent alpha for all modules.
    """
    alphas = [layer.scale * layer.down.shape[0] for layer in layers.values()]
    # The tolerance is needed because scales are stored in single precision.
    return any(not math.isclose(alpha, alphas[0], rel_tol=1e-5) for alpha in alphas)


def left_out_by_stock(component: str, layers: Layers) -> Iterator[str]:
    """Yield the names of parts of a component that stock Diffusers' loader ignores in kohya's files.

    Diffusers 0.42 ignores tensors named lora_unet_add_embedding_..., and a text encoder's attention without an
    out_proj.
    """
    if component == UNET:
        if any(path.startswith("add_embedding.") for path in layers):
            yield f"{component}.add_embedding"
        return
    attention = {path.rpartition(".")[2] for path in layers if ".self_attn." in path}
    if attention and "out_proj" not in attention:
        yield f"{component}.self_attn"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoraAtScale:
    """A LoRA at a strength."""

    digest: str
    """SHA-256 of its canonical file, in hex."""
    scale: float
    layers: Mapping[str, Layers]
    """Layers by component."""
