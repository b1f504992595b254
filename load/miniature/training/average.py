"""The moving average of weights that a training leaves behind instead of the last ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Average:
    """Follows the parameters; the decay grows to `decay`, so that the first steps are soon forgotten."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], decay: float) -> None:
        self._live = list(parameters)
        self._kept = [parameter.detach().clone() for parameter in self._live]
        self._decay = decay

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Call it after each step."""
        decay = min(self._decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._kept, [parameter.detach() for parameter in self._live], 1 - decay)

    @torch.no_grad()
    def apply(self) -> None:
        """Gives the parameters the averaged weights, for good."""
        for parameter, kept in zip(self._live, self._kept, strict=True):
            parameter.copy_(kept)

    def state(self) -> list[torch.Tensor]:
        """The averaged weights."""
        return self._kept

    @torch.no_grad()
    def load_state(self, state: list[torch.Tensor]) -> None:
        """The reverse."""
        for kept, tensor in zip(self._kept, state, strict=True):
            kept.copy_(tensor)
