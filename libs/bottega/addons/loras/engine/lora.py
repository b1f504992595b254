"""A LoRA's layers in canonical form, what they add to a weight, and the interface of a source of LoRAs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from diffusers.loaders import FluxLoraLoaderMixin, ZImageLoraLoaderMixin
from torch import Tensor, nn
from torch.nn import functional

from bottega.addons.loras.wire.module_parts import (
    BIAS,
    DENOISERS,
    DORA_SCALE,
    DOWN,
    DOWN2,
    FULL,
    KRON,
    MAGNITUDE,
    NORM,
    SCALE,
    UP,
    UP2,
    VECTORS,
    is_low_rank,
)
from bottega.engine.spans import StoreWork
from bottega.model.rows import Difference
from bottega.v1.fleet_pb2 import ServiceAddress

# Loaders of stock Diffusers that keep each alpha of kohya's files. The values are modules outside of blocks that these
# loaders ignore in such files.
_OWN_ALPHAS = {
    FluxLoraLoaderMixin: ("x_embedder", "context_embedder", "time_text_embed", "norm_out", "proj_out"),
    ZImageLoraLoaderMixin: ("all_x_embedder", "all_final_layer"),
}
# Modules that the loaders of all other models ignore in kohya's files.
_OTHERS_IGNORE = ("add_embedding",)
NORMS = (nn.LayerNorm, nn.GroupNorm)
"""Normalisation layers, whose output is linear in their weight and bias."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoraLayer:
    """The change of one module: scale * up(down(x))."""

    down: Tensor
    """Weight of the first product: [rank, in], or [rank, in, kernel, kernel] for a convolution."""
    up: Tensor
    """Weight of the second product: [out, rank], or [out, rank, 1, 1] for a convolution."""
    scale: float
    """Factor of the product: alpha / rank."""
    bias: Tensor | None = None
    """Added to the module's bias, [out]; None if the bias does not change."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WholeLayer:
    """The change of one module that has no low-rank form."""

    parts: Mapping[str, Tensor]
    """Its tensors by their names in the canonical file, without the scale."""
    scale: float
    """Factor of the change, without that of a request."""

    @property
    def vectors(self) -> Tensor | None:
        """Vectors of a token, [vectors, features]; None unless it belongs to an embedding."""
        return self.parts.get(VECTORS)


Layers = Mapping[str, LoraLayer | WholeLayer]
"""Layers of one component, by the path of the module in it."""


def make_layer(parts: Mapping[str, Tensor], scale: float) -> LoraLayer | WholeLayer:
    """Return the layer with these tensors of a canonical file, which are all but the scale."""
    if is_low_rank({SCALE, *parts}):
        return LoraLayer(down=parts[DOWN], up=parts[UP], scale=scale, bias=parts.get(BIAS))
    return WholeLayer(parts=parts, scale=scale)


def stock_merges_alphas(pipeline: Any, layers: Layers) -> bool:
    """Return whether stock Diffusers would replace different alphas of a component's modules by one alpha.

    For kohya's files, Diffusers uses the most frequent alpha (scale times rank), except with Flux.1 and Z-Image.

    Args:
        pipeline: The pipeline of the model's family.
        layers: The component's layers.
    """
    if issubclass(pipeline, tuple(_OWN_ALPHAS)):
        return False
    alphas = [layer.scale * layer.down.shape[0] for layer in layers.values() if isinstance(layer, LoraLayer)]
    # The tolerance is needed because scales are stored in single precision.
    return any(not math.isclose(alpha, alphas[0], rel_tol=1e-5) for alpha in alphas)


def is_only_low_rank(layers: Layers) -> bool:
    """Return whether all layers of a component have low-rank factors and nothing else."""
    return all(isinstance(layer, LoraLayer) and layer.bias is None for layer in layers.values())


def left_out_by_stock(pipeline: Any, component: str, layers: Layers) -> Iterator[str]:
    """Yield the names of modules of a component that stock Diffusers' loader ignores in kohya's files.

    Diffusers 0.42 ignores tensors named lora_unet_add_embedding_..., layers of Flux.1 outside of blocks, the first and
    the last layer of Z-Image, and a text encoder's attention without an out_proj. It ignores T5 in files of all kinds.

    Args:
        pipeline: The pipeline of the model's family.
        component: Name of the component.
        layers: The component's layers.
    """
    if layers and component not in pipeline._lora_loadable_modules:
        yield component
    if component in DENOISERS:
        outside = next((names for loader, names in _OWN_ALPHAS.items() if issubclass(pipeline, loader)), _OTHERS_IGNORE)
        changed = {path.partition(".")[0] for path in layers}
        yield from (f"{component}.{name}" for name in outside if name in changed)
        return
    attention = {path.rpartition(".")[2] for path in layers if ".self_attn." in path}
    if attention and "out_proj" not in attention:
        yield f"{component}.self_attn"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoraAtScale:
    """A LoRA's layers, with the scale at which they are used."""

    digest: str
    """SHA-256 of the LoRA's canonical file, in hex."""
    scale: float
    layers: Mapping[str, Layers]
    """Layers by component."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraRef:
    """The name and digest of a LoRA in a store."""

    name: str
    """Name in the store, for messages."""
    digest: str
    """SHA-256 of the LoRA's canonical file, in hex."""


