"""A CUDA device: named streams, events, and copies through pinned memory.

PyTorch's caching allocators own pinned memory and that of the device. Memory that is freed while a copy runs is not
reused before the copy ends, if the allocator knows the stream (`record_stream`; `copy_` does this for pinned memory).
Source: torch/cuda/streams.py, aten/src/ATen/cuda/CachingHostAllocator.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from bottega.device.cpu import ArrivedCopy
from bottega.device.device import Event, HostCopy

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
