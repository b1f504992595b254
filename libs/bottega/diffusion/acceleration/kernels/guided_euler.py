"""The acceleration of guidance and the Euler sampler's step by a kernel; see `operations.GuidedEuler`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bottega.diffusion.acceleration.kernels.availability import unavailable
from bottega.diffusion.model.model import Model
from bottega.diffusion.operations import EulerStep, Operations


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
