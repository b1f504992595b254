"""What add-ons tell those of the other worker of a pair: it comes as it was sent, and what breaks a rule is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from bottega.addons.controlnets.engine.provider import ControlHosts, ControlInput, ControlServer
from bottega.addons.controlnets.engine.remote import RemoteControls, controls_part, read_controls
from bottega.addons.loras.engine.lora_set import RemoteLoras, loras_part, read_loras
from bottega.engine.parallel.remote_rows import OffloadedPart
from bottega.engine.spec import LoraSpec
from bottega.model.rows import Embeds, Half, LoraSet, Row

EMBEDS = {
    half: Embeds(prompt=torch.randn(7, 8), added={"text_embeds": torch.randn(8), "time_ids": torch.arange(6.0)})
    for half in tuple(Half)
}
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
ROW = Row(
    owner="request",
    step=4,
    half=Half.CONDITIONAL,
    sample=torch.randn(4, 8, 8),
    timestep=torch.tensor(901),
    embeds=EMBEDS[Half.CONDITIONAL],
)


class Opened:
    """Whoever holds sessions, which are numbers."""

    def open(self, controls: Sequence[ControlInput]) -> tuple[int, ...]:
        return tuple(range(len(controls)))


class Fetched:
    """LoRAs that are here, or not."""

    waiting = False

    def __init__(self, loras: LoraSet | None) -> None:
        self.loras = loras


def test_controlnets_come_as_they_were_sent_but_never_with_stale_residuals() -> None:
    _, control = read_controls(controls_part([CONTROL, CONTROL]), EMBEDS)
    assert torch.equal(control.images[0], CONTROL.images[0])
    assert (control.name, control.scale, control.guess_mode) == ("edges", 0.5, True)
    assert (control.hosts, control.height, control.width) == (CONTROL.hosts, 64, 64)
    assert set(control.halves) == {Half.CONDITIONAL}
    assert not control.may_be_stale


def test_images_that_several_sessions_use_are_sent_once() -> None:
    spans = [replace(CONTROL, scale=scale) for scale in (0.5, 0.0)]
    part = controls_part(spans)
    assert len(part.tensors) == 1
    first, second = read_controls(part, EMBEDS)
    assert second.images[0] is first.images[0]
    assert (first.scale, second.scale) == (0.5, 0.0)


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


def test_loras_come_as_they_were_sent() -> None:
    lora = LoraSpec(name="outline", digest="abc", scale=-0.5)
    assert read_loras(loras_part([lora])) == (lora,)


WHOLE = controls_part([CONTROL])


@pytest.mark.parametrize(
    "part",
    [
        replace(WHOLE, tensors={}),
        replace(WHOLE, tensors={"0.0": torch.zeros(16, 24, 3)}),
        replace(WHOLE, header=b"[]"),
        replace(WHOLE, header=b"nothing"),
        controls_part([replace(CONTROL, halves=EMBEDS)]),
        controls_part([CONTROL] * 18),
    ],
    ids=["no image", "floats", "none", "no JSON", "a half without conditions", "eighteen"],
)
def test_controlnets_that_break_a_rule_are_refused(part: OffloadedPart) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of several kinds
        read_controls(part, {Half.CONDITIONAL: EMBEDS[Half.CONDITIONAL]})


def test_a_row_has_what_is_active_in_it_and_nothing_else() -> None:
    provider: Any = Opened()
    controls = RemoteControls(provider, [CONTROL, CONTROL])
    assert controls.activate(ROW, 2).controls == (1,)
    assert controls.activate(ROW, 3).controls == (0, 1)
    here: Any = Fetched(LoraSet(key=(), components={}))
    assert RemoteLoras(here).activate(ROW, 1).loras is here.loras
    assert RemoteLoras(here).activate(ROW, 0).loras is None
    away: Any = Fetched(None)
    for remote, active in ((controls, 4), (RemoteLoras(here), 2), (RemoteLoras(away), 1)):
        with pytest.raises(ValueError, match="a row has"):
            remote.activate(ROW, active)
