"""Which spans of a trace are drawn in one line, and how long a track was busy."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bottega.client.cli.trace.lanes import busy_s, lanes_of
from bottega.client.types.trace import GATEWAY, JobTrace, TraceSpan


def span(name: str, begin_s: float, end_s: float, *, service: str = "w0", track: str = "denoise") -> TraceSpan:
    return TraceSpan(name=name, service=service, track=track, begin_s=begin_s, seconds=end_s - begin_s)


def lanes(*spans: TraceSpan) -> list[tuple[str, str, list[str]]]:
    found = lanes_of(JobTrace(job_id="job-1", spans=spans))
    return [(lane.service, lane.track, [each.name for each in lane.spans]) for lane in found]


def test_the_gateway_is_first_then_services_and_tracks_as_they_begin() -> None:
    assert lanes(
        span("load", 0.0, 1.0, service="nets", track="edges"),
        span("queue", 0.5, 1.0, service=GATEWAY, track="jobs"),
        span("step 0", 2.0, 3.0),
        span("encode", 1.0, 2.0, track="encode"),
    ) == [
        (GATEWAY, "jobs", ["queue"]),
        ("nets", "edges", ["load"]),
        ("w0", "encode", ["encode"]),
        ("w0", "denoise", ["step 0"]),
    ]


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
