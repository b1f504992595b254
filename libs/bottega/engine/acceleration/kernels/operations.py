"""Accelerations by kernels that replace the functions in a model's `Operations`."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bottega.engine.acceleration.kernels.layers import unavailable
from bottega.model.model import Model
from bottega.model.operations import EulerStep, Operations, WeightSum, as_matrix, down_matrix

if TYPE_CHECKING:
    from bottega.kernels.lora_patch import PatchedLayer

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
