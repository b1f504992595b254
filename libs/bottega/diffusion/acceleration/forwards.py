"""Modules that compute their forward in another way for a while, and then as before, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class Forwards:
    """What was put in place of modules' forwards. Hooks of modules are called as ever."""

    def __init__(self) -> None:
        self._replaced: list[tuple[nn.Module, Any]] = []

    @property
    def count(self) -> int:
        """Of modules that compute in another way now."""
        return len(self._replaced)

    def replace(self, module: nn.Module, forward: Callable[..., Tensor]) -> None:
        """Until `restore`. Each module once."""
        # Its own attribute hides its class's forward; somebody else may have put one there before.
        self._replaced.append((module, module.__dict__.get("forward")))
        module.__dict__["forward"] = forward

    def restore(self) -> None:
        """Harmless where nothing is replaced."""
        while self._replaced:
            module, before = self._replaced.pop()
            if before is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = before
