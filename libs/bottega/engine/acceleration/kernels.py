"""Accelerations that use the package `bottega.kernels`, which is imported only when one of them is enabled.

GroupNorm with SiLU, in residual blocks, and GEGLU, in feed-forward layers, replace layers. The others replace functions
in a model's `Operations`.

The forward pass of a residual block is reimplemented here, because its norm and its activation are two modules, and the
activation is also applied to the time embedding. Source: ResnetBlock2D of Diffusers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import torch
from diffusers.models.activations import GEGLU
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import Tensor, nn
from torch.nn import functional

from bottega.engine.acceleration.acceleration import Forwards
from bottega.model.model import Model
from bottega.model.operations import EulerStep, Operations, WeightSum, as_matrix, down_matrix

if TYPE_CHECKING:
    from bottega.kernels.lora_patch import PatchedLayer


# Triton supports Volta and newer. Older devices lack the half-precision tensor cores that it uses.
_LEAST_CAPABILITY = (7, 0)
_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})


def unavailable(model: Model) -> str:
    """Return why kernels cannot run, as one sentence; "" if they can."""
    if model.device.type != "cuda":
        return f"kernels need a CUDA device, and the model is on {model.device.type}"
    if find_spec("triton") is None:
        return "triton is not installed"
    if find_spec("bottega.kernels") is None:
        return "bottega-kernels is not installed"
    capability = torch.cuda.get_device_capability(model.device)
    if capability < _LEAST_CAPABILITY:
        return f"the device has compute capability {capability[0]}.{capability[1]}, and kernels need 7.0"
    if model.dtype not in _DTYPES:
        return f"kernels do not support {model.dtype_name}"
    return ""


_Norm = Callable[..., Tensor]


class GroupNormSilu:
    """Computes GroupNorm and SiLU by one kernel, in the denoising network or in the VAE's decoder."""

    tolerance = 0.02
    """In half precision, the plain path rounds between norm and activation, at some thirty consecutive places.

    In bfloat16 that is a hundredth of the largest value.
    """
    excludes: Sequence[str] = ()

    def __init__(self, part: Literal["unet", "vae"]) -> None:
        self.name = "kernels.group_norm_silu" if part == "unet" else "kernels.group_norm_silu.vae"
        self.probe = "forward" if part == "unet" else "decode"
        self._part = part
        self._forwards = Forwards()

    def unsupported(self, model: Model) -> str:
        found = next(_resnets(self._network(model)), None)
        return unavailable(model) or ("" if found is not None else "the network has no residual block of a known kind")

    def enable(self, model: Model) -> None:
        from bottega.kernels.group_norm_silu import group_norm_silu

        network = self._network(model)
        for resnet in _resnets(network):
            self._forwards.replace(resnet, _resnet_forward(resnet, group_norm_silu))
        for norm in _norms(network):
            self._forwards.replace(norm, _norm_forward(norm, group_norm_silu))

    def disable(self) -> None:
        self._forwards.restore()

    def _network(self, model: Model) -> nn.Module:
        network: nn.Module = model.backbone.network if self._part == "unet" else model.vae.decoder
        return network


def _resnets(network: nn.Module) -> Iterator[ResnetBlock2D]:
    for module in network.modules():
        if type(module) is ResnetBlock2D and _is_plain(module):
            yield module


def _is_plain(resnet: Any) -> bool:
    sized = resnet.upsample is not None or resnet.downsample is not None
    known = _known(resnet.norm1) and _known(resnet.norm2) and isinstance(resnet.nonlinearity, nn.SiLU)
    return known and resnet.time_embedding_norm == "default" and not sized


def _norms(network: nn.Module) -> Iterator[nn.GroupNorm]:
    """Yield the norms before transformers and before the last convolution, without the activation that follows.

    Sparse feature maps call that activation separately.
    """
    norms: list[Any] = [module.norm for module in network.modules() if type(module) is Transformer2DModel]
    for norm in (*norms, getattr(network, "conv_norm_out", None)):
        if _known(norm):
            yield norm


def _known(norm: Any) -> bool:
    return type(norm) is nn.GroupNorm and norm.affine


