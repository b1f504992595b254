"""The interface of the device on which the engine's thread computes: enqueued work, events, time spans, and copies.

On a CPU work is done when it is enqueued. On a GPU it is not: code that reads a time or a copy checks `ready` first,
and waits only if there is nothing else to do.

Long computations run in pieces: generators that yield between two pieces, so that other work can run there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor


class Event(Protocol):
    """A point in a stream. It is reached when all work that was enqueued before it is done."""

    @property
    def ready(self) -> bool:
        """Whether the device has reached the event. Never waits."""
        ...

    def wait(self) -> None:
        """Wait until the device has reached the event."""
        ...

    def seconds_since(self, earlier: Event) -> float:
        """Return the seconds from another event of this device to this one. Both must be ready."""
        ...


class HostCopy(Protocol):
    """A pending copy of a tensor to host memory."""

    @property
    def ready(self) -> bool:
        """Whether the copy has arrived. Never waits."""
        ...

    def take(self) -> Tensor:
        """Return the tensor on the CPU. Wait if the copy has not arrived."""
        ...


class Device(Protocol):
    """A device that computes. One thread enqueues work. Further streams have names, and are created at first use."""

    torch_device: torch.device

    def record(self) -> Event:
        """Record an event in the current stream."""
        ...

    def stream(self, name: str) -> AbstractContextManager[None]:
        """Return a context whose work is enqueued in a named stream, after all work of the current stream so far."""
        ...

    def wait_for(self, event: Event) -> None:
        """Make all work that is enqueued later run after an event. The calling thread does not wait."""
        ...

    def to_host(self, tensor: Tensor) -> HostCopy:
        """Copy a tensor to pinned host memory, in parallel with other work.

        The copy contains what the current stream has written so far. Neither the tensor nor the copy may be changed
        before the copy has arrived, because on a CPU they are the same tensor.
        """
        ...

    def to_device(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Copy a tensor from the host to the device, through pinned memory, so that the calling thread does not wait.

        The host's tensor may be changed or freed afterwards, except on a CPU: there the result is the same tensor if
        its data type fits.

        Args:
            tensor: On the host.
            dtype: Data type of the result; None means that of the tensor.
        """
        ...

    def empty_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return host memory that is copied to and from the device without a waiting thread (pinned memory)."""
        ...

    def synchronize(self) -> None:
        """Wait until all enqueued work is done. For start-up and benchmarks only, never in a step."""
        ...

    def free_bytes(self) -> int | None:
        """Return the free bytes of the device; None on a CPU."""
        ...

    def total_bytes(self) -> int | None:
        """Return all bytes of the device, free or not; None on a CPU."""
        ...

    def allocated_bytes(self) -> int | None:
        """Return how many bytes of the device this process's tensors use; None on a CPU."""
        ...

    def limit_memory(self, size_bytes: int) -> None:
        """Limit the device memory of this process. Does nothing on a CPU."""
        ...

    def measure_peak(self, run: Callable[[], object]) -> int | None:
        """Run a function, wait for the device, and return the peak of the bytes that it used.

        Return None if that cannot be measured. Call it only while nothing else runs.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Span:
    """The time between two events of a device."""

    begin: Event
    end: Event

    @property
    def ready(self) -> bool:
        """Whether the span has ended."""
        return self.begin.ready and self.end.ready

    @property
    def seconds(self) -> float:
        """Its duration. Waits until the span has ended."""
        self.end.wait()
        self.begin.wait()
        return self.end.seconds_since(self.begin)


class SpanSum:
    """The total duration of spans that have ended."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._unread: deque[Span] = deque()

    def add(self, span: Span) -> None:
        """Add a span, which may end later."""
        self._unread.append(span)
        self._read()

    @property
    def seconds(self) -> float:
        """Total seconds of the spans that have ended. Never waits."""
        self._read()
        return self._seconds

    def _read(self) -> None:
        # Spans of a stream end in order, so that no span after the first unfinished one has ended.
        while self._unread and self._unread[0].ready:
            self._seconds += self._unread.popleft().seconds


Result = TypeVar("Result")


def run_pieces(pieces: Generator[None, None, Result]) -> Result:
    """Run all pieces of a computation, and return its result."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: Result = end.value
            return result


class PausableWork(Generic[Result]):
    """A computation in pieces that may pause after each of them."""

    def __init__(self, device: Device, pieces: Generator[None, None, Result]) -> None:
        self.spans: list[Span] = []
        """The time that the device spent in each call of `run`."""
        self.result: Result | None = None
        """The result; None before all pieces have been enqueued."""
        self.failed = False
        """Whether a piece has raised an error, so that there will be no result."""
        self._device = device
        self._pieces = pieces

    def run(self, pause_due: Callable[[], bool] = lambda: False) -> None:
        """Enqueue the pieces that are left.

        Args:
            pause_due: Returns whether to pause after a piece. The device may not have done it yet.
        """
        began = self._device.record()
        try:
            while self.result is None:
                try:
                    next(self._pieces)
                except StopIteration as end:
                    self.result = end.value
                if pause_due():
                    break
        except Exception:
            self.failed = True
            raise
        finally:
            self.spans.append(Span(begin=began, end=self._device.record()))

    def close(self) -> None:
        """End the computation, unless it has ended."""
        self._pieces.close()
