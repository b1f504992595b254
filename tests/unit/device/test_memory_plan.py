"""The budget of a device: who has what, what is left, and what is said of it when it is not enough."""

from __future__ import annotations

import pytest
import torch

from bottega.device.devices import CpuDevice
from bottega.device.memory_plan import DeviceMemoryMeter, MemoryPlan, is_out_of_memory, open_memory_plan
from bottega.errors import TooLarge
from bottega.v1.device_pb2 import DeviceMemory
from tests.fakes.fake_time import FakeTime
from tests.support.memory_device import MemoryDevice

MIB = 1 << 20


def test_reservations_share_one_budget_and_are_named_when_it_is_not_enough() -> None:
    plan = MemoryPlan(100 * MIB)
    plan.reserve("model", 60 * MIB)
    plan.reserve("graphs", 10 * MIB)
    plan.reserve("graphs", 30 * MIB)  # instead of the ten
    assert plan.left_bytes == 10 * MIB
    with pytest.raises(
        TooLarge, match=r"ControlNets would take 11 MiB .* 10 of 100 MiB are left beside model 60 MiB, g"
    ):
        plan.reserve("ControlNets", 11 * MIB)
    assert plan.reserved == {"model": 60 * MIB, "graphs": 30 * MIB}
    plan.release("graphs")
    plan.reserve("ControlNets", 11 * MIB)


def test_what_is_kept_on_the_host_must_be_available_there() -> None:
    plan = MemoryPlan(MIB, available=lambda: 100 * MIB)
    plan.keep_on_host("text_encoder_3", 30 * MIB)
    plan.keep_on_host("text_encoder_3", 60 * MIB)  # 30 MiB of which it has
    assert (plan.on_host, plan.left_bytes) == ({"text_encoder_3": 60 * MIB}, MIB)
    with pytest.raises(
        TooLarge, match=r"text_encoder would take 37 MiB of the host's memory, and 100 MiB are available; keep it on"
    ):
        plan.keep_on_host("text_encoder", 37 * MIB)


def test_rows_that_fit_follow_from_the_peaks_and_one_always_may_try() -> None:
    plan = MemoryPlan(100 * MIB)
    assert plan.most_rows(16, decoded_area=16) is None  # nothing is known
    plan.observe_forward(16, 2, 20 * MIB)
    plan.observe_decoding(16, 30 * MIB)
    assert plan.most_rows(16, decoded_area=16) == 7
    assert plan.most_rows(32, decoded_area=32) == 2
    assert plan.most_rows(32, decoded_area=16) == 3, "where it is decoded in tiles"
    assert plan.most_rows(1000, decoded_area=1000) == 1
    assert plan.needed_bytes(32, decoded_area=16) == 30 * MIB
    assert plan.needed_bytes(64, decoded_area=16) == 40 * MIB


def test_a_size_whose_group_found_no_memory_is_tried_again_after_a_while() -> None:
    plan = MemoryPlan()
    plan.note_out_of_memory(16, 8)
    bounds = [plan.most_rows(16, decoded_area=16) for _ in range(600)]
    assert bounds[:2] == [4, 4]
    assert bounds[-1] is None
    assert plan.most_rows(32, decoded_area=32) is None


def test_without_a_budget_it_is_what_is_free_less_a_reserve_and_a_configured_one_binds_the_allocator() -> None:
    device = MemoryDevice(20_000 * MIB)
    assert open_memory_plan(device, 0).budget_bytes == 19_000 * MIB
    assert device.limit_bytes is None
    assert open_memory_plan(device, 8000).budget_bytes == 8000 * MIB
    assert device.limit_bytes == 8000 * MIB


def test_workers_that_share_a_device_plan_with_no_more_than_it_has_in_any_order() -> None:
    """One that starts again beside the other gets as much as before."""
    device = MemoryDevice(40_000 * MIB)
    first = open_memory_plan(device, 0, share=0.5)
    assert first.budget_bytes == device.limit_bytes == 19_000 * MIB
    first.reserve("model", 18_000 * MIB)
    with pytest.raises(TooLarge, match="1000 of 19000 MiB are left"):
        first.reserve("loras", 1001 * MIB)
    for held_mib, left_mib in ((18_000, 19_000), (30_000, 9488)):
        device.held_bytes = held_mib * MIB
        assert open_memory_plan(device, 0, share=0.5).budget_bytes == left_mib * MIB
    assert open_memory_plan(MemoryDevice(40_000 * MIB), 30_000, share=0.5).budget_bytes == 30_000 * MIB
    assert open_memory_plan(CpuDevice(), 0, share=0.5).budget_bytes is None


