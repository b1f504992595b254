"""What one store is to record: sections wait within a budget of bytes, and nobody waits for them.

A section that has no room is dropped: the store has the others, and whoever computes that step gives it. Sections are
sent one at a time, in chunks. They are not copied: what is written to one while it waits lies outside its map.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch import Tensor

from bottega.diffusion.editing.recordings.keys import StepKey
from bottega.diffusion.editing.recordings.recording import DrawnTemplate, Recording
from bottega.diffusion.editing.recordings.step import RecordedStep
from bottega.sections import DrawnTensors, SectionLayout, messages
from bottega.sections.messages import CHUNK_BYTES, STORE_LIMITS
from bottega.sections.pieces import SectionChunks
from bottega.transport import Connection, Link, PieceSize, WholeMessage
from bottega.v1.activations_pb2 import RecordingHeader, SectionHeader
from bottega.worker.activations.load_meter import LoadMeter
from bottega.worker.activations.template import pack_map, section_key

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedSection:
    """A step as it was when it was given: its map and prompt may change."""

    recording: Recording
    key: StepKey
    step: RecordedStep
    valid: Tensor
    prompt: str

    @property
    def size_bytes(self) -> int:
        """Of its tensors."""
        return self.step.size_bytes

    @property
    def header(self) -> SectionHeader:
        """What the store is told of it."""
        height, width = self.recording.shape
        return SectionHeader(
            recording=self.recording.id,
            key=self.recording.key.digest,
            section=section_key(self.key),
            prompt=self.prompt,
            map=pack_map(self.valid),
            latent_height=height,
            latent_width=width,
        )


class SectionUpload:
    """number: of its messages. Raises ValueError for a section that no message has room for."""

    def __init__(self, number: int, section: RecordedSection) -> None:
        self.section = section
        tensors = {name: tensor for name in section.step.names if (tensor := section.step.get(name)) is not None}
        layout = SectionLayout.of((name, tensor.shape) for name, tensor in tensors.items())
        self._message = messages.section_message(number, section.header, layout)
        self._chunks = SectionChunks(number, layout, [bytes_of(tensor) for tensor in tensors.values()])
        self._begun = False

    @property
    def done(self) -> bool:
        """Whether all was sent."""
        return self._chunks.done

    def send(self, connection: Connection, link: Link, most_bytes: int) -> int:
        """Sends what comes next, at most so many bytes of tensors; returns how many. Raises what sending does."""
        if not self._begun:
            self._begun = True
            connection.send_now(link, self._message)
            return 0
        return self._chunks.send(link, most_bytes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordingUpload:
    """What is sent next: a message, or what comes next of a section. ends: whether it is the recording's last word.

    most_bytes: of tensors, of a section.
    """

    recording: Recording
    message: WholeMessage | None = None
    section: SectionUpload | None = None
    most_bytes: int = 0
    ends: bool

    def send(self, connection: Connection, link: Link) -> int:
        """Sends it; returns how many bytes of tensors. Raises what sending does."""
        if self.section is not None:
            return self.section.send(connection, link, self.most_bytes)
        assert self.message is not None, "one of both"
        connection.send_now(link, self.message)
        return 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _End:
    """header: None where the recording is abandoned."""

    recording: Recording
    header: RecordingHeader | None = None
    size_bytes: int = 0

    @property
    def message(self) -> WholeMessage:
        """It. Raises ValueError where no message has room for it."""
        if self.header is None:
            return messages.abandon_message(self.recording.id, self.recording.key.digest)
        return messages.recording_message(self.header, drawn_tensors(self.recording.drawn))


class Uploads:
    """To one store. budget_bytes: of sections that wait. wake: called when there is something to send."""

    def __init__(self, *, budget_bytes: int, meter: LoadMeter, wake: Callable[[], None]) -> None:
        self._numbers = itertools.count(1)
        self._piece_size = PieceSize(slots=STORE_LIMITS.slots, most_bytes=CHUNK_BYTES)
        self._budget_bytes = budget_bytes
        self._meter = meter
        self._wake = wake
        self._lock = threading.Lock()
        self._queue: deque[RecordedSection | _End] = deque()
        self._sending: SectionUpload | None = None  # of whose chunks some are left
        self._known: WeakSet[Recording] = WeakSet()  # that the store has, or is being given
        self._unfinished: set[Recording] = set()  # of those, what has not ended
        self._others: WeakSet[Recording] = WeakSet()  # of whose templates it has another recording

    @property
    def waiting(self) -> bool:
        """Whether there is something to send."""
        return bool(self._queue) or self._sending is not None

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
        section = RecordedSection(recording=recording, key=key, step=step, valid=step.valid, prompt=step.prompt)
        with self._lock:
            if recording not in self._known:
                return
            self._remove(
                lambda each: isinstance(each, RecordedSection) and each.recording is recording and each.key == key
            )
            if self._waiting_bytes + section.size_bytes > self._budget_bytes:
                self._meter.note("upload_dropped_full")
            else:
                self._queue.append(section)
        self._wake()

    def complete(self, recording: Recording, header: RecordingHeader) -> None:
        """It is whole."""
        with self._lock:
            if recording not in self._unfinished:
                return
            self._queue.append(_End(recording=recording, header=header))
        self._wake()

    def abandon(self, recording: Recording) -> None:
        """It is worth nothing."""
        with self._lock:
            if recording not in self._unfinished:
                return
            self._forget(recording)
            self._queue.append(_End(recording=recording))
        self._wake()

    def forget(self, id: str) -> None:
        """The store does not take the recording of this id: it may have been dropped there. It may be asked again."""
        with self._lock:
            for recording in [each for each in self._known if each.id == id]:
                self._meter.note("upload_dropped_not_granted")
                self._forget(recording)

    def lose(self) -> None:
        """The link has ended: the store forgets what has not, and another one may answer the next time."""
        with self._lock:
            self._meter.note("upload_dropped_lost", len(self._unfinished))
            self._unfinished.clear()
            self._known.clear()
            self._others.clear()
            self._queue.clear()
            self._sending = None

    def next(self) -> RecordingUpload | None:
        """What comes next; None for nothing. By the thread that sends: it makes the message."""
        while True:
            with self._lock:
                if self._sending is not None:
                    return self._piece_of(self._sending)
                if not self._queue:
                    return None
                item = self._queue.popleft()
            try:
                return self._begun(item)
            except Exception:  # noqa: BLE001 - the boundary of an upload: the link, and others', go on without it
                _log.exception("a recording could not be sent")
                self._refused(item.recording, ends=isinstance(item, _End))

    def sent(self, upload: RecordingUpload, size_bytes: int) -> None:
        """It is with the store. size_bytes: of tensors in it."""
        self._meter.note("upload_bytes", size_bytes)
        with self._lock:
            if upload.section is not None and upload.section.done and self._sending is upload.section:
                self._sending = None
            if upload.ends:
                self._unfinished.discard(upload.recording)
        if upload.ends:
            self._meter.note("uploaded")

    def refused(self, upload: RecordingUpload) -> None:
        """There was no room to send it."""
        with self._lock:
            if upload.section is not None and self._sending is upload.section:
                self._sending = None
        self._refused(upload.recording, ends=upload.ends)

    def _begun(self, item: RecordedSection | _End) -> RecordingUpload:
        """Raises ValueError for what no message has room for."""
        if isinstance(item, _End):
            return RecordingUpload(recording=item.recording, message=item.message, ends=item.header is not None)
        upload = SectionUpload(next(self._numbers), item)
        with self._lock:
            if item.recording in self._known:  # else it was abandoned meanwhile, and its chunks come to nothing
                self._sending = upload
            return self._piece_of(upload)

    def _piece_of(self, upload: SectionUpload) -> RecordingUpload:
        return RecordingUpload(
            recording=upload.section.recording, section=upload, most_bytes=self._piece_size.next(), ends=False
        )

    def _refused(self, recording: Recording, *, ends: bool) -> None:
        """A recording whose end cannot be sent is worth nothing to the store; it may be given it again."""
        self._meter.note("upload_dropped_refused")
        if ends:
            self.abandon(recording)

    # Below: under the lock.

    @property
    def _waiting_bytes(self) -> int:
        sending = self._sending.section.size_bytes if self._sending is not None else 0
        return sending + sum(each.size_bytes for each in self._queue)

    def _forget(self, recording: Recording) -> None:
        self._known.discard(recording)
        self._unfinished.discard(recording)
        self._remove(lambda each: each.recording is recording)
        if self._sending is not None and self._sending.section.recording is recording:
            self._sending = None

    def _remove(self, gone: Callable[[RecordedSection | _End], bool]) -> None:
        kept = [each for each in self._queue if not gone(each)]
        if len(kept) < len(self._queue):
            self._queue = deque(kept)


def drawn_tensors(drawn: DrawnTemplate | None) -> DrawnTensors | None:
    """Image latent and noise as they are sent: no element type of a model has more than float32 has."""
    if drawn is None:
        return None
    image_latent, noise = drawn.image_latent.float(), drawn.noise.float()
    return DrawnTensors(shape=tuple(noise.shape), image_latent=bytes_of(image_latent), noise=bytes_of(noise))


def bytes_of(tensor: Tensor) -> memoryview:
    """Its elements, row-major."""
    data: memoryview = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return data
