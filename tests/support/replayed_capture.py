"""A Capture on a CPU: what was launched while a function was recorded is launched again, over the same memory.

Python does not run again: a number that it read while it was recorded stays, and a tensor that was put in the place of
another one is not seen, as with CUDA's graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MadeT = TypeVar("MadeT")

_Call = tuple[Any, Sequence[Any], Mapping[str, Any], list[Tensor]]


class ReplayedCapture:
    """recorded: how many functions were. launched: how often any of them was launched again.

    refuses: raised instead of recording. It says that each function has taken some bytes, and that some are reserved
    for nothing until a set begins.
    """

    def __init__(self, *, refuses: Exception | None = None) -> None:
        self.recorded = 0
        self.launched = 0
        self._refuses = refuses
        self._function_bytes = 1000
        self._cached_bytes = 100_000
        self._taken_bytes = 0

    def begin(self) -> None:
        self._cached_bytes = 0

    def record(self, function: Callable[[], MadeT]) -> tuple[Callable[[], None], MadeT]:
        if self._refuses is not None:
            raise self._refuses
        recorder = _Recorder()
        with recorder:
            made = function()
        self.recorded += 1
        self._taken_bytes += self._function_bytes

        def launch() -> None:
            self.launched += 1
            for call in recorder.calls:
                _launch(call)

        return launch, made

    def reserved_bytes(self) -> int:
        return self._taken_bytes + self._cached_bytes


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, _tensors(made)))
        return made


def _launch(call: _Call) -> None:
    func, args, kwargs, made = call
    if func._schema.is_mutable:
        func(*args, **kwargs)
        return
    read = {each.untyped_storage().data_ptr() for each in _tensors((args, kwargs))}
    if made and all(each.untyped_storage().data_ptr() in read for each in made):
        return  # a view: it lies where it lay
    for before, now in zip(made, _tensors(func(*args, **kwargs)), strict=True):
        before.copy_(now)


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]
