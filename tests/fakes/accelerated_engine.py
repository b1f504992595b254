"""A worker's engine process that tries faked accelerations: `python -m tests.fakes.accelerated_engine`.

Of these the self-check keeps one: without it every forward is late. The others make forwards late, or wrong.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bottega.device.engine_start import lean_imports
from bottega.rpc.operation import logs
from bottega.worker.engine.main import main

if TYPE_CHECKING:
    from bottega.engine.acceleration.acceleration import Acceleration
    from bottega.model.model import Model

# Ten times what a forward of the embedded model takes: longer than it takes on busy cores, too.
_LATE_S = 0.3


class _Faked:
    """Hooks of the network's first layer, through which every forward goes."""

    probe = "forward"
    tolerance = 0.01
    excludes: Sequence[str] = ()

    def __init__(self, name: str) -> None:
        self.name = name
        self._hook: RemovableHandle | None = None

    def unsupported(self, model: Model) -> str:
        return ""

    def disable(self) -> None:
        self._unhook()

    def _hooked(self, model: Model) -> None:
        self._unhook()
        self._hook = model.backbone.unet.conv_in.register_forward_hook(self._after)

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook = None

    def _after(self, _layer: nn.Module, _given: tuple[Tensor, ...], _made: Tensor) -> Tensor | None:
        time.sleep(_LATE_S)
        return None


class Faster(_Faked):
    """Until it is enabled, forwards are late."""

    def __init__(self) -> None:
        super().__init__("faked.faster")
        self._model: Model | None = None

    def unsupported(self, model: Model) -> str:
        self._model = model
        self._hooked(model)
        return ""

    def enable(self, model: Model) -> None:
        self._unhook()

    def disable(self) -> None:
        assert self._model is not None, "it is tried before"
        self._hooked(self._model)


class Slower(_Faked):
    """Forwards are late with it."""

    def __init__(self) -> None:
        super().__init__("faked.slower")

    def enable(self, model: Model) -> None:
        self._hooked(model)


class Wrong(_Faked):
    """Forwards are of something else with it."""

    def __init__(self) -> None:
        super().__init__("faked.wrong")

    def enable(self, model: Model) -> None:
        self._hooked(model)

    def _after(self, _layer: nn.Module, _given: tuple[Tensor, ...], made: Tensor) -> Tensor | None:
        return 1.5 * made


def faked() -> list[Acceleration]:
    return [Faster(), Slower(), Wrong()]


if __name__ == "__main__":
    with lean_imports():
        from bottega.engine.acceleration import self_check
    self_check.all_accelerations = faked
    status = main()
    logs.flush()
    os._exit(status)  # as the real one
