"""A LoRA as the engine takes it: its layers in their canonical form."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

# Of a pipeline, in the order in which a LoRA's file has them: text first, because a prompt waits for it.
TEXT_ENCODERS = ("text_encoder", "text_encoder_2")
UNET = "unet"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoraLayer:
    """What one module gets: scale * up(down(x)).

    down: [rank, in] or, for a convolution, [rank, in, kernel, kernel]; up: [out, rank] or
    [out, rank, 1, 1]. scale: alpha / rank of this module.
    """

    down: Tensor
    up: Tensor
    scale: float


Layers = Mapping[str, LoraLayer]
"""Layers of one component, by module path below it."""


def has_mixed_alphas(layers: Layers) -> bool:
    """Return whether modules of one component have different alphas: scale times rank.

    Stock Diffusers takes the most frequent alpha for all of them where the file is kohya's.
    """
    alphas = [layer.scale * layer.down.shape[0] for layer in layers.values()]
    # Scales are kept in single precision.
    return any(not math.isclose(alpha, alphas[0], rel_tol=1e-5) for alpha in alphas)


def left_out_by_stock(component: str, layers: Layers) -> Iterator[str]:
    """Yield what of a component stock Diffusers' loader leaves out where the file is kohya's, by name.

    In Diffusers 0.42 no module gets what is called lora_unet_add_embedding_..., and a text encoder's attention is left
    out where the file has no out_proj of it.
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
    """A LoRA at a strength. digest: SHA-256 of its canonical file, hex. layers: by component."""

    digest: str
    scale: float
    layers: Mapping[str, Layers]
