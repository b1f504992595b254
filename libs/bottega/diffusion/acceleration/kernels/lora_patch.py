"""The acceleration of patching LoRAs into the weights, by one kernel launch for all layers of a set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from bottega.diffusion.acceleration.kernels.availability import unavailable
from bottega.diffusion.loras.patching import as_matrix, down_matrix
from bottega.diffusion.model.model import Model
from bottega.diffusion.operations import Operations, WeightSum

if TYPE_CHECKING:
    from bottega.kernels.lora_patch import PatchedLayer


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
    for each in sums:
        by_type.setdefault(each.weight.dtype, []).append(_layer(each))
    for layers in by_type.values():
        lora_patch(layers)


def _layer(each: WeightSum) -> PatchedLayer:
    from bottega.kernels.lora_patch import PatchedLayer

    weight, before = as_matrix(each.weight), each.weight
    if each.before.device == each.weight.device:
        before = each.before
    else:  # A copy on the host is copied directly to the weight.
        each.weight.copy_(each.before, non_blocking=True)
    return PatchedLayer(
        weight=weight,
        before=as_matrix(before),
        up=each.factors.up.contiguous(),
        down=down_matrix(each).contiguous(),
    )
