"""What makes the thread of a GPU wait without saying so, refused for a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_INDEXES = (Tensor.__getitem__, Tensor.__setitem__)


class ListIndexesRefused(TorchFunctionMode):
    """Python lists as indexes: torch copies them to a GPU from pageable memory. A CPU shows no other hidden wait."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _INDEXES:
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            assert not any(isinstance(part, list) for part in parts), f"a list is the index: {args[1]}"
        return func(*args, **(kwargs or {}))


@contextmanager
def hidden_waits_refused(device: torch.device) -> Iterator[None]:
    """In the block whatever is known to make the thread wait for this device fails."""
    if device.type == "cpu":
        with ListIndexesRefused():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
