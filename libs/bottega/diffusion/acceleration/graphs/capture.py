"""How a device records what a function launches, and launches it again over the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

MadeT = TypeVar("MadeT")

# Before it is recorded a function runs a few times: libraries choose their ways, and allocate, in the first ones.
_WARM_UP_RUNS = 2


class Capture(Protocol):
    """Records for one device. One thread calls it."""

    def begin(self) -> None:
        """A new set of functions follows, whose memory is freed together.

        What the process has of the device's memory and uses for nothing is given back, as recording would do it: what
        is reserved before and after the set tells what it has taken.
        """
        ...

    def record(self, function: Callable[[], MadeT]) -> tuple[Callable[[], None], MadeT]:
        """Runs a function, and returns what runs all of its launches again, and what it made.

        What it reads must stay where it is, and what it made is overwritten in place by each launch. Raises what the
        function raises, and RuntimeError for what cannot be recorded; nothing is left of it then.
        """
        ...

    def reserved_bytes(self) -> int:
        """Of the device's memory that this process has, to see what recording took."""
        ...


class CudaCapture:
    """By torch.cuda.CUDAGraph. A set's graphs share a pool: what one of them needs no more, the next may use."""

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
        # Of this thread alone: others, which receive from links, may allocate pinned memory meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            made = function()
        graph.replay()
        return graph.replay, made

    def reserved_bytes(self) -> int:
        return int(torch.cuda.memory_reserved(self._device))
