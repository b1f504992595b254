"""What one store is to record: sections wait within a budget of bytes, and nobody waits for them.

A section that has no room is dropped: the store has the others, and whoever computes that step gives it. Sections are
not copied: what is written to one while it waits lies outside its map.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch import Tensor

from bottega.diffusion.editing.recordings.recording import DrawnTemplate, Recording, StepKey
from bottega.diffusion.editing.recordings.step import RecordedStep
from bottega.sections import DrawnTensors, SectionLayout, messages
from bottega.transport import WholeMessage
from bottega.v1.activations_pb2 import RecordingHeader, SectionHeader
from bottega.worker.activations.load_meter import LoadMeter
from bottega.worker.activations.template import pack_map, section_key

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordingUpload:
    """What is sent next. ends: whether it is the recording's last word."""

    recording: Recording
    message: WholeMessage
    size_bytes: int
    ends: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Section:
    """A step as it was when it was given: its map and prompt may change."""

    recording: Recording
    key: StepKey
    step: RecordedStep
    valid: Tensor
    prompt: str

    @property
    def size_bytes(self) -> int:
        return self.step.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _End:
    """header: None where the recording is abandoned."""

    recording: Recording
    header: RecordingHeader | None = None
    size_bytes: int = 0


class Uploads:
    """To one store. budget_bytes: of sections that wait. wake: called when there is something to send."""

    def __init__(self, *, budget_bytes: int, meter: LoadMeter, wake: Callable[[], None]) -> None:
        self._budget_bytes = budget_bytes
        self._meter = meter
        self._wake = wake
        self._lock = threading.Lock()
        self._queue: deque[_Section | _End] = deque()
        self._waiting_bytes = 0
        self._known: WeakSet[Recording] = WeakSet()  # that the store has, or is being given
        self._unfinished: set[Recording] = set()  # of those, what has not ended
        self._others: WeakSet[Recording] = WeakSet()  # of whose templates it has another recording

    @property
    def waiting(self) -> bool:
        """Whether there is something to send."""
        return bool(self._queue)

    def lacks(self, recording: Recording) -> bool:
        """Whether the store may not have it, nor another one of its template."""
        with self._lock:
            return recording not in self._known and recording not in self._others

    def begin(self, recording: Recording) -> None:
        """The store takes a recording, of which `add` is told each step, and then `complete` or `abandon`."""
        with self._lock:
            self._known.add(recording)
            self._unfinished.add(recording)

    def adopt(self, recording: Recording) -> None:
        """The store has it: what is added to it, others may have, too."""
        with self._lock:
            self._known.add(recording)

    def pass_over(self, recording: Recording) -> None:
        """The store has another one of its template."""
        with self._lock:
            self._others.add(recording)

    def add(self, recording: Recording, key: StepKey) -> None:
        """A step was added, replaced or grown. Nothing where the store does not know the recording."""
        step = recording.steps.get(key)
        if step is None or not step.writable:
            return
        section = _Section(recording=recording, key=key, step=step, valid=step.valid, prompt=step.prompt)
        with self._lock:
            if recording not in self._known:
                return
            self._remove(lambda each: isinstance(each, _Section) and each.recording is recording and each.key == key)
            if self._waiting_bytes + section.size_bytes > self._budget_bytes:
                self._meter.note("upload_dropped_full")
            else:
                self._put(section)
        self._wake()

    def complete(self, recording: Recording, header: RecordingHeader) -> None:
        """It is whole."""
        with self._lock:
            if recording not in self._unfinished:
                return
            self._put(_End(recording=recording, header=header))
        self._wake()

    def abandon(self, recording: Recording) -> None:
        """It is worth nothing."""
        with self._lock:
            if recording not in self._unfinished:
                return
            self._known.discard(recording)
            self._unfinished.discard(recording)
            self._remove(lambda each: each.recording is recording)
            self._put(_End(recording=recording))
        self._wake()

    def lose(self) -> None:
        """The link has ended: the store forgets what has not, and another one may answer the next time."""
        with self._lock:
            self._meter.note("upload_dropped_lost", len(self._unfinished))
            self._unfinished.clear()
            self._known.clear()
            self._others.clear()
            self._queue.clear()
            self._waiting_bytes = 0

    def next(self) -> RecordingUpload | None:
        """What comes next; None for nothing. By the thread that sends: it makes the message."""
        while True:
            with self._lock:
                if not self._queue:
                    return None
                item = self._queue.popleft()
                self._waiting_bytes -= item.size_bytes
            try:
                return _upload(item)
            except Exception:  # noqa: BLE001 - the boundary of an upload: the link, and others', go on without it
                _log.exception("a recording could not be sent")
                self._refused(item.recording, ends=isinstance(item, _End))

    def sent(self, upload: RecordingUpload) -> None:
        """It is with the store."""
        self._meter.note("upload_bytes", upload.size_bytes)
        if upload.ends:
            with self._lock:
                self._unfinished.discard(upload.recording)
            self._meter.note("uploaded")

    def refused(self, upload: RecordingUpload) -> None:
        """There was no room to send it."""
        self._refused(upload.recording, ends=upload.ends)

    def _refused(self, recording: Recording, *, ends: bool) -> None:
        """A recording whose end cannot be sent is worth nothing to the store; it may be given it again."""
        self._meter.note("upload_dropped_refused")
        if ends:
            self.abandon(recording)

    # Below: under the lock.

    def _put(self, item: _Section | _End) -> None:
        self._queue.append(item)
        self._waiting_bytes += item.size_bytes

    def _remove(self, gone: Callable[[_Section | _End], bool]) -> None:
        kept = [each for each in self._queue if not gone(each)]
        if len(kept) < len(self._queue):
            self._queue = deque(kept)
            self._waiting_bytes = sum(each.size_bytes for each in kept)


def _upload(item: _Section | _End) -> RecordingUpload:
    """Raises ValueError for a section that no message has room for."""
    recording = item.recording
    if isinstance(item, _Section):
        message: WholeMessage = _section_message(item)
        return RecordingUpload(recording=recording, message=message, size_bytes=item.size_bytes, ends=False)
    if item.header is None:
        message = messages.abandon_message(recording.id, recording.key.digest)
        return RecordingUpload(recording=recording, message=message, size_bytes=0, ends=False)
    message = messages.recording_message(item.header, drawn_tensors(recording.drawn))
    return RecordingUpload(recording=recording, message=message, size_bytes=0, ends=True)


def _section_message(section: _Section) -> WholeMessage:
    recording, step = section.recording, section.step
    tensors = {name: tensor for name in step.names if (tensor := step.get(name)) is not None}
    height, width = recording.shape
    header = SectionHeader(
        recording=recording.id,
        key=recording.key.digest,
        section=section_key(section.key),
        prompt=section.prompt,
        map=pack_map(section.valid),
        latent_height=height,
        latent_width=width,
    )
    layout = SectionLayout.of((name, tensor.shape) for name, tensor in tensors.items())
    return messages.section_message(header, layout, [_bytes(tensor) for tensor in tensors.values()])


def drawn_tensors(drawn: DrawnTemplate | None) -> DrawnTensors | None:
    """Image latent and noise as they are sent: no element type of a model has more than float32 has."""
    if drawn is None:
        return None
    image_latent, noise = drawn.image_latent.float(), drawn.noise.float()
    return DrawnTensors(shape=tuple(noise.shape), image_latent=_bytes(image_latent), noise=_bytes(noise))


def _bytes(tensor: Tensor) -> memoryview:
    data: memoryview = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return data
