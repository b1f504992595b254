"""Activation stores that break the rules: their link ends, no edit takes anything of it, and the worker goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from bottega.addons.edits.wire import messages
from bottega.transport import WholeMessage, number_message
from bottega.v1.activations_pb2 import (
    BlockCost,
    BlockProfile,
    SectionInfo,
    SectionKey,
    SectionLayout,
    SectionRequest,
    TemplateAnswer,
)
from bottega.v1.trace_pb2 import StoreTimes
from tests.fakes.scripted_activation_store import ScriptedLink, ScriptedStore, Section, answer, chunk_message
from tests.support.stored_activations import KEY, RECORDING, SHAPES, drawn, section, step_key, worker
from tests.support.waiting import EVENTUALLY_S, wait_until

NAMES = tuple(SHAPES)
FIRST = section(0)
Change = Callable[[TemplateAnswer], object]


def broke_rules(caplog: pytest.LogCaptureFixture) -> bool:
    """Whether the worker has ended a link for that. It has said so before anybody hears that it was lost."""
    wait_until(lambda: any("is lost" in each.message for each in caplog.records), "the end of the link")
    return any("broke the rules" in getattr(each, "text", "") for each in caplog.records)


@pytest.fixture
def far() -> Iterator[ScriptedStore]:
    made = ScriptedStore("one")
    yield made
    made.close()


@pytest.fixture
def near(tmp_path: Path) -> Iterator[ScriptedStore]:
    made = ScriptedStore("one", folder=tmp_path)
    yield made
    made.close()


def changed(change: Change) -> TemplateAnswer:
    said = answer(RECORDING, [FIRST, section(1)], drawn())
    change(said)
    return said


def set_profile(
    said: TemplateAnswer,
    *,
    full_s: float = 0.5,
    forward_s: float = 1.0,
    shares: Sequence[float] = (0.1, 0.2),
    masked_s: Sequence[float] = (0.1, 0.2),
) -> None:
    block = BlockCost(name=NAMES[0], full_s=full_s, masked_s=masked_s)
    said.profile.CopyFrom(BlockProfile(shares=shares, blocks=[block], forward_s=forward_s))


ANSWERS: dict[str, Change] = {
    "an id that is none": lambda said: setattr(said, "recording", "x" * 32),
    "no sections": lambda said: said.ClearField("sections"),
    "a huge size": lambda said: setattr(said, "latent_height", 1 << 30),
    "a layout that is not there": lambda said: setattr(said.sections[1], "layout", 7),
    "a map that is not there": lambda said: setattr(said.sections[1], "map", -1),
    "a map that is too short": lambda said: said.maps.__setitem__(0, b"\xff"),
    "a half that is none": lambda said: setattr(said.sections[0].key, "half", 2),
    "a timestep that is no number": lambda said: setattr(said.sections[0].key, "timestep", float("nan")),
    "noise without an end": lambda said: setattr(said.sections[0].key, "noise_level", float("inf")),
    "a crowd of ControlNets": lambda said: said.sections[0].key.controls.extend(range(100)),
    "a digest that is none": lambda said: setattr(said.sections[0], "digest", "zz"),
    "one forward twice": lambda said: said.sections[1].key.CopyFrom(said.sections[0].key),
    "a tensor without a shape": lambda said: said.layouts[0].tensors[0].ClearField("shape"),
    "a tensor beyond all bounds": lambda said: said.layouts[0].tensors[0].shape.append(1 << 30),
    "a tensor twice": lambda said: said.layouts[0].tensors.add(name=NAMES[0], shape=[1]),
    "an empty layout": lambda said: said.layouts[0].CopyFrom(SectionLayout()),
    "latent and noise that do not follow": lambda said: setattr(said, "has_drawn", False),
    "latent and noise of another size": lambda said: said.MergeFrom(TemplateAnswer(latent_height=6, latent_width=4)),
    "a profile of endless seconds": lambda said: set_profile(said, full_s=float("inf")),
    "a profile of seconds that are no number": lambda said: set_profile(said, forward_s=float("nan")),
    "too many sections": lambda said: said.sections.extend(
        SectionInfo(key=SectionKey(timestep=step, noise_level=1.0), digest=FIRST.digest) for step in range(5000)
    ),
}


@pytest.mark.parametrize("change", ANSWERS.values(), ids=ANSWERS.keys())
def test_an_answer_that_cannot_be_is_none(far: ScriptedStore, change: Change, caplog: pytest.LogCaptureFixture) -> None:
    far.header, far.drawn = changed(change), drawn()
    with worker(far) as here:
        assert here.find() is None
        assert broke_rules(caplog)
        assert here.source.begin(KEY, (4, 6)) is not None


def test_latent_and_noise_that_are_no_numbers_are_none(far: ScriptedStore, caplog: pytest.LogCaptureFixture) -> None:
    bad = bytearray(drawn().image_latent)
    bad[:4] = b"\x00\x00\xc0\x7f"
    said = drawn()
    object.__setattr__(said, "image_latent", bytes(bad))
    far.header, far.drawn = changed(lambda _: None), said
    with worker(far) as here:
        assert here.find() is None
        assert broke_rules(caplog)


def chunk(number: int, *, tensor: int = 0, start: int = 0, size_bytes: int = 16) -> WholeMessage:
    return chunk_message(number, tensor=tensor, start=start, data=bytes(size_bytes))


CHUNKS: dict[str, Callable[[int], WholeMessage]] = {
    "a later byte": lambda number: chunk(number, start=16),
    "a byte before the first": lambda number: chunk(number, start=-16),
    "more bytes than the tensor has": lambda number: chunk(number, size_bytes=4096),
    "a tensor that nobody has requested": lambda number: chunk(number, tensor=1),
    "a tensor that there is not": lambda number: chunk(number, tensor=99),
    "a whole section without its file": lambda number: messages.whole_message(number, StoreTimes()),
    "a chunk that has taken no duration": lambda number: chunk_message(
        number, tensor=0, start=0, data=bytes(16), times=StoreTimes(read_s=float("nan"))
    ),
    "a question": lambda number: number_message("question", number),
    "a word that nobody knows": lambda number: number_message("hello", number),
    "a refusal that says nothing": lambda number: messages.refused_message(number, b"{{{"),
}


@pytest.mark.parametrize("lie", CHUNKS.values(), ids=CHUNKS.keys())
def test_what_was_not_requested_ends_the_link_and_nothing_of_it_is_used(
    far: ScriptedStore, lie: Callable[[int], WholeMessage], caplog: pytest.LogCaptureFixture
) -> None:
    far.put(RECORDING, FIRST)

    def send(link: ScriptedLink, number: int, _request: SectionRequest) -> None:
        link.connection.send(lie(number))

    far.fetched = send
    with worker(far) as here:
        step = here.found().steps[step_key(0)]
        step.request(NAMES[:1])
        assert not step.wait(NAMES[0], EVENTUALLY_S)
        assert broke_rules(caplog)
        assert (step.get(NAMES[0]), step.held_bytes) == (None, 0)


def other_template(said: Section) -> bytes:
    return said.data[:-64] + bytes(64)


FILES: dict[str, Callable[[Section], bytes]] = {
    "another template's": other_template,
    "one that is too short": lambda said: said.data[64:],
    "one that is too long": lambda said: said.data + bytes(64),
}


@pytest.mark.parametrize("file", FILES.values(), ids=FILES.keys())
def test_a_file_that_is_not_the_section_is_not_used(near: ScriptedStore, file: Callable[[Section], bytes]) -> None:
    near.put(RECORDING, FIRST, section(1))
    near.fetched = lambda link, number, _request: near.send_file(link, number, file(FIRST))
    with worker(near) as here:
        recording = here.found()
        step = recording.steps[step_key(0)]
        step.request(NAMES)
        assert not step.wait(NAMES[0], EVENTUALLY_S)
        assert step.get(NAMES[0]) is None
        near.fetched = near.send
        other = recording.steps[step_key(1)]
        other.request(NAMES)
        assert other.wait(NAMES[0], EVENTUALLY_S), "the link lives"
        assert here.counts["loads_refused"] == 1
