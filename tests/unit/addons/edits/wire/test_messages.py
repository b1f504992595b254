"""Messages come back as they were sent, and what breaks a rule is refused before anything is done with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from bottega.addons.edits.wire import DrawnTensors, SectionLayout, messages
from bottega.addons.edits.wire.messages import ActivationMessageKind
from bottega.transport import BytesMessage, DType, Layout, TensorSpec, WholeMessage, kind_of, number_spec, pack_number
from bottega.transport.channel.backend import checked, on_host
from bottega.v1 import activations_pb2 as pb
from bottega.v1.trace_pb2 import StoreTimes
from tests.fakes.scripted_activation_store import chunk_message

_LAYOUT = SectionLayout.of([("a", (3, 5)), ("b", (7,))])
_DRAWN = DrawnTensors(shape=(1, 2, 3, 4), image_latent=b"i" * 96, noise=b"n" * 96)
_DIGEST = "ab" * 32


def _sent(message: WholeMessage) -> tuple[Layout, tuple[memoryview, ...]]:
    """As it lies in a receiver's slot."""
    views = message.layout.views(memoryview(bytearray(message.layout.size_bytes)))
    for view, part in zip(views, on_host(checked(message.layout, message.buffers)), strict=True):
        view[:] = part
    return message.layout, views


def test_questions_and_answers_come_back() -> None:
    question = pb.TemplateQuestion(key=_DIGEST, would_record=True, width=1024, height=512)
    assert messages.read_question(*_sent(messages.question_message(7, question))) == (7, question)
    for drawn in (_DRAWN, None):
        answer = pb.TemplateAnswer(recording="r", has_drawn=drawn is not None, layouts=[_LAYOUT.to_wire()])
        layout, views = _sent(messages.answer_message(8, answer, drawn))
        assert messages.read_answer(layout, views) == (8, answer)
        found = messages.read_drawn(layout, views, has_drawn=answer.has_drawn)
        assert _drawn(found) == _drawn(drawn)


def test_fetches_chunks_and_refusals_come_back() -> None:
    request = pb.SectionRequest(digest=_DIGEST, tensors=[2, 0], edit=5)
    assert messages.read_fetch(*_sent(messages.fetch_message(1, request))) == (1, request)
    layout, views = _sent(chunk_message(2, tensor=3, start=1 << 22, data=b"bytes"))
    assert messages.read_chunk(layout, views) == (2, pb.ChunkHeader(tensor=3, start=1 << 22))
    assert bytes(views[-1]) == b"bytes"
    assert messages.read_refused(*_sent(messages.refused_message(3, b"why"))) == (3, b"why")
    assert kind_of(messages.cancel_message(4).layout) == ActivationMessageKind.CANCEL
    assert kind_of(messages.whole_message(4, StoreTimes()).layout) == ActivationMessageKind.WHOLE


def test_sections_and_recordings_come_back() -> None:
    header = pb.SectionHeader(recording="r", key=_DIGEST, map=b"m" * 1000)
    number, found, section = messages.read_section(*_sent(messages.section_message(9, header, _LAYOUT)))
    found.ClearField("layout")
    assert (number, found, section) == (9, header, _LAYOUT)
    ended = pb.RecordingHeader(recording="r", has_drawn=True)
    layout, views = _sent(messages.recording_message(ended, _DRAWN))
    assert messages.read_recording(layout, views) == ended
    assert _drawn(messages.read_drawn(layout, views, has_drawn=True)) == _drawn(_DRAWN)
    abandoned = pb.AbandonHeader(recording="12" * 16, key=_DIGEST)
    assert messages.read_abandon(*_sent(messages.abandon_message("12" * 16, _DIGEST))) == abandoned


def test_what_was_read_of_a_slot_stays_when_the_slot_is_used_again() -> None:
    answer = pb.TemplateAnswer(recording="r", has_drawn=True)
    layout, views = _sent(messages.answer_message(8, answer, _DRAWN))
    found, drawn = messages.read_answer(layout, views)[1], messages.read_drawn(layout, views, has_drawn=True)
    for view in views:
        view[:] = bytes(len(view))
    assert (found, _drawn(drawn)) == (answer, _drawn(_DRAWN))


def _bytes_spec(name: str, size_bytes: int) -> TensorSpec:
    return TensorSpec(name=name, dtype=DType.UINT8, shape=(size_bytes,))


def _forged(kind: str, *rest: tuple[TensorSpec, bytes]) -> tuple[Layout, Sequence[memoryview]]:
    layout = Layout.of(number_spec(kind), *(spec for spec, _ in rest))
    return _sent(BytesMessage(layout=layout, buffers=(pack_number(1), *(data for _, data in rest))))


