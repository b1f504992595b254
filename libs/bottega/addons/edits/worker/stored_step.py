"""A RecordedStep whose outputs are in a store: some of its tensors are loaded, others are pending or not requested.

Within a host the tensors are views of the store's own sealed file: nothing is copied, and nothing can change them. From
other hosts they arrive one by one, in chunks, in memory that counts towards the worker's budget. A tensor can be read
once all of it has arrived. Tensors that are refused, lost or do not fit are computed by the engine instead.

The engine's thread requests and reads, and the connection's thread fills. A tensor that has arrived never changes.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from bottega.addons.edits.engine.recordings.recording import Recording
from bottega.addons.edits.engine.recordings.step import LoadTime
from bottega.addons.edits.wire.section import OWNER_BYTES, SectionTensor, owner
from bottega.addons.edits.worker.load_meter import LoadMeter
from bottega.addons.edits.worker.template import AnsweredSection
from bottega.engine.spans import StoreWork
from bottega.errors import DataLoss
from bottega.v1.trace_pb2 import StoreTimes


@dataclass(slots=True, kw_only=True, eq=False)
class SectionFetch:
    """A request for tensors of a section."""

    step: StoredStep
    tensors: tuple[int, ...]
    """Indices of the tensors in the section, in the order of their use."""
    left: int
    """Number of `tensors` that have not arrived."""
    requested_s: float = field(default_factory=time.monotonic)
    """Time of the request, on CLOCK_MONOTONIC."""
    work: StoreWork | None = None
    """Time that the store spent; None until it has begun to respond."""

    def note_answer(self, store: str, times: StoreTimes) -> None:
        """Record that the store has begun to respond.

        Args:
            times: Seconds that the store has spent until then.
        """
        now_s = time.monotonic()
        self.work = StoreWork(store=store, times=times, asked_s=self.requested_s, answered_s=now_s)


class SectionLink(Protocol):
    """The connection to the store that has a section. Its calls do not block."""

    @property
    def shares(self) -> bool:
        """Whether sections may arrive as the store's own files, which take no memory here."""
        ...

    @property
    def gives_whole(self) -> bool:
        """Whether sections arrive as files, so that the first request for a section loads all of it."""
        ...

    def fetch(self, fetch: SectionFetch) -> bool:
        """Request tensors. Return False if the connection is not open."""
        ...

    def cancel(self, step: StoredStep) -> None:
        """Cancel the pending requests of a step."""
        ...


class LoadRoom(Protocol):
    """The memory for loaded tensors, and other state that all stored steps share."""

    meter: LoadMeter
    pinned: bool
    """Whether loads go to pinned memory, because a GPU reads them."""
    arrivals: threading.Condition
    """Guards filling and reading of steps; notified when tensors have arrived."""

    def make_room(self, size_bytes: int, turns: float) -> bool:
        """Free memory for `size_bytes` that are used in `turns` forward passes, and return whether there is enough.

        Called by the engine's thread.
        """
        ...

    def has_room(self, size_bytes: int) -> bool:
        """Return whether `size_bytes` fit now. Thread-safe."""
        ...


