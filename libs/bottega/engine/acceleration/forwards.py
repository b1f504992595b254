"""Temporarily replaces the `forward` methods of modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class Forwards:
    """The modules whose `forward` is replaced. Their hooks still run."""

    def __init__(self) -> None:
        self._replaced: list[tuple[nn.Module, Any]] = []

    @property
    def count(self) -> int:
        """Number of modules whose `forward` is replaced."""
        return len(self._replaced)

    def replace(self, module: nn.Module, forward: Callable[..., Tensor]) -> None:
        """Replace a module's `forward` until `restore`. A module can be replaced only once."""
        # The instance attribute hides the class's forward; another tool may have set one before.
        self._replaced.append((module, module.__dict__.get("forward")))
        module.__dict__["forward"] = forward

    def restore(self) -> None:
        """Restore all replaced methods."""
        while self._replaced:
            module, before = self._replaced.pop()
            if before is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = before
