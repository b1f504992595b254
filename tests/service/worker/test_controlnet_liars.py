"""A worker that breaks the rules of the messages loses its own link, with an error that says why; others go on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bottega.addons.controlnets.engine import ControlLayout
from bottega.addons.controlnets.engine.messages import (
    ControlMessageKind,
    ControlStep,
    Opening,
    Refusal,
    SessionSpec,
    StepEntry,
    open_message,
    read_refusal,
    read_residuals_head,
    refused_message,
    step_message,
)
from bottega.addons.controlnets.engine.provider import ControlInput
from bottega.controlnet import worker_link
from bottega.device_links.tensor_messages import TensorMessage, message_of
from bottega.errors import BadFrame
from bottega.model.model import Model
from bottega.model.rows import Embeds, Half
from bottega.transport import (
    Deadline,
    DType,
    Layout,
    Link,
    TensorSpec,
    WholeMessage,
    connect,
    kind_of,
    number_message,
    read_number,
)
from bottega.transport.server import sum_up_logs
from tests.fakes.scripted_controlnet_link import send
from tests.samples.controlnets import control_image, layout_of, random_controlnet, save
from tests.support.linked_servers import LinkedServer, linked_server
from tests.support.manual_engine import load
from tests.support.waiting import wait_until

SIDE = 64
TOKENS = 77
SAMPLE = torch.zeros(1, 4, 16, 16)
SOON_S = 20.0


@pytest.fixture(autouse=True)
def _lines(caplog: pytest.LogCaptureFixture) -> None:
    sum_up_logs()  # the log has a few of each second, and each test ends a link
    caplog.set_level(logging.INFO, "bottega")


@pytest.fixture(scope="module")
def model() -> Model:
    return load()


@pytest.fixture(scope="module")
def base(model: Model) -> ControlLayout:
    return layout_of(model)


@pytest.fixture(scope="module")
def server(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LinkedServer]:
    folders = save({"edges": random_controlnet(model.backbone.network, 0)}, tmp_path_factory.mktemp("nets"))
    with linked_server("liars", folders, tmp_path_factory.mktemp("liars")) as server:
        yield server


@pytest.fixture
def link(server: LinkedServer) -> Iterator[Link]:
    with connect(server.offer(""), soon()) as link:
        yield link


@pytest.fixture(scope="module")
def honest(server: LinkedServer, base: ControlLayout) -> Iterator[Link]:
    """Another worker's, with a session that is open all the time."""
    with connect(server.offer(""), soon()) as link:
        send(link, open_message(opening(base)))
        assert heard(link)[0] == ControlMessageKind.OPENED
        yield link


def opening(base: ControlLayout, *, lease: int = 1, sessions: int = 1, **changes: object) -> Opening:
    """Sessions from number 10 on, of both halves."""
    embeds = Embeds(
        prompt=torch.zeros(TOKENS, base.context_width),
        added={"text_embeds": torch.zeros(base.pooled_width), "time_ids": torch.zeros(6)},
    )
    halves = {Half.UNCONDITIONAL: embeds, Half.CONDITIONAL: embeds}
    said = {"name": "edges", "digest": "", "height": SIDE, "width": SIDE, "scale": 1.0, "guess_mode": False}
    control = ControlInput(name="edges", images=(control_image(1),), height=SIDE, width=SIDE, halves=halves)
    return Opening(
        lease=lease,
        base=base,
        dtype=torch.float32,
        sessions=tuple(
            SessionSpec(number=10 + place, halves=tuple(halves), **(said | changes))  # type: ignore[arg-type]
            for place in range(sessions)
        ),
        controls=(control,) * sessions,
    )


def step(
    number: int = 5, session: int = 10, half: Half = Half.CONDITIONAL, sample: torch.Tensor = SAMPLE
) -> ControlStep:
    entries = (StepEntry(session=session, half=half, sample=0),)
    return ControlStep(number=number, entries=entries, samples=sample, timesteps=torch.tensor([500.0]))


