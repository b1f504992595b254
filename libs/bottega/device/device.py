"""The interface of the device beside which the engine's thread runs: enqueued work, its events, and copies.

On a CPU work is done when it has been enqueued. On a GPU it is not: code that reads a time or a copy checks `ready`
first, and waits only if there is nothing else to do.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in a stream that is reached when all work that was enqueued before it is done."""

    @property
    def ready(self) -> bool:
        """Whether the device has reached it. Never waits."""
        ...

    def wait(self) -> None:
        """Wait until the device has reached it."""
        ...

    def seconds_since(self, earlier: Event) -> float:
        """Return the seconds from another event of this device to this one. Both must be ready."""
        ...


class HostCopy(Protocol):
    """A pending copy of a tensor to host memory."""

    @property
    def ready(self) -> bool:
        """Whether it has arrived. Never waits."""
        ...

    def take(self) -> Tensor:
        """Return the tensor on the CPU. Wait if it has not arrived."""
        ...


class Device(Protocol):
    """A device that computes. One thread enqueues work. Additional streams have names, and are made when first used."""

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
        """Copy a tensor to pinned host memory, beside other work.

        The copy contains what the current stream has written so far. Neither the tensor nor the copy may be changed
        before it has arrived: on a CPU they are the same.
        """
        ...

    def to_device(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Copy a tensor from the host to the device, through pinned memory, so that the calling thread does not wait.

        The host's tensor may be changed or freed afterwards, except on a CPU: there the result is the same tensor if
        its element type fits.

        Args:
            tensor: On the host.
            dtype: Element type of the result; that of the tensor by default.
        """
        ...

    def empty_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return host memory whose copies to and from the device need no waiting thread."""
        ...

    def synchronize(self) -> None:
        """Wait until all enqueued work is done. For start-up and benches only, never in a step."""
        ...

    def free_bytes(self) -> int | None:
        """Return the free bytes of the device; None if its memory is the host's."""
        ...

    def allocated_bytes(self) -> int | None:
        """Return how many bytes of the device this process's tensors use; None if its memory is the host's."""
        ...

    def limit_memory(self, size_bytes: int) -> None:
        """Limit the memory of this process on the device. Do nothing if its memory is the host's."""
        ...

    def measure_peak(self, run: Callable[[], object]) -> int | None:
        """Run a function, wait for the device, and return the most bytes that it used at once.

        Return None if they cannot be measured. Call it only while nothing else runs.
        """
        ...
