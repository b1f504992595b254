"""Reads the memory of an engine on its device, rarely, because a driver may take a millisecond to answer."""

from __future__ import annotations

import time
from collections.abc import Callable

from bottega.device.device import Device
from bottega.device.memory_plan import MemoryPlan
from bottega.v1.device_pb2 import DeviceMemory

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
                allocated_bytes=self._device.allocated_bytes() or 0,
                free_bytes=self._device.free_bytes() or 0,
            )