def _header(data: bytes) -> tuple[TensorSpec, bytes]:
    return _bytes_spec("header", len(data)), data


@pytest.mark.parametrize(
    "forged",
    [
        _forged("question"),
        _forged("question", (_bytes_spec("other", 256), bytes(256))),
        _forged("question", (TensorSpec(name="header", dtype=DType.INT64, shape=(32,)), bytes(256))),
        _forged("question", _header(b"\1")),
        _forged("question", _header((257).to_bytes(4, "little") + bytes(252))),
        _forged("question", _header((3).to_bytes(4, "little") + b"\xff\xff\xff")),
        _forged("question", _header(bytes(messages.MAX_REQUEST_BYTES + 257))),
        _forged("question", _header(bytes(256)), (_bytes_spec("more", 1), b"x")),
    ],
)
def test_a_header_that_is_none_is_refused(forged: tuple[Layout, Sequence[memoryview]]) -> None:
    with pytest.raises(ValueError, match="question message"):
        messages.read_question(*forged)


@pytest.mark.parametrize("digest", ["", "ab" * 31, "AB" * 32, "../" * 21 + "a"])
def test_a_fetch_without_a_digest_is_refused(digest: str) -> None:
    with pytest.raises(ValueError, match="hex"):
        messages.read_fetch(*_sent(messages.fetch_message(1, pb.SectionRequest(digest=digest))))


@pytest.mark.parametrize(
    ("specs", "has_drawn"),
    [
        ([("image_latent", DType.FLOAT32, (1, 2, 3, 4))], True),
        ([("noise", DType.FLOAT32, (1, 2, 3, 4)), ("image_latent", DType.FLOAT32, (1, 2, 3, 4))], True),
        ([("image_latent", DType.FLOAT32, (1, 2, 3, 4)), ("noise", DType.FLOAT32, (1, 2, 4, 3))], True),
        ([("image_latent", DType.FLOAT16, (1, 2, 3, 4)), ("noise", DType.FLOAT16, (1, 2, 3, 4))], True),
        ([("image_latent", DType.FLOAT32, (24,)), ("noise", DType.FLOAT32, (24,))], True),
        ([("image_latent", DType.FLOAT32, (1, 2, 3, 4)), ("noise", DType.FLOAT32, (1, 2, 3, 4))], False),
        ([], True),
    ],
)
def test_image_latent_and_noise_are_two_of_one_shape_or_absent(specs: list[Any], has_drawn: bool) -> None:
    rest = []
    for name, dtype, shape in specs:
        spec = TensorSpec(name=name, dtype=dtype, shape=shape)
        rest.append((spec, bytes(spec.size_bytes)))
    layout, views = _forged("answer", _header(bytes(256)), *rest)
    with pytest.raises(ValueError, match=r"answer message|image latent"):
        messages.read_drawn(layout, views, has_drawn=has_drawn)


def test_a_section_has_tensors_and_a_chunk_is_no_larger_than_it_may_be() -> None:
    with pytest.raises(ValueError, match="1 to"):
        messages.read_section(*_forged("section", _header(bytes(256))))
    with pytest.raises(ValueError, match="at most"):
        messages.read_chunk(*_sent(chunk_message(1, tensor=0, start=0, data=bytes(messages.CHUNK_BYTES + 1))))


def _drawn(drawn: DrawnTensors | None) -> tuple[tuple[int, ...], bytes, bytes] | None:
    return None if drawn is None else (drawn.shape, bytes(drawn.image_latent), bytes(drawn.noise))


def test_a_section_comes_with_what_the_store_has_spent() -> None:
    times = StoreTimes(wait_s=0.5, read_s=0.25)
    layout, views = _sent(messages.whole_message(4, times))
    assert messages.read_whole(layout, views) == (4, times)
    layout, views = _sent(chunk_message(4, tensor=0, start=0, data=bytes(16), times=times))
    number, chunk = messages.read_chunk(layout, views)
    assert (number, chunk.times) == (4, times)
    layout, views = _sent(chunk_message(4, tensor=0, start=16, data=bytes(16)))
    assert not messages.read_chunk(layout, views)[1].HasField("times")


def test_times_that_are_no_durations_are_refused() -> None:
    times = StoreTimes(read_s=-1.0)
    whole = _sent(messages.whole_message(4, times))
    chunk = _sent(chunk_message(4, tensor=0, start=0, data=bytes(16), times=times))
    answer = _sent(messages.answer_message(4, pb.TemplateAnswer(times=times), None))
    for read, sent in ((messages.read_whole, whole), (messages.read_chunk, chunk), (messages.read_answer, answer)):
        with pytest.raises(ValueError, match="are not 0 to"):
            read(*sent)
