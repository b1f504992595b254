"""Tiny random ControlNets for the models of Flux.1."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers import FluxControlNetModel
from torch import Tensor, nn

FLUX_SHAPE: Mapping[str, Any] = {
    "in_channels": 64,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "joint_attention_dim": 96,
    "pooled_projection_dim": 32,
    "axes_dims_rope": (2, 2, 4),
}
"""Options of the transformers, except Flux.1 Fill, and of their ControlNets."""


def flux_controlnet(**options: Any) -> Any:
    """Return a random FluxControlNetModel for these models, without zero layers."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`FluxPosEmbed` is deprecated", FutureWarning)  # Diffusers uses it itself.
        network = FluxControlNetModel(**{**FLUX_SHAPE, "num_layers": 2, "num_single_layers": 1, **options})
    for layer in (*network.controlnet_blocks, *network.controlnet_single_blocks, network.controlnet_x_embedder):
        nn.init.normal_(layer.weight, std=0.2)
    return network.eval()


def spread(network: Any, joint: int, single: int) -> Any:
    """Return a ControlNet that makes a residual for each block of a model with so many blocks, with zeros elsewhere.

    When Diffusers combines several ControlNets, it truncates their residual lists to the shortest one, and it passes
    the guidance scale to all of them if the first one reads it. This wrapper therefore makes every list complete, and
    drops the guidance scale if the network does not read it.
    """
    spreading, forward = copy.deepcopy(network), network.forward

    def each(made: Sequence[Tensor] | None, other: Sequence[Tensor] | None, count: int) -> list[Tensor]:
        if made is None:
            return [torch.zeros_like((other or ())[0])] * count
        return [made[place // math.ceil(count / len(made))] for place in range(count)]

    def forward_each(*, guidance: Tensor | None, **arguments: Any) -> tuple[list[Tensor], list[Tensor]]:
        doubles, singles = forward(guidance=guidance if network.config.guidance_embeds else None, **arguments)
        return each(doubles, singles, joint), each(singles, doubles, single)

    spreading.forward = forward_each
    return spreading