class StoredStep:
    """A forward pass of a template whose recorded outputs are in a store.

    Args:
        section: The store's description of the outputs.
        recording: The recording that the step belongs to.
        edit: Number by which the store groups requests; see SectionRequest.
    """

    writable = False

    def __init__(
        self, section: AnsweredSection, *, recording: Recording, link: SectionLink, room: LoadRoom, edit: int
    ) -> None:
        self.valid = section.valid
        self.prompt = section.prompt
        self.section = section
        self.link = link
        self.edit = edit
        self.lost = False
        self._room = room
        # Weak, because a recording holds its steps, and must be freed as soon as nobody holds it.
        self._recording = weakref.ref(recording)
        self._owner = owner(recording.key.digest)
        self._layout = section.layout
        self._names = tuple(tensor.name for tensor in section.layout.tensors)
        self._tensors: dict[str, Tensor] = {}
        self._coming: dict[str, SectionFetch] = {}
        self._copied: set[str] = set()  # names of tensors that take memory here, or will
        self._buffers: dict[str, tuple[Tensor, int]] = {}  # incomplete tensors, and how many bytes of each are here
        self._held_bytes = 0
        self._load_times: list[LoadTime] = []

    @property
    def names(self) -> Collection[str]:
        return self._names

    @property
    def size_bytes(self) -> int:
        return self._layout.tensor_bytes

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    @property
    def mapped(self) -> bool:
        return self.link.shares and self.section.in_memory

    @property
    def whole(self) -> bool:
        """Whether all tensors are loaded."""
        return len(self._tensors) == len(self._names)

    def bytes_of(self, name: str) -> int:
        place = self._layout.index(name)
        return 0 if place is None else self._layout.tensors[place].size_bytes

    def get(self, name: str) -> Tensor | None:
        return self._tensors.get(name)

    def request(self, names: Sequence[str]) -> None:
        with self._room.arrivals:
            places = [] if self.lost else [self._layout.index(name) for name in names if self._is_away(name)]
            wanted = tuple(dict.fromkeys(place for place in places if place is not None))
        if not wanted:
            return
        if self.link.gives_whole:
            wanted = tuple(dict.fromkeys((*wanted, *self._places_away())))
        asked = {self._names[place] for place in wanted}
        copied = () if self.link.shares else asked
        if copied and not self._room.make_room(sum(map(self.bytes_of, copied)), self._turns_until()):
            self._room.meter.note("loads_without_room")
            return
        fetch = SectionFetch(step=self, tensors=wanted, left=len(wanted))
        with self._room.arrivals:
            self._coming |= dict.fromkeys(asked, fetch)
            self._hold(copied)
        if not self.link.fetch(fetch):
            self.give_up(fetch)

    def wait(self, name: str, timeout_s: float) -> bool:
        if name in self._tensors:
            return True
        began_s = time.monotonic()
        with self._room.arrivals:
            if name not in self._coming:
                return name in self._tensors
            self._room.arrivals.wait_for(lambda: name not in self._coming, timeout_s)
        self._room.meter.waited(time.monotonic() - began_s)
        return name in self._tensors

    def drop_requests(self) -> None:
        recording = self._recording()
        # With several readers another edit may wait for the same tensors.
        if self._coming and (recording is None or recording.readers <= 1):
            self.link.cancel(self)

    def take_load_times(self) -> Sequence[LoadTime]:
        with self._room.arrivals:
            times, self._load_times = self._load_times, []
        return times

    def rest(self) -> None:
        """Release the store's mapped memory while no edit reads the step. Copies stay."""
        self.link.cancel(self)
        with self._room.arrivals:
            self._tensors = {name: tensor for name, tensor in self._tensors.items() if name in self._copied}

    def let_go(self) -> int:
        """Drop copied tensors to free memory for others. They are requested again when they are needed.

        Returns how many bytes were freed.
        """
        with self._room.arrivals:
            before_bytes = self._held_bytes
            gone = self._copied & self._tensors.keys()
            for name in gone:
                del self._tensors[name]
            self._let_go(gone)
            return before_bytes - self._held_bytes

    # The link calls the methods below.

    def take_chunk(self, fetch: SectionFetch, place: int, start: int, data: memoryview) -> None:
        """Read the next bytes: of the tensor at index `place` from `start` on, then of those requested after it.

        Bytes that are no longer needed are dropped. Raises ValueError for bytes that are not the next ones.
        """
        for tensor, first, part in self._parts(fetch, place, start, data):
            self._take_part(fetch, tensor, first, part)

    def take_whole(self, file: memoryview) -> None:
        """Use the whole section in the store's own memory. Raise DataLoss if it is another section."""
        if len(file) != self._layout.size_bytes:
            raise DataLoss("the store sent a file of another size than it announced")
        if bytes(file[-OWNER_BYTES:]) != self._owner:
            raise DataLoss("the store sent another template's file")
        with self._room.arrivals:
            for name, tensor, offset in zip(self._names, self._layout.tensors, self._layout.offsets, strict=True):
                if name not in self._tensors:
                    self._tensors[name] = _view(file, tensor, offset)
                    self._let_go((name,))
            for fetch in set(self._coming.values()):
                self._note_time(fetch)
            self._buffers.clear()
            self._arrived(tuple(self._coming))

    def give_up(self, fetch: SectionFetch, *, lost: bool = False) -> None:
        """Stop waiting for the pending tensors of a request.

        Args:
            lost: Whether the store has lost the section, so that no request will be answered.
        """
        with self._room.arrivals:
            self.lost = self.lost or lost
            gone = [name for name, by in self._coming.items() if by is fetch]
            for name in gone:
                self._buffers.pop(name, None)
            self._let_go(gone)
            self._arrived(gone)

    def _parts(
        self, fetch: SectionFetch, place: int, start: int, data: memoryview
    ) -> list[tuple[SectionTensor, int, memoryview]]:
        """Return the tensors in a chunk, each with the offset and the bytes that the chunk has.

        Raises ValueError before any bytes are copied.
        """
        if place not in fetch.tensors:
            raise ValueError("a store sent a tensor that was not requested")
        parts = []
        for index in fetch.tensors[fetch.tensors.index(place) :]:
            tensor = self._layout.tensors[index]
            part = data[: max(0, tensor.size_bytes - start)]
            parts.append((tensor, start, part))
            data, start = data[len(part) :], 0
            if not data:
                return parts
        raise ValueError(f"a store sent {len(data)} bytes more than were requested")

    def _take_part(self, fetch: SectionFetch, tensor: SectionTensor, start: int, data: memoryview) -> None:
        if not self._takes(tensor, fetch):
            return
        buffer, filled = self._buffers.get(tensor.name) or (self._empty(tensor), 0)
        end = start + len(data)
        if start != filled:
            raise ValueError(f"bytes {start} to {end} of {tensor.name} came when {filled} were here")
        # Copied without the lock, so that the engine's thread does not wait.
        buffer.view(-1).view(torch.uint8)[start:end].copy_(torch.frombuffer(data, dtype=torch.uint8))
        with self._room.arrivals:
            if self._coming.get(tensor.name) is not fetch:  # cancelled meanwhile
                return
            self._buffers[tensor.name] = buffer, end
            if end == tensor.size_bytes:
                del self._buffers[tensor.name]
                self._tensors[tensor.name] = buffer
                self._arrived((tensor.name,))
                if not fetch.left:
                    self._note_time(fetch, sent_s=time.monotonic())

    def _note_time(self, fetch: SectionFetch, *, sent_s: float | None = None) -> None:
        """Record how long a request took whose tensors have all arrived. For `sent_s`, see StoreWork."""
        size_bytes = sum(self._layout.tensors[place].size_bytes for place in fetch.tensors)
        seconds = time.monotonic() - fetch.requested_s
        work = replace(fetch.work, sent_s=sent_s) if fetch.work is not None else None
        self._load_times.append(LoadTime(began_s=fetch.requested_s, seconds=seconds, size_bytes=size_bytes, work=work))

    def _turns_until(self) -> float:
        recording = self._recording()
        return recording.turns_until(self.section.key) if recording is not None else math.inf

    def _places_away(self) -> list[int]:
        return [place for place, name in enumerate(self._names) if self._is_away(name)]

    def _is_away(self, name: str) -> bool:
        return name not in self._tensors and name not in self._coming

    def _takes(self, tensor: SectionTensor, fetch: SectionFetch) -> bool:
        """Return whether an edit still needs a tensor, and there is memory for it."""
        name = tensor.name
        with self._room.arrivals:
            if self._coming.get(name) is not fetch:
                return False
            if name in self._copied:
                return True
            # No room was made for a store of this host, which sends in chunks what it does not have in memory.
            if self._room.has_room(tensor.size_bytes):
                self._hold((name,))
                return True
            self._arrived((name,))
        self._room.meter.note("loads_without_room")
        return False

    def _empty(self, tensor: SectionTensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=torch.float16, pin_memory=self._room.pinned)

    def _hold(self, names: Iterable[str]) -> None:
        for name in set(names) - self._copied:
            self._copied.add(name)
            self._held_bytes += self.bytes_of(name)

    def _let_go(self, names: Iterable[str]) -> None:
        for name in set(names) & self._copied:
            self._copied.discard(name)
            self._held_bytes -= self.bytes_of(name)

    def _arrived(self, names: Iterable[str]) -> None:
        """Wake the threads that wait for these tensors."""
        for name in names:
            # Counted, because searching all tensors of a step for each that comes takes longer than copying it.
            if (fetch := self._coming.pop(name, None)) is not None:
                fetch.left -= 1
        self._room.arrivals.notify_all()


def _view(file: memoryview, tensor: SectionTensor, offset: int) -> Tensor:
    count = tensor.size_bytes // torch.float16.itemsize
    return torch.frombuffer(file, dtype=torch.float16, count=count, offset=offset).reshape(tensor.shape)
