"""`bottega trace`: the timeline of a job across all services, as a file for trace viewers and as an SVG picture.

A lane is one row of the timeline. Each service has tracks, such as its queue, and each track has as many lanes as its
spans need: in one lane, two spans are either disjoint or nested, because trace viewers can only draw those.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import click

from bottega.client.cli.options import address_option, connect
from bottega.client.cli.terminal import escaped, fail, note, say
from bottega.client.types.jobs import GATEWAY, JobTrace, TraceSpan
from bottega.state_folder import write_whole

# Two spans that touch within this time do not overlap: seconds have been converted from nanoseconds.
_TOUCH_S = 2e-9

# The picture, in pixels. A picture shows one request; the file for viewers has all lanes.
_WIDTH, _LABELS, _MARGIN, _ROW = 1200, 230, 20, 22
_MOST_LANES = 80
_LETTER = 7
_LABEL_LETTERS = 30
_LEAST_TICKS, _MOST_TICKS = 6, 15
_WAITS, _WAIT_COLOUR = "waits", "#c9ced6"
_COLOURS = ("#4a90d9", "#3a9d5d", "#e08a2e", "#8a63c9", "#c9506b", "#2aa1a8", "#a3822b")


@click.command("trace")
@click.argument("job_id", metavar="JOB")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write or replace; default: trace-JOB.json.",
)
@click.option("--svg", is_flag=True, help="Also draw the timeline as an .svg file of the same name.")
@address_option
def command(*, job_id: str, output: Path | None, svg: bool, address: str) -> None:
    """Show where the time of a job was spent, in all services.

    The file shows queueing, steps, loads, waits and ControlNet calls. Open it at https://ui.perfetto.dev or in
    chrome://tracing; this command sends nothing there. --svg draws a picture that every browser shows, also offline. A
    gateway keeps only the traces of the jobs that ended last.
    """
    if svg and output is not None and output.suffix.lower() == ".svg":
        viewer = output.with_suffix(".json")
        raise click.UsageError(f"-o names the file for a trace viewer, the picture is written beside it: -o {viewer}")
    with connect(address) as client:
        trace = client.job(job_id).trace()
    target = output or Path(f"trace-{trace.job_id}.json")
    _write(target, chrome_trace(trace))
    if svg:
        _write(target.with_suffix(".svg"), draw_timeline(trace))
    _note_tracks(trace)
    note(f"open {target} at https://ui.perfetto.dev")


def _write(target: Path, text: str) -> None:
    try:
        write_whole(target, text.encode())
    except OSError as error:
        fail(f"{target} cannot be written: {error.strerror}", "Name another file with -o FILE.")
    say(str(target))


def _note_tracks(trace: JobTrace) -> None:
    tracks = dict.fromkeys((lane.service, lane.track) for lane in lanes_of(trace))
    for service, track in tracks:
        seconds = busy_s(span for span in trace.spans if (span.service, span.track) == (service, track))
        note(f"  {escaped(service)}, {escaped(track)}: {seconds * 1e3:,.1f} ms")
    if trace.dropped:
        note(f"{trace.dropped} spans were left out, because a trace has a size limit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A row of the timeline."""

    service: str
    track: str
    spans: Sequence[TraceSpan]
    """Spans of the lane, sorted by start; a span comes before those nested in it."""


def lanes_of(trace: JobTrace) -> list[Lane]:
    """Return the lanes of a trace: the gateway's first, then those of other services and tracks by their first span."""
    spans = sorted(trace.spans, key=lambda span: (span.service != GATEWAY, span.begin_s, -span.seconds))
    services = dict.fromkeys(span.service for span in spans)
    return [lane for service in services for lane in _service_lanes(service, spans)]


def busy_s(spans: Iterable[TraceSpan]) -> float:
    """Return the seconds during which at least one of the spans was active."""
    total_s, end_s = 0.0, -math.inf
    for span in sorted(spans, key=lambda span: span.begin_s):
        total_s += max(0.0, span.end_s - max(span.begin_s, end_s))
        end_s = max(end_s, span.end_s)
    return total_s


def _service_lanes(service: str, spans: Sequence[TraceSpan]) -> Iterable[Lane]:
    own = [span for span in spans if span.service == service]
    for track in dict.fromkeys(span.track for span in own):
        for lane in _split(span for span in own if span.track == track):
            yield Lane(service=service, track=track, spans=lane)


def _split(spans: Iterable[TraceSpan]) -> list[list[TraceSpan]]:
    """Distribute spans over lanes: each goes into the first lane in which it overlaps no other, or is nested."""
    lanes: list[list[TraceSpan]] = []
    open_ends: list[list[float]] = []  # for each lane, the ends of the spans that are under way, the innermost last
    for span in spans:
        for lane, ends in zip(lanes, open_ends, strict=True):
            while ends and ends[-1] <= span.begin_s + _TOUCH_S:
                ends.pop()
            if not ends or span.end_s <= ends[-1] + _TOUCH_S:
                lane.append(span)
                ends.append(span.end_s)
                break
        else:
            lanes.append([span])
            open_ends.append([span.end_s])
    return lanes