def test_a_budget_that_the_device_does_not_have_is_refused_with_what_it_has() -> None:
    with pytest.raises(ValueError, match="device_memory_mib is 8000, and cpu has 6000 MiB free"):
        open_memory_plan(MemoryDevice(6000 * MIB), 8000)
    with pytest.raises(ValueError, match="device_memory_mib limits the memory of a GPU"):
        open_memory_plan(CpuDevice(), 8000)
    assert open_memory_plan(CpuDevice(), 0).budget_bytes is None


@pytest.mark.parametrize(
    ("error", "whether"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported at another call"), True),
        (RuntimeError("CUDA driver error: out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("Triton Error [CUDA]: invalid device context"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_errors_of_memory_are_told_from_others(error: Exception, whether: bool) -> None:
    assert is_out_of_memory(error) is whether


def test_what_keeps_no_more_than_it_is_told_to_leaves_a_part_of_a_small_device(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan = MemoryPlan(100)
    plan.reserve("model", 20)
    assert plan.reserve_up_to("LoRAs", 15, share=0.25) == 15
    assert not caplog.records
    assert plan.reserve_up_to("LoRAs", 1000, share=0.25) == 20, "of what others leave"
    assert (plan.reserved["LoRAs"], plan.left_bytes) == (20, 60)
    assert caplog.records[-1].__dict__["holder"] == "LoRAs"
    assert MemoryPlan(10).reserve_up_to("LoRAs", 1 << 40, share=0.0) == 0
    assert MemoryPlan().reserve_up_to("LoRAs", 1 << 40, share=0.25) == 1 << 40, "of the host nothing is counted"


def test_what_grows_bit_by_bit_is_bounded_with_the_rest() -> None:
    plan = MemoryPlan(100 * MIB)
    plan.reserve("model", 60 * MIB)
    plan.grow("links", 30 * MIB)
    with pytest.raises(TooLarge, match=r"links would take 41 MiB .* 40 of 100 MiB are left beside model 60 MiB"):
        plan.grow("links", 11 * MIB)
    plan.grow("links", 10 * MIB)
    plan.grow("links", -40 * MIB)
    assert plan.left_bytes == 40 * MIB
    plan.reserve("graphs", 40 * MIB)


def test_on_a_cpu_decoding_is_compared_with_what_the_process_can_have_at_that_moment() -> None:
    available: list[int | None] = [1000 * MIB]
    plan = MemoryPlan(available=lambda: available[0])
    plan.reserve("model", 1 << 40)
    plan.observe_decoding(16, 400 * MIB)
    assert plan.fits_decoding(32)
    assert not plan.fits_decoding(40), "the host's reserve counts"
    with pytest.raises(TooLarge, match="640x64 needs about 1000 MiB of memory, and 936 MiB are available") as caught:
        plan.check_picture(640, 64, area=40, decoded_area=40)
    assert caught.value.metadata == {"limit": "device_memory", "needed_mib": "1000"}
    plan.check_picture(640, 64, area=40, decoded_area=16)
    assert plan.most_rows(1 << 20, decoded_area=1 << 20) is None, "forwards are not measured"
    available[0] = 100 * MIB
    assert not plan.fits_decoding(16)
    available[0] = None
    assert plan.fits_decoding(1 << 20)


def test_a_cpu_measures_what_something_takes_for_a_moment() -> None:
    def run() -> None:
        for size_bytes in (64 * MIB, 8 * MIB):
            torch.ones(size_bytes, dtype=torch.uint8)

    for _ in range(2):  # what was freed and kept is not taken for nothing
        peak_bytes = CpuDevice().measure_peak(run)
        assert peak_bytes is not None
        assert 60 * MIB <= peak_bytes <= 90 * MIB


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