def _resnet_forward(resnet: ResnetBlock2D, norm_silu: _Norm) -> Callable[..., Tensor]:
    def forward(input_tensor: Tensor, temb: Tensor | None = None) -> Tensor:
        hidden = resnet.conv1(_normed(resnet.norm1, input_tensor, norm_silu, activate=True))
        if resnet.time_emb_proj is not None and temb is not None:
            embedding = temb if resnet.skip_time_act else resnet.nonlinearity(temb)
            hidden = hidden + resnet.time_emb_proj(embedding)[:, :, None, None]
        hidden = resnet.conv2(_normed(resnet.norm2, hidden, norm_silu, activate=True))
        if resnet.conv_shortcut is not None:
            input_tensor = resnet.conv_shortcut(input_tensor)
        total: Tensor = (input_tensor + hidden) / resnet.output_scale_factor
        return total

    return forward


def _norm_forward(norm: nn.GroupNorm, norm_silu: _Norm) -> Callable[..., Tensor]:
    def forward(x: Tensor) -> Tensor:
        return _normed(norm, x, norm_silu, activate=False)

    return forward


def _normed(norm: Any, x: Tensor, norm_silu: _Norm, *, activate: bool) -> Tensor:
    if activate and norm._forward_hooks:  # LoRAs beside the weights change what is activated
        return functional.silu(norm(x))
    return norm_silu(x, norm.weight, norm.bias, groups=norm.num_groups, eps=norm.eps, activate=activate)


class Geglu:
    """Computes GEGLU, the gate of feed-forward layers, by a kernel."""

    name = "kernels.geglu"
    probe = "forward"
    tolerance = 0.02
    """The plain path rounds GELU before it multiplies, in each of seventy consecutive blocks."""
    excludes: Sequence[str] = ()

    def __init__(self) -> None:
        self._forwards = Forwards()

    def unsupported(self, model: Model) -> str:
        known = any(type(module) is GEGLU for module in model.backbone.network.modules())
        return unavailable(model) or ("" if known else "the network has no GEGLU")

    def enable(self, model: Model) -> None:
        from bottega.kernels.geglu import geglu

        for module in model.backbone.network.modules():
            if type(module) is GEGLU:
                self._forwards.replace(module, _forward(module, geglu))

    def disable(self) -> None:
        self._forwards.restore()


