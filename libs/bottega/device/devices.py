"""The devices: a CPU, which does all work as soon as it is enqueued, and a CUDA GPU.

libgomp's threads wait awake for the next operator only while there are at most as many as cores, over all teams of the
process. A team belongs to the thread that divides its work, and lives as long as that thread. If another thread divides
work once, while it loads weights or writes a LoRA, the engine's threads sleep between any two operators from then on.
Measured in alternation on two cores of an EPYC: a step of bench-day's model took 1.3 to 2.0 s instead of 1.0 to 1.2,
and a step of an edit 1.0 to 1.4 s instead of .4 to .6. `compute_with` and `compute_alone` set the threads.

On a GPU, PyTorch's caching allocators own pinned memory and that of the device. Memory that is freed while a copy runs
is not reused before the copy ends, if the allocator knows the stream (`record_stream`; `copy_` does this for pinned
memory). Source: torch/cuda/streams.py, aten/src/ATen/cuda/CachingHostAllocator.cpp.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from time import perf_counter

import torch
from torch import Tensor

from bottega.config import check_device_name
from bottega.device.device import Device, Event, HostCopy
from bottega.process.memory import measure_peak_bytes


def pick_device(name: str) -> torch.device:
    """Return the torch device for a configured name: `auto`, `cpu`, `cuda` or `cuda:N`.

    `auto` is the first GPU if there is one, else the CPU. `cuda` is the first GPU, and is returned as `cuda:0`.

    Raises:
        ValueError: The device is not supported, or does not exist.
    """
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    device = torch.device("cuda:0" if check_device_name(name) == "cuda" else name)
    if device.type == "cuda" and device.index >= torch.cuda.device_count():
        raise ValueError(f"device {name}: this machine has {torch.cuda.device_count()} CUDA devices; use cpu or auto")
    return device


def open_device(torch_device: torch.device) -> Device:
    """Return the Device for a torch.device. There is one per process. Raise ValueError if its kind is not supported."""
    kind = torch_device.type
    if kind == "cuda":
        # A device without an index is the current one. Its type does not say that the index may be None.
        index: int | None = torch_device.index
        return _open(kind, torch.cuda.current_device() if index is None else index)
    return _open(kind, 0)


def use_device(torch_device: torch.device) -> Device:
    """Return the Device for a torch.device, and make it the current one of the calling thread.

    Call it first in a thread that computes: most of torch computes where its tensors are, but kernels are launched on
    the current device.
    """
    device = open_device(torch_device)
    if device.torch_device.type == "cuda":
        torch.cuda.set_device(device.torch_device)
    return device


@lru_cache
def _open(kind: str, index: int) -> Device:
    """Return the only Device for a device, because named streams are shared."""
    if kind == "cpu":
        return CpuDevice()
    if kind == "cuda":
        return CudaDevice(torch.device(kind, index))
    raise ValueError(f"device {kind} is not supported; use cpu or cuda")


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

    def total_bytes(self) -> int | None:
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


# Copies to the host have a stream of their own, and begin as soon as their source has been computed.
_TO_HOST = "to_host"


class CudaEvent:
    """An event in the stream that was current when it was created."""

    __slots__ = ("_event",)

    def __init__(self, device: torch.device) -> None:
        # blocking: a waiting thread sleeps, and leaves its core to other threads.
        self._event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(device))

    @property
    def ready(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self._event.synchronize()

    def delay(self, stream: torch.cuda.Stream) -> None:
        """Make all later work of the stream run after this event."""
        stream.wait_event(self._event)

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, CudaEvent), "events of one device are compared"
        return float(earlier._event.elapsed_time(self._event)) / 1000.0


class CudaHostCopy:
    """A tensor in pinned memory that is filled when an event happens."""

    __slots__ = ("_event", "_host")

    def __init__(self, host: Tensor, event: CudaEvent) -> None:
        self._host = host
        self._event = event

    @property
    def ready(self) -> bool:
        return self._event.ready

    def take(self) -> Tensor:
        self._event.wait()
        return self._host


class CudaDevice:
    """A CUDA device.

    Attributes:
        torch_device: The device, with its index.
        pageable: Whether copies use normal instead of pinned memory, so that the calling thread waits for each one. The
            self-check of accelerations compares both.
    """

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self.pageable = False
        self._streams: dict[str, torch.cuda.Stream] = {}

    def record(self) -> CudaEvent:
        return CudaEvent(self.torch_device)

    @contextmanager
    def stream(self, name: str) -> Iterator[None]:
        stream = self._stream(name)
        stream.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(stream):
            yield

    def wait_for(self, event: Event) -> None:
        assert isinstance(event, CudaEvent), "an event of this device"
        event.delay(torch.cuda.current_stream(self.torch_device))

    def to_host(self, tensor: Tensor) -> HostCopy:
        source = tensor.detach()
        if source.device.type == "cpu":
            return ArrivedCopy(source)
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=not self.pageable)
        with self.stream(_TO_HOST):
            source.record_stream(self._stream(_TO_HOST))
            host.copy_(source, non_blocking=not self.pageable)
            return CudaHostCopy(host, self.record())

    def to_device(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        if tensor.device.type == "cpu" and not self.pageable:
            # Copied even if the tensor is pinned, because its owner may write to it again at once.
            staged = self.empty_pinned(tuple(tensor.shape), tensor.dtype).copy_(tensor)
            tensor = staged
        # Copied in its own element type first. Otherwise torch would convert it on the host, in memory that is not
        # pinned, and the thread would wait for the copy.
        copied = tensor.to(self.torch_device, non_blocking=not self.pageable)
        return copied if dtype is None else copied.to(dtype)

    def empty_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def free_bytes(self) -> int | None:
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return int(free)

    def total_bytes(self) -> int | None:
        _, total = torch.cuda.mem_get_info(self.torch_device)
        return int(total)

    def allocated_bytes(self) -> int | None:
        return int(torch.cuda.memory_allocated(self.torch_device))

    def limit_memory(self, size_bytes: int) -> None:
        _, total = torch.cuda.mem_get_info(self.torch_device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, size_bytes / total), self.torch_device)

    def measure_peak(self, run: Callable[[], object]) -> int | None:
        self.synchronize()
        before = torch.cuda.memory_allocated(self.torch_device)
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        run()
        self.synchronize()
        return max(0, int(torch.cuda.max_memory_allocated(self.torch_device)) - before)

    def _stream(self, name: str) -> torch.cuda.Stream:
        if name not in self._streams:
            self._streams[name] = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        return self._streams[name]
