"""What a link's thread enqueues on a device: in a stream of that thread's own, beside what the engine enqueues.

On a CPU there are no streams: what is enqueued is done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from bottega.transport import Deadline

# Between two looks whether a device has come to a moment: short at first, because most copies take microseconds.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2e-5, 1e-3

_of_thread = threading.local()


def mark(device: torch.device) -> torch.cuda.Event | None:
    """This moment in the stream that is current; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


@contextmanager
def beside(device: torch.device, after: torch.cuda.Event | None = None) -> Iterator[None]:
    """What is enqueued inside goes to this thread's own stream, behind that moment of another one."""
    if device.type != "cuda":
        yield
        return
    stream = _stream(device)
    if after is not None:
        stream.wait_event(after)
    with torch.cuda.stream(stream):
        yield


def keep_until_used(tensor: Tensor) -> None:
    """A tensor that the current stream reads, and another one made: its memory is used again only behind that."""
    if tensor.device.type == "cuda":
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def has_come(moment: torch.cuda.Event | None) -> bool:
    """Whether the device has come to that moment."""
    return moment is None or bool(moment.query())  # type: ignore[no-untyped-call]


def reached(moment: torch.cuda.Event | None, deadline: Deadline) -> bool:
    """Waits until the device has come to that moment; False where it has not by the deadline."""
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
