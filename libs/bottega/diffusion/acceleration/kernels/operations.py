"""Accelerations by kernels that replace `Operations`: masked rows' moves, guidance with Euler's step, LoRA patches."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bottega.diffusion.acceleration.kernels.availability import unavailable
from bottega.diffusion.editing.masked.support import unsupported as cannot_mask
from bottega.diffusion.loras.patching import as_matrix, down_matrix
from bottega.diffusion.model.model import Model
from bottega.diffusion.operations import EulerStep, Operations, WeightSum

if TYPE_CHECKING:
    from bottega.kernels.lora_patch import PatchedLayer

# Enough for some tens of running edits, at each level of their networks, for each kind of layer.
_KNOWN_CORNERS = 1024


class MaskedMoves:
    """Moves tokens and tiles by kernels."""

    name = "kernels.masked_moves"
    probe = "masked"
    tolerance = 0.0
    """Values are moved; recorded ones are rounded as in plain torch."""
    excludes: Sequence[str] = ()

    def __init__(self) -> None:
        self._operations: Operations | None = None

    def unsupported(self, model: Model) -> str:
        why = cannot_mask(model.backbone.unet)
        return unavailable(model) or (f"edits are computed in full: {why}" if why else "")

    def enable(self, model: Model) -> None:
        # Raises here what it would otherwise raise in the first turn.
        from bottega.kernels import tile_moves, token_moves  # noqa: F401

        self._operations = model.operations
        model.operations.moves = KernelMoves()

    def disable(self) -> None:
        if self._operations is not None:
            self._operations.moves = None
        self._operations = None


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


class GuidedEulerStep:
    """Computes guidance and Euler's step by a kernel."""

    name = "kernels.guided_euler"
    probe = "step"
    tolerance = 0.02
    """In half precision, the plain path rounds the terms of guidance, and the scale multiplies that error."""
    excludes: Sequence[str] = ()

    def __init__(self) -> None:
        self._operations: Operations | None = None

    def unsupported(self, model: Model) -> str:
        return unavailable(model)

    def enable(self, model: Model) -> None:
        import bottega.kernels.guided_euler  # noqa: F401 - raises here what it would raise in the first turn

        self._operations = model.operations
        model.operations.guided_euler = _step

    def disable(self) -> None:
        if self._operations is not None:
            self._operations.guided_euler = None
        self._operations = None


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


class LoraPatch:
    """Patches LoRAs by a kernel."""

    name = "kernels.lora_patch"
    probe = "patch"
    tolerance = 0.01
    """Both ways round once, but sum in another order."""
    excludes: Sequence[str] = ()

    def __init__(self) -> None:
        self._operations: Operations | None = None

    def unsupported(self, model: Model) -> str:
        return unavailable(model)

    def enable(self, model: Model) -> None:
        import bottega.kernels.lora_patch  # noqa: F401 - raises here what it would raise in the first turn

        self._operations = model.operations
        model.operations.write_sums = _write_sums

    def disable(self) -> None:
        if self._operations is not None:
            self._operations.write_sums = None
        self._operations = None


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
