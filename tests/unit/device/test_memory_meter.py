"""What an engine says of its device's memory."""

from __future__ import annotations

from bottega.device.cpu import CpuDevice
from bottega.device.memory_meter import DeviceMemoryMeter
from bottega.device.memory_plan import MemoryPlan
from bottega.v1.device_pb2 import DeviceMemory
from tests.fakes.fake_time import FakeTime


class _Gpu(CpuDevice):
    """free: what its driver answers; asked counts."""

    def __init__(self) -> None:
        super().__init__()
        self.free, self.asked = 500, 0

    def free_bytes(self) -> int | None:
        self.asked += 1
        return self.free

    def allocated_bytes(self) -> int | None:
        return 300


def test_the_driver_is_asked_once_a_second_however_often_the_heart_beats() -> None:
    gpu, plan, fake = _Gpu(), MemoryPlan(1000), FakeTime()
    plan.reserve("model", 200)
    meter = DeviceMemoryMeter(gpu, plan, clock=fake.monotonic)
    assert meter.last == DeviceMemory()
    for _ in range(9):
        meter.look_if_due()
        fake.now += 0.1
    assert gpu.asked == 1
    said = DeviceMemory(budget_bytes=1000, held_bytes={"model": 200}, allocated_bytes=300, free_bytes=500)
    assert meter.last == said

    gpu.free = 100
    plan.reserve("ControlNets", 400)
    fake.now += 0.2
    meter.look_if_due()
    assert (meter.last.free_bytes, dict(meter.last.held_bytes)) == (100, {"model": 200, "ControlNets": 400})


def test_on_a_cpu_only_what_is_set_aside_is_said() -> None:
    plan = MemoryPlan()
    plan.reserve("model", 200)
    meter = DeviceMemoryMeter(CpuDevice(), plan)
    meter.look_if_due()
    assert meter.last == DeviceMemory(held_bytes={"model": 200})
