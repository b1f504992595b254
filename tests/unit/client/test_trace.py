"""What `bottega trace` writes: the file for trace viewers, the picture, and the lanes that both have."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.client.cli.trace import busy_s, chrome_trace, draw_timeline, lanes_of
from bottega.client.types.jobs import GATEWAY, JobTrace, TraceSpan

SVG = "{http://www.w3.org/2000/svg}"
TRACE = JobTrace(
    job_id="job-1",
    spans=(
        TraceSpan(name="queue", service=GATEWAY, track="jobs", begin_s=0.001, seconds=0.5),
        TraceSpan(name="step 0", service="w0", track="denoise", begin_s=0.6, seconds=0.25, facts={"rows": "2"}),
        TraceSpan(name="waiting for residuals", service="w0", track="waits", begin_s=0.7, seconds=0.1),
    ),
    dropped=3,
)


def test_the_file_names_services_and_tracks_and_has_every_span_in_microseconds() -> None:
    written = json.loads(chrome_trace(TRACE))
    assert written["otherData"] == {"job": "job-1", "spans left out": 3}
    events = written["traceEvents"]
    processes = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    threads = {(each["pid"], each["tid"]): each["args"]["name"] for each in events if each["name"] == "thread_name"}
    spans = [each for each in events if each["ph"] == "X"]
    assert [
        (processes[each["pid"]], threads[each["pid"], each["tid"]], each["name"], round(each["ts"]), round(each["dur"]))
        for each in spans
    ] == [
        ("gateway", "jobs", "queue", 1_000, 500_000),
        ("w0", "denoise", "step 0", 600_000, 250_000),
        ("w0", "waits", "waiting for residuals", 700_000, 100_000),
    ]
    assert [each["args"] for each in spans] == [{}, {"rows": "2"}, {}]


def bars(trace: JobTrace) -> dict[str, ET.Element]:
    """The bars of a trace's picture, by what a browser shows of them."""
    groups = ET.fromstring(draw_timeline(trace)).iter(f"{SVG}g")
    return {str(group.findtext(f"{SVG}title")): group.find(f"{SVG}rect") for group in groups}  # type: ignore[misc]


def test_the_picture_has_a_bar_where_something_took_time() -> None:
    drawn = bars(TRACE)
    assert list(drawn) == ["queue  500 ms", "step 0  250 ms", "waiting for residuals  100 ms"]
    queue, step, wait = (float(bar.get("width", 0)) for bar in drawn.values())
    assert [step / queue, wait / queue] == pytest.approx([0.5, 0.2], abs=0.01)
    assert float(drawn["step 0  250 ms"].get("x", 0)) > float(drawn["queue  500 ms"].get("x", 0)) + queue
    grey = drawn["waiting for residuals  100 ms"].get("fill")
    assert [bar.get("fill") == grey for bar in drawn.values()] == [False, False, True]


def test_names_cannot_break_the_picture() -> None:
    name = "<script>\x00\ud800&"
    span = TraceSpan(name=name, service=name, track=name, begin_s=0.0, seconds=1.0)
    assert list(bars(JobTrace(job_id=name, spans=(span,)))) == ["<script>\\x00\\ud800&  1 s"]


def test_a_trace_without_spans_and_one_with_hundreds_of_lanes_are_drawn() -> None:
    assert not bars(JobTrace(job_id="job-1", spans=()))
    many = tuple(
        TraceSpan(name="load", service=f"w{number}" * 40, track="LoRA " + "x" * 200, begin_s=0.0, seconds=1.0)
        for number in range(300)
    )
    picture = draw_timeline(JobTrace(job_id="job-1", spans=many))
    assert picture.count("<rect") == 1 + 80
    assert "220 more rows" in picture


def span(name: str, begin_s: float, end_s: float, *, service: str = "w0", track: str = "denoise") -> TraceSpan:
    return TraceSpan(name=name, service=service, track=track, begin_s=begin_s, seconds=end_s - begin_s)


def lanes(*spans: TraceSpan) -> list[tuple[str, str, list[str]]]:
    found = lanes_of(JobTrace(job_id="job-1", spans=spans))
    return [(lane.service, lane.track, [each.name for each in lane.spans]) for lane in found]


def test_spans_that_overlap_have_lanes_of_their_own_and_those_within_others_do_not() -> None:
    assert lanes(
        span("whole", 0.0, 10.0),
        span("within", 1.0, 9.0),
        span("deeper", 2.0, 3.0),
        span("overlaps", 9.5, 11.0),
        span("after both", 12.0, 13.0),
    ) == [("w0", "denoise", ["whole", "within", "deeper", "after both"]), ("w0", "denoise", ["overlaps"])]


SPANS = st.lists(
    st.builds(
        lambda begin, length: span("any", float(begin), float(begin + length)), st.integers(-5, 20), st.integers(0, 9)
    ),
    max_size=30,
)


@given(SPANS)
def test_in_a_lane_spans_follow_one_another_or_lie_in_each_other(spans: list[TraceSpan]) -> None:
    found = lanes_of(JobTrace(job_id="job-1", spans=tuple(spans)))
    assert sorted(id(each) for lane in found for each in lane.spans) == sorted(map(id, spans))
    for lane in found:
        for place, one in enumerate(lane.spans):
            for other in lane.spans[place + 1 :]:
                assert other.begin_s >= one.end_s or other.end_s <= one.end_s


@given(SPANS)
def test_busy_seconds_count_each_moment_once(spans: list[TraceSpan]) -> None:
    moments = {at for each in spans for at in range(int(each.begin_s), int(each.end_s))}
    assert busy_s(spans) == len(moments)
