"""Accelerations by kernels that replace `Operations`, and the probes that show the gain of those for LoRAs and edits.

The probes have the model's own sizes and use the model's current operations.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bottega.addons.edits.engine.masked.packing import pack_rows
from bottega.addons.edits.engine.masked.support import unsupported as cannot_mask
from bottega.addons.edits.engine.masked.tokens import MaskTokens
from bottega.addons.edits.engine.sparse.pieces import Tiles
from bottega.addons.edits.engine.sparse.rectangles import Rectangle
from bottega.addons.loras.engine.lora import UNET
from bottega.addons.loras.engine.patching import Patcher, as_matrix, down_matrix
from bottega.diffusion.acceleration.acceleration import Probe
from bottega.diffusion.acceleration.kernels.availability import unavailable
from bottega.diffusion.model.model import Model
from bottega.diffusion.operations import EulerStep, Operations, WeightSum
from bottega.diffusion.rows import Factors, LoraSet

if TYPE_CHECKING:
    from bottega.kernels.lora_patch import PatchedLayer

_RANK = 32
# Bytes of weights that the probe's LoRA patches, which are copied meanwhile, and number of layers that are compared.
_PATCHED_BYTES = 256 << 20
_COMPARED_LAYERS = 4
# Side of the probe's mask, as a share of the picture's: a fifth of the area.
_MASKED = 0.45
# Both halves of a guided request.
_ROWS = 2
# Enough for some tens of running edits, at each level of their networks, for each kind of layer.
_KNOWN_CORNERS = 1024


class _KernelOperation:
    """Lets a model compute one of its operations by kernels.

    Args:
        slot: Field of Operations that holds the operation.
        modules: Modules of bottega.kernels that the operation uses.
        operation: The operation.
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
        for module in self._modules:  # a failure must show here, and not in the first turn
            import_module(f"bottega.kernels.{module}")
        self._operations = model.operations
        setattr(model.operations, self._slot, self._operation)

    def disable(self) -> None:
        if self._operations is not None:
            setattr(self._operations, self._slot, None)
        self._operations = None


class MaskedMoves(_KernelOperation):
    """Moves tokens and tiles by kernels."""

    name = "kernels.masked_moves"
    probe = "masked"
    tolerance = 0.0
    """Values are moved; recorded ones are rounded as in plain torch."""

    def __init__(self) -> None:
        super().__init__("moves", ("tile_moves", "token_moves"), KernelMoves())

    def unsupported(self, model: Model) -> str:
        why = cannot_mask(model.backbone.unet)
        return super().unsupported(model) or (f"edits are computed in full: {why}" if why else "")


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
    """Return the corners on the device. Cached, because they are the same in every step of an edit."""
    from bottega.kernels.tile_moves import corners_of

    return corners_of([(row, top, left) for row, (top, left) in zip(rows, corners, strict=True)], device)


class GuidedEulerStep(_KernelOperation):
    """Computes guidance and Euler's step by a kernel."""

    name = "kernels.guided_euler"
    probe = "step"
    tolerance = 0.02
    """In half precision, the plain path rounds the terms of guidance, and the scale multiplies that error."""

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
    """Patches LoRAs by a kernel."""

    name = "kernels.lora_patch"
    probe = "patch"
    tolerance = 0.01
    """Both ways round once, but sum in another order."""

    def __init__(self) -> None:
        super().__init__("write_sums", ("lora_patch",), _write_sums)


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
    else:  # A copy on the host is copied directly to the weight.
        item.weight.copy_(item.before, non_blocking=True)
    return PatchedLayer(
        weight=weight,
        before=as_matrix(before),
        up=item.factors.up.contiguous(),
        down=down_matrix(item).contiguous(),
    )


def feature_probes(model: Model) -> Mapping[str, Probe]:
    """Return the probes by name: "patch" and "masked"."""
    return {"patch": _patch_probe(model), "masked": masked_probe(model)}


def masked_probe(model: Model) -> Probe:
    """Return a probe that packs and merges tokens, and cuts and pastes tiles, for a mask in the middle of two rows."""
    height, width = model.defaults.height // model.latent_scale, model.defaults.width // model.latent_scale
    channels = int(model.backbone.unet.config.block_out_channels[0])
    generator = torch.Generator("cpu").manual_seed(0)
    maps = torch.randn(_ROWS, channels, height, width, generator=generator).to(model.device, model.dtype)
    recorded = torch.randn(height * width, channels, generator=generator).to(model.device, torch.float16)
    box = _middle(height, width)
    mask = torch.zeros(height, width, dtype=torch.bool)
    mask[box.rows, box.columns] = True
    tokens = MaskTokens(mask).at(height, width)

    def run() -> Sequence[Tensor]:
        moves = model.operations.moves
        packing = pack_rows([tokens] * _ROWS, height * width, model.device, moves)
        items = packing.pack(maps.flatten(2).transpose(1, 2))
        merged = packing.merge(items, [recorded] * _ROWS)
        rows = tuple(range(_ROWS))
        tiles = Tiles(rows=rows, rectangles=(box,) * _ROWS, size=(height, width), offsets=(*rows, _ROWS), moves=moves)
        cut = tiles.take([maps], margin=1)
        pasted = maps.clone()
        tiles.paste(pasted, tiles.core(cut, 1) * 2)
        return items, merged, cut, pasted

    return run


def _patch_probe(model: Model) -> Probe:
    """Return a probe that patches a LoRA and restores the weights bit for bit."""
    unet = model.backbone.unet
    layers = dict(_layers(unet))
    generator = torch.Generator("cpu").manual_seed(0)
    factors = {path: _factors(layer, generator) for path, layer in layers.items()}
    loras = LoraSet(key=(("self-check", 1.0),), components={UNET: factors})
    compared = list(layers.values())[:_COMPARED_LAYERS]

    def run() -> Sequence[Tensor]:
        patcher = Patcher(unet, UNET, operations=model.operations)
        try:
            patcher.patch(loras)
            return [layer.weight.detach().clone() for layer in compared]
        finally:
            patcher.restore()

    return run


def _layers(unet: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield projections of attention, which most LoRAs patch, up to a total size."""
    size_bytes = 0
    for path, module in unet.named_modules():
        if isinstance(module, nn.Linear) and path.endswith((".to_q", ".to_k", ".to_v", ".to_out.0")):
            size_bytes += module.weight.nbytes
            if size_bytes > _PATCHED_BYTES:
                return
            yield path, module


def _factors(layer: nn.Linear, generator: torch.Generator) -> Factors:
    weight = layer.weight
    down = torch.randn(_RANK, weight.shape[1], generator=generator) * weight.shape[1] ** -0.5
    up = torch.randn(weight.shape[0], _RANK, generator=generator) * 0.05
    return Factors(down=down.to(weight), up=up.to(weight))


def _middle(height: int, width: int) -> Rectangle:
    size = max(1, round(height * _MASKED)), max(1, round(width * _MASKED))
    return Rectangle(top=(height - size[0]) // 2, left=(width - size[1]) // 2, height=size[0], width=size[1])
