"""The device beside which the engine's thread runs: what it enqueues, how it learns what is done, and what a copy is.

On a CPU all of it is done when it is enqueued. On a GPU nothing is: who reads a time or a copy asks `ready` first, and
waits only where there is nothing else to do.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A moment in a stream: when all that was enqueued before it is done."""

    @property
    def ready(self) -> bool:
        """Whether the device has come so far. Never waits."""
        ...

    def wait(self) -> None:
        """Waits until it has."""
        ...

    def seconds_since(self, earlier: Event) -> float:
        """From another event of this device to this one. Only when both are ready."""
        ...


class HostCopy(Protocol):
    """A tensor on its way to the host's memory."""

    @property
    def ready(self) -> bool:
        """Whether it has arrived. Never waits."""
        ...

    def take(self) -> Tensor:
        """The tensor on the CPU; waits where it has not arrived."""
        ...


class Device(Protocol):
    """What computes. One thread enqueues; streams other than its own are by name, made when they are first used."""

    torch_device: torch.device

    def record(self) -> Event:
        """Marks this moment in the stream that is current."""
        ...

    def stream(self, name: str) -> AbstractContextManager[None]:
        """What is enqueued inside goes to a stream of this name, behind what the current one has been given so far."""
        ...

    def wait_for(self, event: Event) -> None:
        """What is enqueued from now on runs after this event. The calling thread does not wait."""
        ...

    def to_host(self, tensor: Tensor) -> HostCopy:
        """Copies a tensor to pinned memory of the host, beside what else runs.

        As it is when what the current stream has been given so far is done; not to be written to until it has arrived,
        nor is the copy, which on a CPU is the tensor itself.
        """
        ...

    def to_device(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of the host on the device: copied through pinned memory, so that the calling thread goes on.

        The host's tensor may be changed or freed when this returns; but on a CPU the result is that tensor itself
        where its element type fits. dtype: its own without one.
        """
        ...

    def empty_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of the host that copies to and from the device run from without the thread."""
        ...

    def synchronize(self) -> None:
        """Waits until all that was enqueued is done: at start and in benches, never in a step."""
        ...

    def free_bytes(self) -> int | None:
        """Memory of the device that nobody has; None where it is the host's."""
        ...

    def allocated_bytes(self) -> int | None:
        """Memory of the device that this process's tensors have; None where it is the host's."""
        ...

    def limit_memory(self, size_bytes: int) -> None:
        """From now on this process has no more of it than that. Nothing where it is the host's."""
        ...

    def measure_peak(self, run: Callable[[], object]) -> int | None:
        """Runs this and waits for the device. The most bytes that it had beside what was there; None where they are
        the host's. Only while nothing else runs."""
        ...
