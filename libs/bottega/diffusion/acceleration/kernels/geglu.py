"""The acceleration of the gated activation in feed-forward layers, by a kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from diffusers.models.activations import GEGLU
from torch import Tensor

from bottega.diffusion.acceleration.forwards import Forwards
from bottega.diffusion.acceleration.kernels.availability import unavailable
from bottega.diffusion.model.model import Model


class Geglu:
    """Replaces GEGLU by a kernel."""

    name = "kernels.geglu"
    probe = "forward"
    tolerance = 0.02
    """The plain path rounds GELU before it multiplies, in each of seventy consecutive blocks."""
    excludes: Sequence[str] = ()

    def __init__(self) -> None:
        self._forwards = Forwards()

    def unsupported(self, model: Model) -> str:
        known = any(type(module) is GEGLU for module in model.backbone.unet.modules())
        return unavailable(model) or ("" if known else "the network has no GEGLU")

    def enable(self, model: Model) -> None:
        from bottega.kernels.geglu import geglu

        for module in model.backbone.unet.modules():
            if type(module) is GEGLU:
                self._forwards.replace(module, _forward(module, geglu))

    def disable(self) -> None:
        self._forwards.restore()


def _forward(module: GEGLU, geglu: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def forward(hidden_states: Tensor) -> Tensor:
        return geglu(module.proj(hidden_states))

    return forward
