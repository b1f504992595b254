"""Records the kernel launches of a function on a device, and replays them over the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

MadeT = TypeVar("MadeT")

# Runs before recording: libraries choose algorithms and allocate memory in the first ones.
_WARM_UP_RUNS = 2


class Capture(Protocol):
    """Records functions on one device. Not thread-safe."""

    def begin(self) -> None:
        """Begin a new set of functions whose memory is freed together.

        Unused memory is returned to the device first, as recording would do, so that reserved bytes before and after
        the set tell how much it takes.
        """
        ...

    def record(self, function: Callable[[], MadeT]) -> tuple[Callable[[], None], MadeT]:
        """Run a function, and return a function that replays its launches, together with the result.

        The inputs must stay at their addresses; each launch overwrites the result in place. Raise the function's
        errors, or RuntimeError if it cannot be recorded; nothing is kept then.
        """
        ...

    def reserved_bytes(self) -> int:
        """Return the device memory reserved by this process."""
        ...


class CudaCapture:
    """A capture with torch.cuda.CUDAGraph. Graphs of a set share a memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def begin(self) -> None:
        torch.cuda.empty_cache()
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], MadeT]) -> tuple[Callable[[], None], MadeT]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UP_RUNS):
                function()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Only this thread is captured: other threads, which receive from links, may allocate pinned memory meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            made = function()
        graph.replay()
        return graph.replay, made

    def reserved_bytes(self) -> int:
        return int(torch.cuda.memory_reserved(self._device))