class LoraHandle(Protocol):
    """A LoRA that has been requested. Its properties raise a BottegaError if the LoRA cannot be loaded."""

    @property
    def text_ready(self) -> bool:
        """Whether the layers of the text encoders have arrived. They are sent first."""
        ...

    @property
    def ready(self) -> bool:
        """Whether all layers have arrived."""
        ...

    @property
    def load_s(self) -> float:
        """Seconds from `begin` until all layers arrived, or until now."""
        ...

    @property
    def work(self) -> StoreWork | None:
        """Time that the store spent on sending the LoRA, perhaps for an earlier job; None if it was in memory."""
        ...

    @property
    def ignored(self) -> int:
        """Number of layers of the LoRA's file that were left out when it was added; 0 before it has arrived."""
        ...

    def layers(self, component: str) -> Layers:
        """Return the layers of one component. A denoiser's need `ready`, those of text encoders `text_ready`.

        They may be read until the handle is closed. They should be on the model's device, in its element type.
        """
        ...


class LoraSource(Protocol):
    """A source of LoRAs. All calls come from the engine's thread, and only `settle` blocks."""

    def set_stores(self, stores: Sequence[ServiceAddress]) -> None:
        """Set the present stores, best first. While there is none, requests wait for one."""
        ...

    def begin(self, ref: LoraRef) -> LoraHandle:
        """Request a LoRA and return its handle; it is loaded in the background. The handle reports failures."""
        ...

    def settle(self, handles: Sequence[LoraHandle], timeout_s: float) -> None:
        """Wait until more of one of these LoRAs has arrived or one has failed, or until the time-out."""
        ...

    def close(self, handles: Sequence[LoraHandle]) -> None:
        """Release handles, whether or not they are ready. Releasing one twice does nothing."""
        ...


def weight_difference(layer: WholeLayer, strength: float, weight: Tensor) -> Tensor | None:
    """Return what a layer adds to a module's weight, in float32; None if it changes only the bias.

    Everything is computed in single precision, and rounded once.

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
    if NORM in parts:
        change = parts[NORM]
    elif FULL in parts:
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


def add_difference(module: nn.Module, x: Tensor, output: Tensor, difference: Difference) -> None:
    """Add the product of a module's input `x` and a whole difference of its weights to `output`, in place."""
    weight, bias = difference.weight, difference.bias
    if isinstance(module, nn.Conv2d):
        if weight is not None:
            output += functional.conv2d(x, weight, bias, module.stride, module.padding, module.dilation)
        elif bias is not None:
            output += bias[:, None, None]
    elif isinstance(module, nn.GroupNorm) and weight is not None:
        output += functional.group_norm(x, module.num_groups, weight, bias, module.eps)
    elif isinstance(module, nn.GroupNorm) and bias is not None:
        output += bias.view(-1, *[1] * (output.ndim - 2))
    elif isinstance(module, nn.LayerNorm) and weight is not None:
        output += functional.layer_norm(x, module.normalized_shape, weight, bias, module.eps)
    elif weight is not None:
        output += functional.linear(x, weight, bias)
    elif bias is not None:
        output += bias


def low_rank_product(module: nn.Module, x: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """Return the product of a module's input `x` and low-rank factors, as PEFT computes it."""
    if not isinstance(module, nn.Conv2d):
        # One product over all tokens: for input that is not contiguous, torch chooses it for weights that require
        # gradients, as PEFT's do, and else a batched product that rounds differently.
        flat = functional.linear(functional.linear(x.reshape(-1, x.shape[-1]), down), up)
        return flat.view(*x.shape[:-1], up.shape[0])
    low = functional.conv2d(x, down, None, module.stride, module.padding, module.dilation)
    return functional.conv2d(low, up[:, :, None, None])