def chrome_trace(trace: JobTrace) -> str:
    """Return a trace as JSON for ui.perfetto.dev and chrome://tracing. A service is a process, a lane is a thread.

    Source: "Trace Event Format", Google: complete events (`ph: X`) with times in microseconds, and metadata events
    (`ph: M`) that name processes and threads.
    """
    lanes = lanes_of(trace)
    pids = {service: pid for pid, service in enumerate(dict.fromkeys(lane.service for lane in lanes), 1)}
    events = [event for tid, lane in enumerate(lanes, 1) for event in _events(lane, pids[lane.service], tid)]
    named = [event for service, pid in pids.items() for event in _service(service, pid)]
    about = {"job": trace.job_id, "spans left out": trace.dropped}
    return json.dumps({"displayTimeUnit": "ms", "otherData": about, "traceEvents": [*named, *events]}) + "\n"


def _service(name: str, pid: int) -> Sequence[dict[str, Any]]:
    return _metadata("process_name", pid, {"name": name}), _metadata("process_sort_index", pid, {"sort_index": pid})


def _events(lane: Lane, pid: int, tid: int) -> Iterable[dict[str, Any]]:
    yield {**_metadata("thread_name", pid, {"name": lane.track}), "tid": tid}
    yield {**_metadata("thread_sort_index", pid, {"sort_index": tid}), "tid": tid}
    for span in lane.spans:
        yield {
            "ph": "X",
            "name": span.name,
            "cat": lane.track,
            "pid": pid,
            "tid": tid,
            "ts": span.begin_s * 1e6,
            "dur": span.seconds * 1e6,
            "args": dict(span.facts),
        }


def _metadata(name: str, pid: int, arguments: Mapping[str, object]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "args": arguments}


def draw_timeline(trace: JobTrace) -> str:
    """Return a trace as an SVG picture: a row for each lane, time from left to right, waits in grey."""
    lanes = lanes_of(trace)
    end_s = max((span.end_s for span in trace.spans), default=0.0) or 1e-3
    scale = (_WIDTH - _LABELS - _MARGIN) / end_s
    parts, colours = [], dict[str, str]()
    y, before = 60, None
    for lane in lanes[:_MOST_LANES]:
        if before is None or lane.service != before.service:
            y += _ROW + 4
            parts.append(_label(_MARGIN, y - 8, lane.service, "#1f2430"))
        if before is None or (lane.service, lane.track) != (before.service, before.track):
            parts.append(_label(_MARGIN + 12, y + 15, lane.track, "#5d6675"))
        free = _COLOURS[len(colours) % len(_COLOURS)]
        colour = _WAIT_COLOUR if lane.track == _WAITS else colours.setdefault(lane.track, free)
        parts += [
            _bar(span, _LABELS + span.begin_s * scale, y, max(span.seconds * scale, 1), colour) for span in lane.spans
        ]
        y, before = y + _ROW, lane
    parts += [_tick(_LABELS + moment_s * scale, y, moment_s) for moment_s in _ticks(end_s)]
    services = len({lane.service for lane in lanes})
    left_out = f"; {trace.dropped} spans were left out" if trace.dropped else ""
    more = f"; the file for viewers has {len(lanes) - _MOST_LANES} more rows" if len(lanes) > _MOST_LANES else ""
    about = f"{end_s:.3f} s from its acceptance, in {services} service{'' if services == 1 else 's'}{left_out}{more}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 40}" width="{_WIDTH}"'
        ' font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="#ffffff"/>\n'
        f'<text x="{_MARGIN}" y="28" font-size="18">Job {_xml(trace.job_id)}</text>'
        f'<text x="{_MARGIN}" y="48" fill="#5d6675">{_xml(about)}</text>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _label(x: float, y: float, text: str, ink: str) -> str:
    cut = text if len(text) <= _LABEL_LETTERS else f"{text[: _LABEL_LETTERS - 1]}…"
    return f'<text x="{x}" y="{y}" fill="{ink}">{_xml(cut)}</text>'


def _bar(span: TraceSpan, x: float, y: float, width: float, colour: str) -> str:
    """Return the SVG of a span. Its text is a tooltip, and is also written into the bar where it fits."""
    text = f"{span.name}  {_duration_text(span.seconds)}"
    number = span.name.rpartition("step ")[2]
    shown = next((each for each in (text, span.name, number) if _LETTER * len(each) <= width - 6), "")
    ink = "#1f2430" if colour == _WAIT_COLOUR else "#ffffff"
    label = f'<text x="{x + 4:.1f}" y="{y + 15}" fill="{ink}">{_xml(shown)}</text>' if shown else ""
    return (
        f'<g><title>{_xml(text)}</title><rect x="{x:.1f}" y="{y + 1}" width="{width:.1f}" height="{_ROW - 3}"'
        f' fill="{colour}"/>{label}</g>'
    )


def _tick(x: float, bottom: float, moment_s: float) -> str:
    return (
        f'<path d="M{x:.1f} 60V{bottom + 6}" stroke="#5d6675" stroke-opacity="0.2"/>'
        f'<text x="{x:.1f}" y="{bottom + 22}" text-anchor="middle" fill="#5d6675">{_duration_text(moment_s)}</text>'
    )


def _ticks(end_s: float) -> Iterator[float]:
    """Yield the times of the axis labels: multiples of 1, 2 or 5 times a power of ten."""
    steps = (base * 10.0**power for power in range(-4, 7) for base in (1, 2, 5))
    step_s = next((step for step in steps if end_s / step < _MOST_TICKS), end_s / _LEAST_TICKS)
    return (number * step_s for number in range(int(end_s / step_s) + 1))


def _duration_text(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 or not seconds else f"{seconds * 1e3:.3g} ms"


def _xml(text: str) -> str:
    """Return untrusted text escaped for XML, without control characters, which XML does not allow."""
    return escape(escaped(text))
