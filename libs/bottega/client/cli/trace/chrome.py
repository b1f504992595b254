"""A trace as a file for ui.perfetto.dev and chrome://tracing: their JSON of trace events.

A service is a process, a lane of one of its tracks is a thread. The format: "Trace Event Format", Google, complete
events (`ph: X`) with times in microseconds, and metadata events (`ph: M`) that name processes and threads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bottega.client.cli.trace.lanes import Lane, lanes_of
from bottega.client.types.trace import JobTrace


def chrome_trace(trace: JobTrace) -> str:
    """The file's text."""
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


def _metadata(name: str, pid: int, said: Mapping[str, object]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "args": said}
