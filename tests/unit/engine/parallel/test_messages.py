"""What the engines of a pair and their add-ons tell each other: it comes as sent; what breaks a rule is not taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bottega.addons.controlnets.engine.provider import ControlHosts, ControlInput, ControlServer
from bottega.addons.controlnets.engine.remote import MAX_SESSIONS, RemoteControls, controls_part, read_controls
from bottega.addons.loras.engine.lora_set import RemoteLoras
from bottega.device_links.tensor_messages import TensorMessage, message_of
from bottega.engine.parallel.messages import (
    PairMessageKind,
    RemoteNoise,
    job_message,
    noise_message,
    read_job,
    read_noise,
    read_step,
)
from bottega.engine.parallel.remote_rows import OffloadedPart, RemoteJob
from bottega.model.rows import Embeds, Half, LoraSet, Row

EMBEDS = {
    half: Embeds(prompt=torch.randn(7, 8), added={"text_embeds": torch.randn(8), "time_ids": torch.arange(6.0)})
    for half in tuple(Half)
}
IMAGE = torch.randint(0, 256, (16, 24, 3), dtype=torch.uint8)
PARTS = {
    "controlnet": OffloadedPart(header=b'["edges"]', tensors={"0": IMAGE}),
    "loras": OffloadedPart(header=b'["outline"]'),
}
GUEST = RemoteJob(halves=EMBEDS, parts=PARTS)
TABLE = [[5, 0, 0, 0, 0, 0], [3, 0, 1, 4, 2, 0]]


def step_of(**changed: Tensor) -> TensorMessage:
    """A step of one row, with some of its tensors changed."""
    parts: Mapping[str, Tensor] = {
        PairMessageKind.STEP.value: torch.tensor(TABLE),
        "timesteps": torch.zeros(1),
        "samples": torch.zeros(1, 4, 8, 8),
    }
    return message_of({**parts, **changed})


def test_noise_comes_for_the_rows_that_have_some_with_what_was_waited_for() -> None:
    noise = torch.randn(2, 4, 8, 8)
    message = noise_message(RemoteNoise(number=5, places=(0, 2), noise=noise, waited_s=0.25))
    answer = read_noise(message.layout, message.buffers)
    assert (answer.number, answer.places, answer.waited_s) == (5, (0, 2), 0.25)
    assert torch.equal(answer.noise, noise)


BROKEN = {
    "no row": step_of(step=torch.tensor(TABLE[:1])),
    "floats": step_of(step=torch.tensor(TABLE).float()),
    "a third half": step_of(step=torch.tensor([TABLE[0], [3, 0, 2, 4, 0, 0]])),
    "a negative job": step_of(step=torch.tensor([TABLE[0], [-1, 0, 0, 4, 0, 0]])),
    "something below 0 active": step_of(step=torch.tensor([TABLE[0], [3, 0, 0, 4, 0, -1]])),
    "no step of a row": step_of(step=torch.tensor(TABLE)[:, :3]),
    "nine parts": step_of(step=torch.zeros(2, 13, dtype=torch.int64)),
    "samples": step_of(samples=torch.zeros(2, 4, 8, 8)),
    "bytes": step_of(samples=torch.zeros(1, 4, 8, 8, dtype=torch.uint8)),
    "timesteps": step_of(timesteps=torch.zeros(2)),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_step_that_breaks_a_rule_is_not_taken(rule: str) -> None:
    message = BROKEN[rule]
    with pytest.raises(ValueError, match="a step"):
        read_step(message.layout, message.buffers)


@pytest.mark.parametrize("table", [[5, 0, 0], [5], [5, -1, 0, 1]], ids=["a row less", "no wait", "a negative wait"])
def test_noise_without_a_number_for_each_row_is_not_taken(table: list[int]) -> None:
    message = message_of({PairMessageKind.NOISE.value: torch.tensor(table), "rows": torch.zeros(2, 4, 8, 8)})
    with pytest.raises(ValueError, match="noise"):
        read_noise(message.layout, message.buffers)


def test_a_job_without_its_conditions_or_a_part_is_not_taken() -> None:
    whole = job_message(3, GUEST)
    for name in ("condition.prompt", "loras."):
        parts = {spec.name: tensor for spec, tensor in zip(whole.layout.specs, whole.tensors, strict=True)}
        del parts[name]
        message = message_of(parts)
        with pytest.raises(ValueError, match=r"prompt|no data of loras"):
            read_job(message.layout, message.buffers)


CONTROL = ControlInput(
    name="edges",
    images=(torch.randint(0, 256, (16, 24, 3), dtype=torch.uint8),),
    height=64,
    width=64,
    halves={Half.CONDITIONAL: EMBEDS[Half.CONDITIONAL]},
    scale=0.5,
    guess_mode=True,
    hosts=ControlHosts(digest="abc", servers=(ControlServer(name="s", address="h:1"),)),
    may_be_stale=True,
)


def test_controlnets_come_as_they_were_sent_but_never_with_stale_residuals() -> None:
    _, control = read_controls(controls_part([CONTROL, CONTROL]), EMBEDS)
    assert torch.equal(control.images[0], CONTROL.images[0])
    assert (control.name, control.scale, control.guess_mode) == ("edges", 0.5, True)
    assert (control.hosts, control.height, control.width) == (CONTROL.hosts, 64, 64)
    assert set(control.halves) == {Half.CONDITIONAL}
    assert not control.may_be_stale


def test_the_images_of_a_union_come_with_their_modes_and_scales() -> None:
    images = (CONTROL.images[0], CONTROL.images[0].flip(0))
    union = replace(CONTROL, images=images, modes=(1, 5), image_scales=(0.8, 0.3))
    _, control = read_controls(controls_part([CONTROL, union]), EMBEDS)
    assert all(torch.equal(image, sent) for image, sent in zip(control.images, images, strict=True))
    assert (control.modes, control.image_scales) == ((1, 5), (0.8, 0.3))
    broken = [replace(union, modes=(1,)), replace(union, modes=()), replace(union, image_scales=(1.0,))]
    for wrong in (*broken, replace(union, modes=(1, 64))):
        with pytest.raises(ValueError):  # noqa: PT011 - pydantic's
            read_controls(controls_part([wrong]), EMBEDS)


WHOLE = controls_part([CONTROL])


@pytest.mark.parametrize(
    "part",
    [
        replace(WHOLE, tensors={}),
        replace(WHOLE, tensors={"0.0": torch.zeros(16, 24, 3)}),
        replace(WHOLE, header=b"[]"),
        replace(WHOLE, header=b"nothing"),
        controls_part([replace(CONTROL, halves=EMBEDS)]),
        controls_part([CONTROL] * (MAX_SESSIONS + 1)),
    ],
    ids=["no image", "floats", "none", "no JSON", "a half without conditions", "too many"],
)
def test_controlnets_that_break_a_rule_are_refused(part: OffloadedPart) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of several kinds
        read_controls(part, {Half.CONDITIONAL: EMBEDS[Half.CONDITIONAL]})


class Opened:
    """Whoever holds sessions, which are numbers."""

    def open(self, controls: Sequence[ControlInput]) -> tuple[int, ...]:
        return tuple(range(len(controls)))


class Fetched:
    """LoRAs that are here after one look."""

    loras: LoraSet | None = None

    def update(self, now_s: float) -> None:
        self.loras = LoraSet(key=(), components={})


def test_a_row_has_what_is_active_in_it_and_nothing_else() -> None:
    row = Row(
        owner="request",
        step=4,
        half=Half.CONDITIONAL,
        sample=torch.zeros(4, 8, 8),
        timestep=torch.tensor(901),
        embeds=EMBEDS[Half.CONDITIONAL],
    )
    opened: Any = Opened()
    fetched: Any = Fetched()
    controls, loras = RemoteControls(opened, [CONTROL, CONTROL]), RemoteLoras(fetched)
    assert controls.activate(row, 2).controls == (1,)
    assert controls.activate(row, 3).controls == (0, 1)
    with pytest.raises(ValueError, match="a row has"):
        loras.activate(row, 1)
    assert loras.ready(0.0)
    assert loras.activate(row, 1).loras is fetched.loras
    assert loras.activate(row, 0).loras is None
    for remote, active in ((controls, 4), (loras, 2)):
        with pytest.raises(ValueError, match="a row has"):
            remote.activate(row, active)
