"""Uploads of recordings to one store: sections wait in a queue of limited size, and no edit waits for them.

A section that does not fit into the queue is dropped. The store has the others, and a worker that later computes that
step sends it. Sections are sent one at a time, in chunks, and are not copied: edits write to a waiting section only
outside its map.
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

from bottega.addons.edits.engine.recordings.recording import DrawnTemplate, Recording, StepKey
from bottega.addons.edits.engine.recordings.step import RecordedStep
from bottega.addons.edits.wire import DrawnTensors, SectionLayout, messages
from bottega.addons.edits.wire.messages import CHUNK_BYTES, STORE_LIMITS
from bottega.addons.edits.wire.pieces import SectionChunks
from bottega.addons.edits.worker.load_meter import LoadMeter
from bottega.addons.edits.worker.template import pack_map, section_key
from bottega.transport import Connection, Link, PieceSize, WholeMessage
from bottega.v1.activations_pb2 import RecordingHeader, SectionHeader

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedSection:
    """A step to upload, with the map and the prompt that it had when it was queued."""

    recording: Recording
    key: StepKey
    step: RecordedStep
    valid: Tensor
    prompt: str

    @property
    def size_bytes(self) -> int:
        return self.step.size_bytes

    @property
    def header(self) -> SectionHeader:
        """The description of the section for the store."""
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
    """A section that is being sent: its description, then its tensors in chunks, with other messages in between.

    Args:
        number: Number of the messages.

    Raises:
        ValueError: The section does not fit into messages.
    """

    def __init__(self, number: int, section: RecordedSection) -> None:
        self.section = section
        tensors = {name: tensor for name in section.step.names if (tensor := section.step.get(name)) is not None}
        layout = SectionLayout.of((name, tensor.shape) for name, tensor in tensors.items())
        self._message = messages.section_message(number, section.header, layout)
        self._chunks = SectionChunks(number, layout, [bytes_of(tensor) for tensor in tensors.values()])
        self._begun = False

    @property
    def done(self) -> bool:
        return self._chunks.done

    def send(self, connection: Connection, link: Link, max_bytes: int) -> int:
        """Send the next part, at most `max_bytes` of tensors, and return the number of bytes sent.

        Raises the errors of sending.
        """
        if not self._begun:
            self._begun = True
            connection.send_now(link, self._message)
            return 0
        return self._chunks.send(link, max_bytes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordingUpload:
    """The next item to send: one message, or the next part of a section."""

    recording: Recording
    message: WholeMessage | None = None
    section: SectionUpload | None = None
    max_bytes: int = 0
    """Maximum bytes of a section's tensors to send."""
    ends: bool
    """Whether this is the last message of the recording."""

    def send(self, connection: Connection, link: Link) -> int:
        """Send the message or the part. Return the number of tensor bytes sent. Raise the errors of sending."""
        if self.section is not None:
            return self.section.send(connection, link, self.max_bytes)
        assert self.message is not None, "one of both"
        connection.send_now(link, self.message)
        return 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _End:
    """The end of a recording, which is also queued."""

    recording: Recording
    header: RecordingHeader | None = None
    """The header of the recording message; None if the recording is abandoned."""
    size_bytes: int = 0

    @property
    def message(self) -> WholeMessage:
        """The message to send. Raises ValueError if it is too large."""
        if self.header is None:
            return messages.abandon_message(self.recording.id, self.recording.key.digest)
        return messages.recording_message(self.header, drawn_tensors(self.recording.drawn))


