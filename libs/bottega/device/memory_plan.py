"""The memory budget of a device: reservations by name, and the memory that drawing an image needs in addition.

The memory of forward passes and of decoding is measured once. It is proportional to the elements of latents; attention
needs no more than that in any of torch's fused kernels.

A CPU has no budget: reservations are not limited, and forward passes are not measured. Decoding needs the most memory.
It is compared with the memory that is available to the process at that moment, because the kernel kills a process where
a GPU's allocator would raise an error.

`DeviceMemoryMeter` reads the memory in use, and `is_out_of_memory` recognizes errors about too little of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from bottega.device.device import Device
from bottega.errors import TooLarge
from bottega.process.memory import available_bytes
from bottega.v1.device_pb2 import DeviceMemory

_log = logging.getLogger(__name__)

_MIB = 1 << 20
# Bytes left to the device's libraries if no budget is set: torch does not allocate their workspaces.
_LEAST_RESERVE_BYTES = 512 * _MIB
_RESERVE_SHARE = 0.05
# Bytes left to other processes on the host.
_HOST_RESERVE_BYTES = 64 * _MIB
# After so many forward passes with smaller batches, larger ones are tried again, because more memory may be free.
_FORGET_AFTER = 500
# Upper bound on the latent sizes whose smaller batches are remembered.
_MOST_SIZES = 64


class MemoryPlan:
    """The plan of one device's memory.

    Links reserve and release memory from threads of their own. All other calls come from the thread that computes.

    Args:
        budget_bytes: Device memory for this process; None if reservations are not limited.
        available: Returns the bytes of host memory that are available to the process now, or None if unknown. Without a
            budget, they bound what is computed.
    """

    def __init__(self, budget_bytes: int | None = None, *, available: Callable[[], int | None] = lambda: None) -> None:
        self.budget_bytes = budget_bytes
        self._available = available
        self._lock = threading.Lock()  # Guards the reservations.
        self._reserved: dict[str, int] = {}
        self._on_host: dict[str, int] = {}
        self._row_bytes = 0.0
        self._decoding_bytes = 0.0
        self._refused: dict[int, tuple[int, int]] = {}

    @property
    def reserved(self) -> Mapping[str, int]:
        """Reserved bytes by name."""
        with self._lock:
            return MappingProxyType(dict(self._reserved))

    @property
    def on_host(self) -> Mapping[str, int]:
        """Bytes of host memory that are kept for the device, by name."""
        with self._lock:
            return MappingProxyType(dict(self._on_host))

    @property
    def left_bytes(self) -> int | None:
        """Bytes of the budget that are not reserved, for activations; None if memory is not limited."""
        if self.budget_bytes is not None:
            return max(0, self.budget_bytes - sum(self.reserved.values()))
        available = self._available()
        return None if available is None else max(0, available - _HOST_RESERVE_BYTES)

    def reserve(self, name: str, size_bytes: int) -> None:
        """Reserve bytes under a name, replacing its earlier reservation. Raise TooLarge if too few are left."""
        with self._lock:
            self._set(name, size_bytes)

    def reserve_up_to(self, name: str, size_bytes: int, *, share: float) -> int:
        """Reserve `size_bytes`, or a share of the remaining bytes if that is less. Return the number of reserved bytes.

        For users of memory that also work with less, so that an engine starts on a small device, too.

        Args:
            name: Name of the reservation.
            size_bytes: Wanted bytes.
            share: Largest share of the remaining bytes, in [0, 1].
        """
        with self._lock:
            if self.budget_bytes is not None:
                others = sum(size for holder, size in self._reserved.items() if holder != name)
                most = int(share * max(0, self.budget_bytes - others))
                if size_bytes > most:
                    facts = {"holder": name, "wanted_mib": size_bytes // _MIB, "taken_mib": most // _MIB}
                    _log.warning("the device has less memory left than is configured for one of its uses", extra=facts)
                    size_bytes = most
            self._reserved[name] = size_bytes
        return size_bytes

    def grow(self, name: str, change_bytes: int) -> None:
        """Change a reservation by `change_bytes`. Raise TooLarge if too few bytes are left."""
        with self._lock:
            self._set(name, self._reserved.get(name, 0) + change_bytes)

    def release(self, name: str) -> None:
        """Drop what is reserved, or kept on the host, under a name, if there is something."""
        with self._lock:
            self._reserved.pop(name, None)
            self._on_host.pop(name, None)
        self._refused.clear()

    def keep_on_host(self, name: str, size_bytes: int) -> None:
        """Record bytes of host memory under a name. Raise TooLarge if the host has too few available.

        Args:
            size_bytes: Bytes; what an earlier call recorded under the name is taken already.
        """
        left_bytes = self._available()
        with self._lock:
            more_bytes = size_bytes - self._on_host.get(name, 0)
            if left_bytes is not None and more_bytes > left_bytes - _HOST_RESERVE_BYTES:
                raise TooLarge(
                    f"{name} would take {more_bytes // _MIB} MiB of the host's memory, and {left_bytes // _MIB} MiB "
                    "are available; keep it on the device, or use a smaller dtype for it",
                    metadata={"limit": "host_memory", "needed_mib": str(more_bytes // _MIB)},
                )
            self._on_host[name] = size_bytes

    def observe_forward(self, area: int, rows: int, peak_bytes: int | None) -> None:
        """Record the memory that a forward pass needed in addition to the weights.

        Args:
            area: Height times width of a latent, in latent elements.
            rows: Number of batch rows.
            peak_bytes: Peak of the used bytes; None if it was not measured.
        """
        self._row_bytes = max(self._row_bytes, (peak_bytes or 0) / (area * rows))

    def observe_decoding(self, area: int, peak_bytes: int | None) -> None:
        """Record the memory that decoding needed.

        Args:
            area: Elements of the latent that are decoded together.
            peak_bytes: Peak of the used bytes; None if it was not measured.
        """
        self._decoding_bytes = max(self._decoding_bytes, (peak_bytes or 0) / area)

    def fits_decoding(self, area: int) -> bool:
        """Return whether a latent of `area` elements can be decoded in one piece, by the measurements so far."""
        needed, left = self._decoding_bytes * area, self.left_bytes
        return left is None or needed <= left

    def needed_bytes(self, area: int, *, decoded_area: int) -> int:
        """Return how many bytes an image needs that is drawn alone, one batch row at a time.

        Args:
            area: Height times width of its latent, in latent elements.
            decoded_area: Elements that are decoded together.
        """
        return round(max(self._row_bytes * area, self._decoding_bytes * decoded_area))

    def check_picture(self, width: int, height: int, *, area: int, decoded_area: int) -> None:
        """Raise TooLarge for an image that does not fit into memory even if it is drawn alone.

        Args:
            width: Width in pixels.
            height: Height in pixels.
            area: Height times width of its latent, in latent elements.
            decoded_area: Elements that are encoded or decoded together.
        """
        needed, left = self.needed_bytes(area, decoded_area=decoded_area), self.left_bytes
        if left is None or needed <= left:
            return
        whose, have = "the device's memory", self._left_text()
        if self.budget_bytes is None:
            whose, have = "memory", f"{left // _MIB} MiB are available to this worker"
        raise TooLarge(
            f"{width}x{height} needs about {needed // _MIB} MiB of {whose}, and {have}; ask for fewer pixels",
            metadata=self._facts(needed),
        )

    def leaves_room(self, area: int, rows: int, *, decoded_area: int) -> bool:
        """Return whether reservations leave memory for a forward pass of `rows` rows, and to decode one latent.

        Args:
            area: Height times width of a latent, in latent elements.
            rows: Batch rows of the forward pass.
            decoded_area: Elements of such a latent that are decoded together.
        """
        needed, left = max(self._row_bytes * rows * area, self._decoding_bytes * decoded_area), self.left_bytes
        return left is None or needed <= left

    def refusal(self, width: int, height: int) -> TooLarge:
        """Return the error for an image that ran out of device memory while it was drawn."""
        why = "" if self.budget_bytes is None else f": {self._left_text()}"
        return TooLarge(
            f"the device does not have enough memory for {width}x{height}, even alone{why}; ask for fewer pixels",
            metadata={"limit": "device_memory", "size": f"{width}x{height}"},
        )

    def most_rows(self, area: int, *, decoded_area: int) -> int | None:
        """Return how many rows with such latents fit into one forward pass, beside decoding; None for any number.

        The number is at least 1. Call it once before each forward pass, because calls are counted.

        Args:
            area: Height times width of a latent, in latent elements.
            decoded_area: Elements of such a latent that are decoded together.
        """
        bounds = []
        if self._row_bytes and (left := self.left_bytes) is not None:
            free = left - self._decoding_bytes * decoded_area
            bounds.append(max(1, int(free // (self._row_bytes * area))))
        if area in self._refused:
            rows, forwards = self._refused.pop(area)
            bounds.append(rows)
            if forwards > 1:
                self._refused[area] = (rows, forwards - 1)
        return min(bounds, default=None)

    def note_out_of_memory(self, area: int, rows: int) -> None:
        """Record that a forward pass ran out of memory.

        For a while, batches of this latent size have half as many rows.
        """
        if area not in self._refused and len(self._refused) >= _MOST_SIZES:
            return
        self._refused[area] = (max(1, rows // 2), _FORGET_AFTER)
        facts = {"rows": rows, "latent_elements": area}
        _log.warning("the device ran out of memory in a forward pass; its batch is split", extra=facts)

    def _set(self, name: str, size_bytes: int) -> None:
        """Set a reservation. The lock must be held."""
        before = self._reserved.get(name, 0)
        others = {holder: size for holder, size in self._reserved.items() if holder != name}
        too_much = self.budget_bytes is not None and sum(others.values()) + size_bytes > self.budget_bytes
        if too_much and size_bytes > before:
            raise TooLarge(
                f"{name} would take {size_bytes // _MIB} MiB of the device, and {self._left_beside(others)}; "
                "raise device_memory_mib, or use a larger device",
                metadata=self._facts(size_bytes),
            )
        self._reserved[name] = size_bytes

    def _left_text(self) -> str:
        return self._left_beside(self.reserved)

    def _left_beside(self, others: Mapping[str, int]) -> str:
        """Return a text with the remaining bytes of the budget and what the others are reserved for."""
        holders = ", ".join(f"{name} {size // _MIB} MiB" for name, size in others.items() if size)
        left = (self.budget_bytes or 0) - sum(others.values())
        return f"{max(0, left) // _MIB} of {(self.budget_bytes or 0) // _MIB} MiB are left" + (
            f" beside {holders}" if holders else ""
        )

    def _facts(self, needed_bytes: int) -> dict[str, str]:
        facts = {"limit": "device_memory", "needed_mib": str(needed_bytes // _MIB)}
        if self.budget_bytes is None:
            return facts
        return facts | {"device_memory_mib": str(self.budget_bytes // _MIB)}


def open_memory_plan(device: Device, budget_mib: int, *, share: float = 1.0) -> MemoryPlan:
    """Return the memory plan of a device. Call it before anything is on the device.

    Args:
        device: The device.
        budget_mib: Memory for this process in MiB; 0 for all that is free, minus a reserve.
        share: Without a budget, the largest share of the whole device for this process, in (0, 1]. A share of what is
            free would depend on which of several processes starts first.

    Raises:
        ValueError: The device does not have so much, or is a CPU.
    """
    free_bytes = device.free_bytes()
    if free_bytes is None:
        if budget_mib:
            raise ValueError("device_memory_mib limits the memory of a GPU; on a CPU, limit that of the service's unit")
        return MemoryPlan(available=available_bytes)
    if budget_mib * _MIB > free_bytes:
        raise ValueError(
            f"device_memory_mib is {budget_mib}, and {device.torch_device} has {free_bytes // _MIB} MiB free"
        )
    if budget_mib:
        device.limit_memory(budget_mib * _MIB)
        return MemoryPlan(budget_mib * _MIB, available=available_bytes)
    most_bytes = min(free_bytes, int(share * (device.total_bytes() or free_bytes)))
    budget_bytes = most_bytes - max(_LEAST_RESERVE_BYTES, round(_RESERVE_SHARE * most_bytes))
    if share < 1:
        device.limit_memory(max(0, budget_bytes))
    return MemoryPlan(budget_bytes, available=available_bytes)


# Rarely, because a driver may take a millisecond to answer.
_LOOK_S = 1.0


class DeviceMemoryMeter:
    """Reads a device's memory, at most once a second.

    Attributes:
        last: The last reading; not to be changed.

    Args:
        device: The device.
        plan: The plan of its memory.
        clock: Returns monotonic seconds.
    """

    def __init__(self, device: Device, plan: MemoryPlan, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._device = device
        self._plan = plan
        self._clock = clock
        self._read_at = float("-inf")
        self.last = DeviceMemory()

    def look_if_due(self) -> None:
        """Read the memory if a second has passed since the last reading.

        Call it between two forward passes, because the device must not be asked while CUDA graphs are recorded.
        """
        now = self._clock()
        if now - self._read_at >= _LOOK_S:
            self._read_at = now
            self.last = DeviceMemory(
                budget_bytes=self._plan.budget_bytes or 0,
                held_bytes=self._plan.reserved,
                host_bytes=self._plan.on_host,
                allocated_bytes=self._device.allocated_bytes() or 0,
                free_bytes=self._device.free_bytes() or 0,
            )


# Messages of libraries below torch, which torch raises as plain errors: of cuBLAS and cuDNN, of CUDA where torch's
# allocator is not involved (pinned memory, kernels that are loaded at their first use, graphs), of Triton's launches,
# and of the host. Source: aten/src/ATen/cuda/Exceptions.h, cudnn's status names, c10/cuda/CUDAException.cpp,
# c10/cuda/driver_api.h, triton/backends/nvidia/driver.c, c10/core/impl/alloc_cpu.cpp.
_OUT_OF_MEMORY = (
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "can't allocate memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory was short, so that a smaller batch may succeed."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _OUT_OF_MEMORY)
