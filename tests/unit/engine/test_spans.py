"""What an engine says of the times of a job: each of its parts, on the host's clock, and no more than the bound."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from bottega.device.cpu import CpuDevice
from bottega.device.span import Span
from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.spans import MAX_SPANS, DeviceClock, SpanLog, TracedSpan
from bottega.engine.spec import ResolvedSpec
from bottega.errors import NotFinite
from bottega.model.model import Model
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


def test_those_that_share_turns_say_so(model: Model) -> None:
    easel = ManualEngine(make_engine(model, EngineLimits(max_wait_turns=0)))
    for key in range(2):
        easel.submit(EngineOrder(key=key, spec=SPEC))
    drawings = easel.run()
    facts = [span.facts for span in drawings[0].trace.spans if span.track == "denoise"]
    assert {"requests in the batch": "2"} in facts


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
    clock.set()
    log = SpanLog(clock)
    began_s, begin = time.monotonic(), device.record()
    log.add_of_device("step 0", "denoise", Span(begin=begin, end=device.record()), {})
    log.add_of_device("step 1", "denoise", Span(begin=device.record(), end=OpenEvent()), {})
    (span,) = log.read().spans
    assert span.name == "step 0"
    assert abs(span.begin_s - began_s) < 0.01