def _forward(module: GEGLU, geglu: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def forward(hidden_states: Tensor) -> Tensor:
        return geglu(module.proj(hidden_states))

    return forward


# Enough for some tens of running edits, with one entry for each level of the network and kind of layer.
_KNOWN_CORNERS = 1024


class _KernelOperation:
    """Makes a model compute one of its operations by kernels.

    Args:
        slot: Field of Operations that holds the operation.
        modules: Modules of bottega.kernels that the operation uses.
        operation: The replacement.
    """

    excludes: Sequence[str] = ()

    def __init__(self, slot: str, modules: Sequence[str], operation: object) -> None:
        self._slot = slot
        self._modules = modules
        self._operation = operation
        self._operations: Operations | None = None

    def unsupported(self, model: Model) -> str:
        return unavailable(model)

    def enable(self, model: Model) -> None:
        for module in self._modules:  # errors must show here, and not in the first job
            import_module(f"bottega.kernels.{module}")
        self._operations = model.operations
        setattr(model.operations, self._slot, self._operation)

    def disable(self) -> None:
        if self._operations is not None:
            setattr(self._operations, self._slot, None)
        self._operations = None


class MaskedMoves(_KernelOperation):
    """Moves tokens and tiles of partly computed images by kernels."""

    name = "kernels.masked_moves"
    probe = "masked"
    tolerance = 0.0
    """Values are only moved, and recorded ones are rounded as in plain torch."""

    def __init__(self) -> None:
        super().__init__("moves", ("tile_moves", "token_moves"), KernelMoves())


class KernelMoves:
    """Implements `operations.Moves` with kernels."""

    def pack(self, whole: Tensor, index: Tensor) -> Tensor:
        from bottega.kernels.token_moves import gather_tokens

        return gather_tokens(whole, index)

    def merge(
        self, items: Tensor, index: Tensor, slots: Tensor, recorded: Sequence[Tensor | None], tokens: int
    ) -> Tensor:
        from bottega.kernels.token_moves import merge_reference, merge_tokens

        here = [
            None if rest is None else rest.to(items.device, non_blocking=True).view(tokens, -1).contiguous()
            for rest in recorded
        ]
        if len({rest.dtype for rest in here if rest is not None}) == 1:
            return merge_tokens(items.contiguous(), slots, here, tokens)
        return merge_reference(items, index, here, tokens)

    def cut(
        self, parts: Sequence[Tensor], rows: Sequence[int], corners: Sequence[tuple[int, int]], shape: tuple[int, int]
    ) -> Tensor:
        from bottega.kernels.tile_moves import cut_tiles

        near = parts[0].is_contiguous(memory_format=torch.channels_last)
        cut = torch.empty(
            (len(rows), sum(part.shape[1] for part in parts), *shape),
            dtype=parts[0].dtype,
            device=parts[0].device,
            memory_format=torch.channels_last if near else torch.contiguous_format,
        )
        places = _corners(tuple(rows), tuple(corners), cut.device)
        first = 0
        for part in parts:
            cut_tiles(part, places, cut.narrow(1, first, part.shape[1]))
            first += part.shape[1]
        return cut

    def paste(self, whole: Tensor, tiles: Tensor, rows: Sequence[int], corners: Sequence[tuple[int, int]]) -> None:
        from bottega.kernels.tile_moves import paste_tiles

        paste_tiles(whole, _corners(tuple(rows), tuple(corners), whole.device), tiles)


@functools.lru_cache(maxsize=_KNOWN_CORNERS)
def _corners(rows: tuple[int, ...], corners: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """Return the corners on the device. They are cached, because they are the same in every step of an edit."""
    from bottega.kernels.tile_moves import corners_of

    return corners_of([(row, top, left) for row, (top, left) in zip(rows, corners, strict=True)], device)


class GuidedEulerStep(_KernelOperation):
    """Computes guidance and Euler's step by one kernel."""

    name = "kernels.guided_euler"
    probe = "step"
    tolerance = 0.02
    """In half precision, the plain path rounds the terms of guidance, and the guidance scale multiplies that error."""

    def __init__(self) -> None:
        super().__init__("guided_euler", ("guided_euler",), _step)


def _step(
    conditional: Tensor, unconditional: Tensor | None, latent: Tensor, *, scale: float, step: EulerStep
) -> tuple[Tensor, Tensor]:
    from bottega.kernels.guided_euler import guided_euler

    return guided_euler(
        conditional,
        unconditional,
        latent,
        scale=scale,
        sigma=step.sigma,
        next_sigma=step.next_sigma,
        velocity=step.velocity,
    )


class LoraPatch(_KernelOperation):
    """Patches LoRAs into the weights by a kernel."""

    name = "kernels.lora_patch"
    probe = "patch"
    tolerance = 0.01
    """The kernel and the plain path both round once, but sum in different orders."""

    def __init__(self) -> None:
        super().__init__("write_sums", ("lora_patch",), _write_sums)

    def unsupported(self, model: Model) -> str:
        if model.operations.rounds_weights:
            return "weights.float8 is used, and LoRAs are not merged into rounded weights"
        return super().unsupported(model)


def _write_sums(sums: Iterable[WeightSum]) -> None:
    from bottega.kernels.lora_patch import lora_patch

    by_type: dict[object, list[PatchedLayer]] = {}
    for item in sums:
        by_type.setdefault(item.weight.dtype, []).append(_layer(item))
    for layers in by_type.values():
        lora_patch(layers)


def _layer(item: WeightSum) -> PatchedLayer:
    from bottega.kernels.lora_patch import PatchedLayer

    weight, before = as_matrix(item.weight), item.weight
    if item.before.device == item.weight.device:
        before = item.before
    else:  # A copy that is on the host is copied directly to the weight.
        item.weight.copy_(item.before, non_blocking=True)
    return PatchedLayer(
        weight=weight,
        before=as_matrix(before),
        up=item.factors.up.contiguous(),
        down=down_matrix(item).contiguous(),
    )
