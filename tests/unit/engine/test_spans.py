"""What an engine says of the times of a job: each of its parts, on the host's clock, and no more than the bound."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bottega.device.device import Span
from bottega.device.devices import CpuDevice
from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.spans import MAX_SPANS, DeviceClock, SpanLog, StoreWork, TracedSpan
from bottega.engine.spec import ResolvedSpec
from bottega.errors import NotFinite
from bottega.model.model import Model
from bottega.v1.trace_pb2 import StoreTimes
from tests.samples.small_model import SIZE
from tests.support.engines import make_engine
from tests.support.manual_engine import ManualEngine

SPEC = ResolvedSpec(prompt="a red star", width=SIZE, height=SIZE, num_inference_steps=4, seed=7)


def test_a_job_says_how_long_encoding_each_step_and_decoding_took(model: Model) -> None:
    easel = ManualEngine(make_engine(model, EngineLimits()))
    before_s = time.monotonic()
    drawing = easel.draw(EngineOrder(key=0, spec=replace(SPEC, num_images=2)))
    after_s = time.monotonic()
    trace = drawing.trace
    assert trace.dropped == 0
    names = [span.name for span in trace.spans]
    assert names[0] == "encode"
    assert [name for name in names if name.startswith("decode")] == ["decode image 0", "decode image 1"]
    steps = [span for span in trace.spans if span.track == "denoise"]
    made = ", ".join(span.name for span in steps).split(", ")
    assert sorted(made) == [f"step {step} of image {image}" for step in range(4) for image in range(2)]
    assert all(before_s <= span.begin_s <= span.begin_s + span.seconds <= after_s for span in trace.spans)
    assert [span.begin_s for span in trace.spans] == sorted(span.begin_s for span in trace.spans)
    seconds = drawing.record.seconds
    assert abs(sum(span.seconds for span in trace.spans if span.track == "decode") - seconds["decode"]) < 1e-6
    assert sum(span.seconds for span in steps) >= seconds["denoise"] - 1e-6


def test_a_job_that_fails_says_what_it_took_until_then(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.vae.decoder.conv_out, "bias", nn.Parameter(torch.full((3,), torch.nan)))
    drawing = ManualEngine(make_engine(model, EngineLimits())).draw(EngineOrder(key=0, spec=SPEC))
    assert isinstance(drawing.error, NotFinite)
    names = [span.name for span in drawing.trace.spans]
    assert names == ["encode", "step 0", "step 1", "step 2", "step 3"]


def test_a_log_is_bounded_and_counts_what_it_leaves_out() -> None:
    log = SpanLog(DeviceClock(CpuDevice()))
    for number in range(MAX_SPANS + 5):
        log.add(TracedSpan(name=str(number), track="any", begin_s=float(-number), seconds=1.0))
    trace = log.read()
    assert (len(trace.spans), trace.dropped) == (MAX_SPANS, 5)
    assert trace.spans[0].name == str(MAX_SPANS - 1)


class OpenEvent:
    """Of a device that has not come so far."""

    ready = False

    def seconds_since(self, earlier: object) -> float:
        raise AssertionError("nobody waits for a device that may never come there")

    def wait(self) -> None:
        raise AssertionError("nobody waits for a device that may never come there")


def test_what_the_device_has_not_done_is_left_out_and_nobody_waits_for_it() -> None:
    device = CpuDevice()
    clock = DeviceClock(device)
    set_s = time.monotonic()
    clock.set()
    since_s = time.monotonic() - set_s + 1e-3  # It may have been set any time within.
    log = SpanLog(clock)
    before_s, begin, after_s = time.monotonic(), device.record(), time.monotonic()
    log.add_of_device("step 0", "denoise", Span(begin=begin, end=device.record()), {})
    log.add_of_device("step 1", "denoise", Span(begin=device.record(), end=OpenEvent()), {})
    (span,) = log.read().spans
    assert span.name == "step 0"
    assert before_s - since_s <= span.begin_s <= after_s + since_s


PARTS = [field.name for field in StoreTimes.DESCRIPTOR.fields]
SECONDS = st.floats(0.0, 86_400.0)


def work(times: StoreTimes, answered_s: float = 12.0, sent_s: float | None = None) -> StoreWork:
    return StoreWork(store="s", times=times, asked_s=10.0, answered_s=answered_s, sent_s=sent_s)


def placed(spans: list[TracedSpan]) -> list[tuple[str, str, float, float]]:
    return [(span.name, span.track, round(span.begin_s, 6), round(span.begin_s + span.seconds, 6)) for span in spans]


def test_parts_follow_one_another_in_the_middle_of_the_time_until_the_answer() -> None:
    spans = list(work(StoreTimes(search_s=0.25, read_s=0.5, send_wait_s=0.25)).spans("look-ups"))
    assert placed(spans) == [
        ("search", "look-ups", 10.5, 10.75),
        ("read from the disk", "look-ups", 10.75, 11.25),
        ("wait to be sent", "waits", 11.25, 11.5),
    ]
    assert {span.service for span in spans} == {"s"}


def test_what_came_piece_by_piece_was_being_sent_until_its_end() -> None:
    spans = list(work(StoreTimes(wait_s=2.0), sent_s=15.5).spans("LoRA ink"))
    assert placed(spans) == [("wait for its turn", "waits", 10.0, 12.0), ("send", "LoRA ink", 12.0, 15.5)]


@given(parts=st.dictionaries(st.sampled_from(PARTS), SECONDS), seen_s=st.floats(-1.0, 1e6))
def test_whatever_a_store_says_stands_within_what_was_seen(parts: dict[str, float], seen_s: float) -> None:
    spans = list(work(StoreTimes(**parts), answered_s=10.0 + seen_s).spans("look-ups"))
    end_s = 10.0 + max(0.0, seen_s)
    assert all(span.seconds >= 0.0 for span in spans)
    assert all(10.0 - 1e-6 <= span.begin_s <= span.begin_s + span.seconds <= end_s + 1e-6 for span in spans)
    for one, next_one in pairwise(spans):
        assert one.begin_s + one.seconds == pytest.approx(next_one.begin_s)
