"""What `bottega trace` writes: the file for trace viewers, and the picture."""

from __future__ import annotations

import json

from bottega.client.cli.trace.chrome import chrome_trace
from bottega.client.cli.trace.timeline import WIDTH, draw_timeline
from bottega.client.types.trace import GATEWAY, JobTrace, TraceSpan, trace_from
from bottega.v1 import trace_pb2

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


def test_the_picture_has_a_bar_where_something_took_time() -> None:
    image = draw_timeline(TRACE)
    assert image.width == WIDTH
    # Half a second of .85: the first bar, and nothing behind it.
    first = next(y for y in range(100, image.height) if image.getpixel((400, y)) == (74, 144, 217))
    row = [image.getpixel((x, first + 2)) for x in range(300, WIDTH - 28)]
    share = sum(pixel == (74, 144, 217) for pixel in row) / len(row)
    assert 0.55 < share < 0.62
    colours = {image.getpixel((x, y)) for x in range(310, WIDTH - 28, 3) for y in range(100, image.height, 3)}
    assert (201, 206, 214) in colours  # what waits is grey


def test_a_trace_without_spans_and_one_with_hundreds_of_lanes_are_drawn() -> None:
    assert draw_timeline(JobTrace(job_id="job-1", spans=())).width == WIDTH
    many = tuple(
        TraceSpan(name="load", service=f"w{number}" * 40, track="LoRA " + "x" * 200, begin_s=0.0, seconds=1.0)
        for number in range(300)
    )
    assert draw_timeline(JobTrace(job_id="job-1", spans=many)).height < 8000


def test_what_the_wire_leaves_open_is_the_gateways() -> None:
    message = trace_pb2.Trace(
        spans=[trace_pb2.Span(name="queue", track="jobs", begin_ns=1_500_000_000, duration_ns=10, facts={"a": "b"})],
        dropped=2,
    )
    trace = trace_from("job-1", message)
    assert (trace.job_id, trace.dropped) == ("job-1", 2)
    assert trace.spans == (
        TraceSpan(name="queue", service=GATEWAY, track="jobs", begin_s=1.5, seconds=1e-8, facts={"a": "b"}),
    )
