"""A CPU as a device: all work is done as soon as it is enqueued. Sets the number of an engine's compute threads, too.

libgomp's threads wait awake for the next operator only while there are at most as many as cores, over all teams of the
process. A team belongs to the thread that divides its work, and lives as long as that thread. If another thread divides
work once, while it loads weights or writes a LoRA, the engine's threads sleep between any two operators from then on.
Measured in alternation on two cores of an EPYC: a step of bench-day's model took 1.3 to 2.0 s instead of 1.0 to 1.2,
and a step of an edit 1.0 to 1.4 s instead of .4 to .6.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter

import torch
from torch import Tensor

from bottega.device.device import Event
from bottega.process.memory import measure_peak_bytes


class CpuEvent:
    """A time of this process, as the Event of a CPU."""

    __slots__ = ("_at_s",)

    def __init__(self) -> None:
        self._at_s = perf_counter()

    @property
    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        """Return at once, because work on a CPU is done when it is enqueued."""

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, CpuEvent), "events of one device are compared"
        return self._at_s - earlier._at_s


class ArrivedCopy:
    """The HostCopy of a CPU: a tensor that is already on the host."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    @property
    def ready(self) -> bool:
        return True

    def take(self) -> Tensor:
        return self._tensor


class CpuDevice:
    """The host's CPU as a Device. A copy is the same tensor, so that nothing is copied needlessly."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def record(self) -> Event:
        return CpuEvent()

    def stream(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def wait_for(self, event: Event) -> None:
        """Do nothing, because the event has happened."""

    def to_host(self, tensor: Tensor) -> ArrivedCopy:
        return ArrivedCopy(tensor)

    def to_device(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return tensor.to(self.torch_device, dtype or tensor.dtype)

    def empty_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def synchronize(self) -> None:
        """Do nothing, because all work is done."""

    def free_bytes(self) -> int | None:
        return None

    def allocated_bytes(self) -> int | None:
        return None

    def limit_memory(self, size_bytes: int) -> None:
        """Do nothing, because the service manager limits host memory."""

    def measure_peak(self, run: Callable[[], object]) -> int | None:
        return measure_peak_bytes(run)


def compute_with(threads: int) -> None:
    """Set the number of threads for operators of the calling thread; 0 means as many as torch chooses.

    Threads that begin to use torch later compute with one thread. Threads that began before keep their number.
    """
    torch.set_num_threads(threads or torch.get_num_threads())
    # Each thread has its own number. When it first asks, which is here, it takes the last one that any thread has set.
    torch.get_num_threads()
    other = threading.Thread(target=compute_alone, name="number of threads")
    other.start()
    other.join()


def compute_alone() -> None:
    """Make the calling thread, and those that begin to use torch after it, compute with one thread.

    For threads whose first operator may be a matrix product, because only then does MKL read the number that was set
    before.
    """
    torch.set_num_threads(1)
