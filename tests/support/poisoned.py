"""Outputs for kernels: NaN until they are written, in memory that is NaN around them and has to stay so."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Elements before and behind: more than a block of any kernel reaches beyond.
_MARGIN = 5000


class Poisoned:
    """tensor: of that shape, contiguous, or channels-last. Its memory lies between margins."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, channels_last: bool = False
    ) -> None:
        count = math.prod(shape)
        self._memory = torch.full((count + 2 * _MARGIN,), float("nan"), dtype=dtype)
        inside = self._memory[_MARGIN : _MARGIN + count]
        if channels_last:
            rows, channels, height, width = shape
            self.tensor: Tensor = inside.view(rows, height, width, channels).permute(0, 3, 1, 2)
        else:
            self.tensor = inside.view(*shape)

    def check(self) -> None:
        """All of the tensor was written, and nothing around it."""
        assert not self.tensor.isnan().any(), "some of the output was never written"
        margins = torch.cat([self._memory[:_MARGIN], self._memory[-_MARGIN:]])
        assert margins.isnan().all(), "something was written outside of the output"