def changed(message: TensorMessage, name: str, tensor: torch.Tensor) -> TensorMessage:
    """The message with another tensor of that name."""
    kept = {spec.name: each for spec, each in zip(message.layout.specs, message.tensors, strict=True)} | {name: tensor}
    dtypes = {torch.float32: DType.FLOAT32, torch.uint8: DType.UINT8, torch.int64: DType.INT64}
    specs = [TensorSpec(name=key, dtype=dtypes[each.dtype], shape=tuple(each.shape)) for key, each in kept.items()]
    layout = Layout.of(*specs, headers=message.layout.headers)
    return TensorMessage(layout=layout, tensors=tuple(kept.values()))


def garbled(message: TensorMessage) -> TensorMessage:
    return changed(message, "open", torch.frombuffer(bytearray(b'{"lease": 1, "sessions": 7'), dtype=torch.uint8))


def table(*rows: list[int]) -> torch.Tensor:
    return torch.tensor([[5, 0, 0], *rows])


LIES: dict[str, Callable[[ControlLayout], WholeMessage]] = {
    "no kind": lambda base: TensorMessage(
        layout=Layout.of(TensorSpec(name="hello", dtype=DType.FLOAT32, shape=(1,))), tensors=(torch.zeros(1),)
    ),
    "what only servers say": lambda base: number_message(ControlMessageKind.OPENED),
    "a refusal": lambda base: refused_message(Refusal(lease=1, error=b"{}")),
    "no JSON": lambda base: garbled(open_message(opening(base))),
    "a name that is too long": lambda base: open_message(opening(base, name="x" * 201)),
    "a scale that is no number": lambda base: open_message(opening(base, scale=float("nan"))),
    "a picture of no height": lambda base: open_message(opening(base, height=0)),
    "a picture beyond all bounds": lambda base: open_message(opening(base, height=16384, width=16384)),
    "two sessions of one number": lambda base: open_message(
        replace(opening(base, sessions=2), sessions=opening(base).sessions * 2)
    ),
    "images of a session that does not exist": lambda base: open_message(opening(base, images_of=0)),
    "no control image": lambda base: changed(open_message(opening(base)), "image.0.0", torch.zeros(8, 8, 4)),
    "conditions of another width": lambda base: changed(
        open_message(opening(base)), "condition.prompt", torch.zeros(2, TOKENS, base.context_width + 1)
    ),
    "conditions of one half": lambda base: changed(
        open_message(opening(base)), "condition.text_embeds", torch.zeros(1, base.pooled_width)
    ),
    "a condition that the network does not read": lambda base: changed(
        open_message(opening(base)), "condition.other", torch.zeros(2, base.pooled_width)
    ),
    "a step of a session that is not open": lambda base: step_message(step(session=99)),
    "a table that is none": lambda base: changed(step_message(step()), "step", torch.zeros(3, dtype=torch.int64)),
    "a half that there is not": lambda base: changed(step_message(step()), "step", table([10, 2, 0])),
    "a sample that there is not": lambda base: changed(step_message(step()), "step", table([10, 1, 1])),
    "the same row twice": lambda base: changed(step_message(step()), "step", table([10, 1, 0], [10, 1, 0])),
    "samples without timesteps": lambda base: changed(step_message(step()), "timesteps", torch.zeros(2)),
    "the number of nothing": lambda base: message_of({"close": torch.zeros(2)}),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_ends_the_liars_link_and_no_other(
    base: ControlLayout, honest: Link, link: Link, caplog: pytest.LogCaptureFixture, lie: str
) -> None:
    send(link, LIES[lie](base))
    with pytest.raises(BadFrame):
        heard(link)
    ended_for(caplog, "broke the rules of its messages")
    send(honest, step_message(step()))
    assert heard(honest) == (ControlMessageKind.RESIDUALS, 5)


@pytest.mark.parametrize(
    "sample", [torch.zeros(1, 4, 16, 8), torch.zeros(1, 3, 16, 16), torch.zeros(1, 4, 16, 16, dtype=torch.int64)]
)
def test_a_sample_that_is_not_the_sessions_ends_the_link(
    base: ControlLayout, link: Link, caplog: pytest.LogCaptureFixture, sample: torch.Tensor
) -> None:
    send(link, open_message(opening(base)))
    assert heard(link)[0] == ControlMessageKind.OPENED
    send(link, changed(step_message(step()), "samples", sample))
    with pytest.raises(BadFrame):
        heard(link)
    ended_for(caplog, "samples")


def test_what_cannot_be_served_is_answered_and_the_link_lives(base: ControlLayout, link: Link) -> None:
    other = replace(base, latent_channels=16)
    unserved = (opening(base, name="unknown"), opening(base, digest="0" * 64), replace(opening(base), base=other))
    for lease, wanted in enumerate(unserved, start=1):
        send(link, open_message(replace(wanted, lease=lease)))
        assert heard(link) == (ControlMessageKind.REFUSED, lease)
    send(link, number_message("ping"))
    assert heard(link)[0] == "pong"


def test_a_worker_has_no_more_sessions_than_it_may(
    base: ControlLayout, link: Link, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_link, "_MAX_SESSIONS", 2)
    send(link, open_message(opening(base, sessions=3)))
    with pytest.raises(BadFrame):
        heard(link)
    ended_for(caplog, "at most 2 sessions")


def test_what_a_link_had_is_given_back_when_it_ends(server: LinkedServer, base: ControlLayout, honest: Link) -> None:
    with connect(server.offer(""), soon()) as link:
        send(link, open_message(opening(base, sessions=2)))
        assert heard(link) == (ControlMessageKind.OPENED, 1)
        assert server.links.sessions == {"edges": 3}
        server.pause()
        send(link, step_message(step()))
        wait_until(lambda: server.executor.busy, "the step to be taken in")
    wait_until(lambda: server.links.sessions == {"edges": 1}, "the sessions to be closed")
    assert not server.executor.busy
    server.computes.set()


def test_a_draining_server_opens_no_sessions_and_goes_on_with_those_that_are_open(
    model: Model, base: ControlLayout, tmp_path: Path
) -> None:
    folders: Mapping[str, Path] = save({"edges": random_controlnet(model.backbone.network, 0)}, tmp_path)
    with linked_server("draining", folders, tmp_path) as server, connect(server.offer(""), soon()) as link:
        send(link, open_message(opening(base)))
        assert heard(link) == (ControlMessageKind.OPENED, 1)
        server.links.drain()
        send(link, step_message(step()))
        assert heard(link) == (ControlMessageKind.RESIDUALS, 5)
        another = replace(opening(base).sessions[0], number=70)
        send(link, open_message(replace(opening(base, lease=2), sessions=(another,))))
        assert heard(link) == (ControlMessageKind.REFUSED, 2)


def heard(link: Link) -> tuple[str, int]:
    """The next message's kind, and its number. Raises what the link died of."""
    with link.recv(soon()) as incoming:
        incoming.wait_all(soon())
        kind = kind_of(incoming.layout)
        views = [incoming.view(index) for index in range(len(incoming.layout.specs))]
        if kind != ControlMessageKind.REFUSED:
            read = read_residuals_head if kind == ControlMessageKind.RESIDUALS else None
            return kind, read(incoming.layout, views[0])[0] if read else read_number(incoming.layout, views)
        refusal = read_refusal(incoming.layout, views)
        return kind, -1 if refusal.lease is None else refusal.lease


def ended_for(caplog: pytest.LogCaptureFixture, cause: str) -> None:
    """The server's log says that a link has ended because of that. Other links may end meanwhile."""
    wait_until(
        lambda: any(
            line.message == "a worker's link has ended" and cause in str(line.__dict__["text"])
            for line in caplog.records
        ),
        "the server to say that the link has ended",
    )


def soon() -> Deadline:
    return Deadline.after(SOON_S)
