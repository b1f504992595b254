"""Computes what LoRAs without a low-rank form add to a weight: LoHa, LoKr, whole differences and DoRA.

Everything is computed in single precision, and rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bottega.addons.loras.engine.lora import WholeLayer
from bottega.addons.loras.wire.canonical import DORA_SCALE, DOWN, DOWN2, FULL, KRON, MAGNITUDE, UP, UP2


def weight_difference(layer: WholeLayer, strength: float, weight: Tensor) -> Tensor | None:
    """Return what a layer adds to a module's weight, in float32; None if it changes only the bias.

    PEFT scales the low-rank change before the weight is normalised. LyCORIS scales the difference of the normalised
    weight.

    Args:
        layer: The layer.
        strength: Scale of the LoRA in the request.
        weight: The module's weight without any LoRA.

    Source: PEFT's DoraLinearLayer and _DoraConvNdLayer; LyCORIS' apply_dora_scale.
    """
    change = _change(layer)
    if change is None:
        return None
    if MAGNITUDE in layer.parts:
        before = weight.float()
        return _normalised(before + strength * change, layer.parts[MAGNITUDE]) - before
    if DORA_SCALE in layer.parts:
        before = weight.float()
        return strength * (_normalised(before + change, layer.parts[DORA_SCALE]) - before)
    return strength * change


def _change(layer: WholeLayer) -> Tensor | None:
    """Return the change of the weight without its normalisation.

    Source: LyCORIS' functional.loha and functional.lokr.
    """
    parts = {name: tensor.float() for name, tensor in layer.parts.items()}
    if FULL in parts:
        change = parts[FULL]
    elif DOWN in parts:
        change = _product(parts[DOWN], parts[UP])
    else:
        return None
    if DOWN2 in parts:
        change = change * _product(parts[DOWN2], parts[UP2])
    if KRON in parts:
        first = parts[KRON]
        change = torch.kron(first.reshape(*first.shape, *[1] * (change.ndim - 2)), change)
    return layer.scale * change


def _product(down: Tensor, up: Tensor) -> Tensor:
    product: Tensor = up.flatten(1) @ down.flatten(1)
    return product.view(up.shape[0], *down.shape[1:])


def _normalised(weight: Tensor, norms: Tensor) -> Tensor:
    """Return a weight scaled so that it has these norms, which have one element in each normalised dimension."""
    norms = norms.float()
    dims = [dim for dim in range(weight.ndim) if norms.shape[dim] == 1]
    present: Tensor = torch.linalg.vector_norm(weight, dim=dims, keepdim=True)
    return weight * (norms / present.clamp(min=torch.finfo(torch.float32).tiny))
