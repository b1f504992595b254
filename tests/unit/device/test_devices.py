"""What a device does with times and copies; the same on every kind."""

from __future__ import annotations

import pytest
import torch

from bottega.addons.loras.worker.download import load_bytes
from bottega.device.device import Device, Span, SpanSum
from bottega.device.devices import open_device
from tests.support.delayed_device import STEPS, DelayedDevice


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Device:
    return open_device(torch.device(request.param))


def test_what_nothing_computes_on_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="device mps is not supported; use cpu or cuda"):
        open_device(torch.device("mps"))


@pytest.mark.parametrize("dtype", [None, torch.float16], ids=str)
def test_a_tensor_goes_to_the_device_and_comes_back(device: Device, dtype: torch.dtype | None) -> None:
    host = torch.randn(3, 5, 7).transpose(0, 2)
    there = device.to_device(host, dtype)
    assert there.device == device.torch_device
    assert there.dtype == (dtype or torch.float32)
    copy = device.to_host(there)
    back = copy.take()
    assert copy.ready
    assert back.device.type == "cpu"
    assert torch.equal(back, host.to(back.dtype))


@pytest.mark.parametrize("size_bytes", [0, 5, (16 << 20) + 3])
def test_a_section_is_loaded_once_and_viewed(device: Device, size_bytes: int) -> None:
    section = torch.arange(size_bytes, dtype=torch.int64).to(torch.uint8)
    there = load_bytes(device, section)
    assert there.device == device.torch_device
    assert torch.equal(there.cpu(), section)
    assert load_bytes(device, there) is there


def test_copies_leave_in_the_order_of_the_stream_that_they_are_asked_in(device: Device) -> None:
    values = device.to_device(torch.zeros(1 << 16))
    copies = []
    for _ in range(20):
        values = values + 1
        copies.append(device.to_host(values))
    assert [int(copy.take()[-1]) for copy in copies] == list(range(1, 21))


def test_a_stream_runs_behind_what_the_one_around_it_was_given(device: Device) -> None:
    made = device.to_device(torch.zeros(1 << 16))
    for _ in range(20):
        made = made + 1
    with device.stream("aside"):
        doubled = 2 * made
        done = device.record()
    device.wait_for(done)
    assert int(device.to_host(doubled.sum()).take()) == 40 * (1 << 16)


@pytest.mark.gpu
def test_neither_copies_nor_times_make_the_thread_wait() -> None:
    device = open_device(torch.device("cuda"))
    device.to_device(torch.ones(16), torch.float16)  # pays for what is made once
    device.to_host(device.to_device(torch.ones(16))).take()
    torch.cuda.set_sync_debug_mode("error")
    try:
        there = device.to_device(torch.ones(16), torch.float16)
        begin = device.record()
        with device.stream("aside"):
            copy = device.to_host(there * 2)
        span = Span(begin=begin, end=device.record())
        span.ready, copy.ready  # noqa: B018 - asking is what is tested
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert int(copy.take().sum()) == 32


def test_a_sum_of_spans_has_those_that_are_over() -> None:
    device, total = DelayedDevice(), SpanSum()
    begin = device.record()
    total.add(Span(begin=begin, end=device.record()))
    device.finish(STEPS)
    second = Span(begin=device.record(), end=device.record())
    total.add(second)
    first_s = total.seconds
    assert first_s > 0
    device.finish(STEPS)
    assert total.seconds == first_s + second.seconds
    assert device.waits == 0
