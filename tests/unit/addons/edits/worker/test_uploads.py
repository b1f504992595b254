"""Recordings that are to be sent to a store: what becomes of one that cannot be."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import cast

import pytest
import torch

from bottega.addons.edits.engine.recordings.recording import DrawnTemplate, Recording, RecordingKey, StepKey
from bottega.addons.edits.worker.load_meter import LoadMeter
from bottega.addons.edits.worker.uploads import RecordingUpload, Uploads
from bottega.model.rows import Half
from bottega.transport import Connection, Deadline, Layout, Link, WholeMessage, kind_of
from bottega.v1.activations_pb2 import RecordingHeader

SHAPE = (4, 6)
HEADER = RecordingHeader(recording="12" * 16)


def uploads() -> Uploads:
    return Uploads(budget_bytes=1 << 20, meter=LoadMeter(), wake=lambda: None)


def recording(drawn: DrawnTemplate | None = None) -> Recording:
    made = Recording(RecordingKey(model_hash="ab" * 32, dtype="float32", template="cd" * 32), SHAPE, drawn)
    key = StepKey(timestep=1.0, noise_level=1.0, half=Half.CONDITIONAL)
    made.add(key, {"block": torch.zeros(6, 8, dtype=torch.float16)}, torch.ones(SHAPE, dtype=torch.bool))
    return made


class Wire:
    """What a link's thread has sent: kinds of messages."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def send_now(self, _link: object, message: WholeMessage) -> None:
        self.kinds.append(kind_of(message.layout))

    @contextlib.contextmanager
    def start_message(self, layout: Layout, _deadline: Deadline) -> Iterator[Wire]:
        self.views = layout.views(memoryview(bytearray(layout.size_bytes)))
        yield self
        self.kinds.append(kind_of(layout))

    def finish(self) -> None:
        """Of a message."""


def send(upload: RecordingUpload, wire: Wire) -> int:
    return upload.send(cast("Connection", wire), cast("Link", wire))


def kinds_of(waiting: Uploads) -> list[str]:
    """What is sent next, and is."""
    wire = Wire()
    while (upload := waiting.next()) is not None:
        waiting.sent(upload, send(upload, wire))
    return wire.kinds


def begun(waiting: Uploads, made: Recording) -> Recording:
    waiting.begin(made)
    for key in made.steps:
        waiting.add(made, key)
    return made


def test_one_whose_end_has_no_room_is_abandoned_and_may_be_given_again() -> None:
    waiting = uploads()
    made = begun(waiting, recording())
    for _ in range(2):
        section = waiting.next()
        assert section is not None
        waiting.sent(section, send(section, Wire()))
    waiting.complete(made, HEADER)
    end = waiting.next()
    assert end is not None
    waiting.refused(end)
    assert waiting.lacks(made)
    assert kinds_of(waiting) == ["abandon"]
    begun(waiting, made)
    waiting.complete(made, HEADER)
    assert kinds_of(waiting) == ["section", "chunk", "recording"]
    assert not waiting.lacks(made)


def test_one_whose_end_has_no_room_takes_no_memory_when_nobody_else_has_it() -> None:
    waiting = uploads()
    made = begun(waiting, recording())
    waiting.complete(made, HEADER)
    while (upload := waiting.next()) is not None:
        waiting.refused(upload)
    known = weakref.ref(made)
    del made
    gc.collect()
    assert known() is None


def test_a_section_that_has_no_room_is_dropped_alone() -> None:
    waiting = uploads()
    made = begun(waiting, recording())
    section = waiting.next()
    assert section is not None
    waiting.refused(section)
    waiting.complete(made, HEADER)
    assert not waiting.lacks(made)
    assert kinds_of(waiting) == ["recording"]


def test_one_whose_end_no_message_can_say_is_abandoned(caplog: pytest.LogCaptureFixture) -> None:
    waiting = uploads()
    of_rank_5 = torch.zeros(1, 4, 1, *SHAPE)
    made = begun(waiting, recording(DrawnTemplate(image_latent=of_rank_5, noise=of_rank_5, seed=1)))
    waiting.complete(made, HEADER)
    assert kinds_of(waiting) == ["section", "chunk", "abandon"]
    assert waiting.lacks(made)
    assert "could not be sent" in caplog.text


def test_a_section_that_is_being_sent_counts_until_it_was() -> None:
    waiting = Uploads(budget_bytes=150, meter=LoadMeter(), wake=lambda: None)
    made = begun(waiting, recording())
    head = waiting.next()
    assert head is not None
    waiting.sent(head, send(head, Wire()))
    key = StepKey(timestep=2.0, noise_level=1.0, half=Half.CONDITIONAL)
    made.add(key, {"block": torch.zeros(6, 8, dtype=torch.float16)}, torch.ones(SHAPE, dtype=torch.bool))
    waiting.add(made, key)
    assert kinds_of(waiting) == ["chunk"], "there is no room for two"
    waiting.add(made, key)
    assert kinds_of(waiting) == ["section", "chunk"]
