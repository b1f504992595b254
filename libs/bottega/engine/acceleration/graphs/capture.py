"""Records the kernel launches of a function on a device, and replays them on the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

MadeT = TypeVar("MadeT")

# Number of runs before recording: in the first ones, libraries choose algorithms and allocate memory.
_WARM_UP_RUNS = 2


class Capture(Protocol):
    """Records functions on one device. Not thread-safe."""

    def begin(self) -> None:
        """Begin a new set of recordings, whose memory is freed together.

        Return unused memory to the device, as recording does, so that the difference of `reserved_bytes` before and
        after is the memory that the set takes.
        """
        ...

    def record(self, function: Callable[[], MadeT]) -> tuple[Callable[[], None], MadeT]:
        """Run a function. Return a function that replays its kernel launches, and its result.

        The inputs must stay at their addresses. Each replay overwrites the result. Raise the function's errors, or
        RuntimeError if the launches cannot be recorded.
        """
        ...

    def reserved_bytes(self) -> int:
        """Return the device memory reserved by this process."""
        ...


class CudaCapture:
    """Records with torch.cuda.CUDAGraph. The graphs of a set share a memory pool."""

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
        # Record only this thread: others, which receive from links, may allocate pinned memory meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            made = function()
        graph.replay()
        return graph.replay, made

    def reserved_bytes(self) -> int:
        return int(torch.cuda.memory_reserved(self._device))
