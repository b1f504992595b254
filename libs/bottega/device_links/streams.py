"""CUDA streams for the device work of a link's thread, which runs beside the engine's work.

A CPU has no streams: work is done when the call returns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from bottega.transport import Deadline

# Pauses between checks whether a device has reached a moment. The first are short, because most copies take
# microseconds.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2e-5, 1e-3

_of_thread = threading.local()


def mark(device: torch.device) -> torch.cuda.Event | None:
    """Return an event that marks the current point of the current stream; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


@contextmanager
def beside(device: torch.device, after: torch.cuda.Event | None = None) -> Iterator[None]:
    """Enqueue the work of the block in this thread's own stream, after the event `after` of another stream."""
    if device.type != "cuda":
        yield
        return
    stream = _stream(device)
    if after is not None:
        stream.wait_event(after)
    with torch.cuda.stream(stream):
        yield


def keep_until_used(tensor: Tensor) -> None:
    """Keep the memory of a tensor that another stream created until the current stream has read it."""
    if tensor.device.type == "cuda":
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def has_come(moment: torch.cuda.Event | None) -> bool:
    """Return whether the device has reached an event from `mark`; True for None."""
    return moment is None or bool(moment.query())  # type: ignore[no-untyped-call]


def reached(moment: torch.cuda.Event | None, deadline: Deadline) -> bool:
    """Wait until the device has reached an event from `mark`. Return False at the deadline."""
    pause_s = _FIRST_PAUSE_S
    while not has_come(moment):
        left_s = deadline.left_s()
        if left_s == 0:
            return False
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return True


def _stream(device: torch.device) -> torch.cuda.Stream:
    streams: dict[torch.device, torch.cuda.Stream] | None = getattr(_of_thread, "streams", None)
    if streams is None:
        streams = _of_thread.streams = {}
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return streams[device]