class Uploads:
    """The queue of recordings' sections (the activations of some steps each) for upload to one store.

    Args:
        budget_bytes: Maximum bytes of sections that wait.
        wake: Called when there is something to send.
    """

    def __init__(self, *, budget_bytes: int, meter: LoadMeter, wake: Callable[[], None]) -> None:
        self._numbers = itertools.count(1)
        self._piece_size = PieceSize(slots=STORE_LIMITS.slots, max_bytes=CHUNK_BYTES)
        self._budget_bytes = budget_bytes
        self._meter = meter
        self._wake = wake
        self._lock = threading.Lock()
        self._queue: deque[RecordedSection | _End] = deque()
        self._sending: SectionUpload | None = None  # has chunks that were not sent
        self._known: WeakSet[Recording] = WeakSet()  # recordings that the store has or receives
        self._unfinished: set[Recording] = set()  # those of them that have not ended
        self._others: WeakSet[Recording] = WeakSet()  # the store has another recording of their templates

    @property
    def waiting(self) -> bool:
        """Whether there is something to send."""
        return bool(self._queue) or self._sending is not None

    def lacks(self, recording: Recording) -> bool:
        """Return whether the store has, as far as is known, neither this recording nor another one of its template."""
        with self._lock:
            return recording not in self._known and recording not in self._others

    def begin(self, recording: Recording) -> None:
        """Begin a recording that the store accepts. `add` follows for each step, then `complete` or `abandon`."""
        with self._lock:
            self._known.add(recording)
            self._unfinished.add(recording)

    def adopt(self, recording: Recording) -> None:
        """Record that the store has the recording. Other workers may add to it, too."""
        with self._lock:
            self._known.add(recording)

    def pass_over(self, recording: Recording) -> None:
        """Record that the store has another recording of the same template."""
        with self._lock:
            self._others.add(recording)

    def add(self, recording: Recording, key: StepKey) -> None:
        """Queue a step that was added, replaced or extended. Do nothing if the store does not know the recording."""
        step = recording.steps.get(key)
        if step is None or not step.writable:
            return
        section = RecordedSection(recording=recording, key=key, step=step, valid=step.valid, prompt=step.prompt)
        with self._lock:
            if recording not in self._known:
                return
            self._remove(
                lambda item: isinstance(item, RecordedSection) and item.recording is recording and item.key == key
            )
            if self._waiting_bytes + section.size_bytes > self._budget_bytes:
                self._meter.note("upload_dropped_full")
            else:
                self._queue.append(section)
        self._wake()

    def complete(self, recording: Recording, header: RecordingHeader) -> None:
        """Queue the end of a complete recording."""
        with self._lock:
            if recording not in self._unfinished:
                return
            self._queue.append(_End(recording=recording, header=header))
        self._wake()

    def abandon(self, recording: Recording) -> None:
        """Queue the message that tells the store to discard a recording."""
        with self._lock:
            if recording not in self._unfinished:
                return
            self._forget(recording)
            self._queue.append(_End(recording=recording))
        self._wake()

    def forget(self, id: str) -> None:
        """Stop sending a recording that the store rejected or may have dropped. It may be offered again."""
        with self._lock:
            for recording in [known for known in self._known if known.id == id]:
                self._meter.note("upload_dropped_not_granted")
                self._forget(recording)

    def lose(self) -> None:
        """Drop everything, because the connection has ended and the store drops incomplete recordings."""
        with self._lock:
            self._meter.note("upload_dropped_lost", len(self._unfinished))
            self._unfinished.clear()
            self._known.clear()
            self._others.clear()
            self._queue.clear()
            self._sending = None

    def next(self) -> RecordingUpload | None:
        """Return the next message to send, or None. Called by the sending thread, because it builds the message."""
        while True:
            with self._lock:
                if self._sending is not None:
                    return self._piece_of(self._sending)
                if not self._queue:
                    return None
                item = self._queue.popleft()
            try:
                return self._begun(item)
            except Exception:  # noqa: BLE001 - the boundary of an upload, which must not end the link
                _log.exception("a recording could not be sent to the store, and stays in this worker")
                self._refused(item.recording, ends=isinstance(item, _End))

    def sent(self, upload: RecordingUpload, size_bytes: int) -> None:
        """Record that an upload was sent.

        Args:
            size_bytes: Bytes of tensors in it.
        """
        self._meter.note("upload_bytes", size_bytes)
        with self._lock:
            if upload.section is not None and upload.section.done and self._sending is upload.section:
                self._sending = None
            if upload.ends:
                self._unfinished.discard(upload.recording)
        if upload.ends:
            self._meter.note("uploaded")

    def refused(self, upload: RecordingUpload) -> None:
        """Record that an upload could not be sent, because the connection's buffer is too small."""
        with self._lock:
            if upload.section is not None and self._sending is upload.section:
                self._sending = None
        self._refused(upload.recording, ends=upload.ends)

    def _begun(self, item: RecordedSection | _End) -> RecordingUpload:
        """Return the first part of an item. Raise ValueError if it is too large for a message."""
        if isinstance(item, _End):
            return RecordingUpload(recording=item.recording, message=item.message, ends=item.header is not None)
        upload = SectionUpload(next(self._numbers), item)
        with self._lock:
            if item.recording in self._known:  # else it was abandoned meanwhile, and the store ignores its chunks
                self._sending = upload
            return self._piece_of(upload)

    def _piece_of(self, upload: SectionUpload) -> RecordingUpload:
        return RecordingUpload(
            recording=upload.section.recording, section=upload, max_bytes=self._piece_size.next(), ends=False
        )

    def _refused(self, recording: Recording, *, ends: bool) -> None:
        """Abandon a recording whose end cannot be sent. It may be offered again."""
        self._meter.note("upload_dropped_refused")
        if ends:
            self.abandon(recording)

    # Called under the lock.

    @property
    def _waiting_bytes(self) -> int:
        sending = self._sending.section.size_bytes if self._sending is not None else 0
        return sending + sum(item.size_bytes for item in self._queue)

    def _forget(self, recording: Recording) -> None:
        self._known.discard(recording)
        self._unfinished.discard(recording)
        self._remove(lambda item: item.recording is recording)
        if self._sending is not None and self._sending.section.recording is recording:
            self._sending = None

    def _remove(self, gone: Callable[[RecordedSection | _End], bool]) -> None:
        kept = [item for item in self._queue if not gone(item)]
        if len(kept) < len(self._queue):
            self._queue = deque(kept)


def drawn_tensors(drawn: DrawnTemplate | None) -> DrawnTensors | None:
    """Return image latent and noise as they are sent: in float32, which is at least as precise as any model's dtype."""
    if drawn is None:
        return None
    image_latent, noise = drawn.image_latent.float(), drawn.noise.float()
    return DrawnTensors(shape=tuple(noise.shape), image_latent=bytes_of(image_latent), noise=bytes_of(noise))


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor's elements, row-major."""
    data: memoryview = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return data
