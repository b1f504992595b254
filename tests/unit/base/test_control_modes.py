"""Modes of ControlNet unions: names, numbers, and the sentence of each refusal, from the rules to the gateway."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import click
import pytest

from bottega.adapter_rules import check_controlnets, check_union_images, mode_names, mode_number, refused_mode
from bottega.addons.controlnets.client.cli_options import ControlArgument, ControlType, describe_uses, merged
from bottega.addons.controlnets.gateway.addon import ControlNetAddOn, ResolvedControlNets
from bottega.addons.interface.views import ANYTHING
from bottega.client import ControlNet
from bottega.client.cli.addons import ask_as_operator
from bottega.client.types.models import Adapter, adapter_from
from bottega.client.types.options import options_from, spec_from
from bottega.client.types.provenance import provenance_from
from bottega.errors import InvalidRequest
from bottega.model_files.control_layout import base_layout
from bottega.v1 import generation_pb2
from tests.samples.addons import sample_addons
from tests.samples.controlnet_hosts import net
from tests.unit.addons.controlnets.gateway.test_hosts import MODEL, House

SIX = (
    "0 (openpose), 1 (depth), 2 (hed, pidi, scribble, ted), 3 (canny, lineart, anime_lineart, mlsd), 4 (normal), "
    "5 (segment)"
)
FIRST_NAMES = "openpose, depth, hed, canny, normal, segment, tile, repaint"
EIGHT = f"{SIX}, 6 (tile), 7 (repaint)"
OF_FLUX = "0 (canny), 1 (tile), 2 (depth), 3 (blur), 4 (pose, openpose), 5 (gray), 6 (low_quality)"


@pytest.mark.parametrize(("mode", "number"), [("depth", 1), ("scribble", 2), ("mlsd", 3), ("0", 0), ("63", 63)])
def test_a_mode_is_known_by_name_and_by_number(mode: str, number: int) -> None:
    assert mode_number(mode) == number


def test_the_number_of_a_name_depends_on_the_model() -> None:
    widths = {"in_channels": 64, "attention_head_dim": 8, "num_attention_heads": 4, "joint_attention_dim": 96}
    base = base_layout({**widths, "pooled_projection_dim": 32, "num_layers": 2, "num_single_layers": 1}, 8).base
    assert [mode_number(mode, base) for mode in ("depth", "openpose", "blur", "7", "hed")] == [2, 4, 3, 7, None]
    assert mode_names(8, base) == "canny, tile, depth, blur, pose, gray, low_quality, 7"
    assert mode_names(8, "16/8 sdxl") == FIRST_NAMES
    assert mode_names(8) == "0 to 7", "where the model is not known"
    assert refused_mode("union", "hed", 3, base) == (
        "ControlNet union has no control_mode hed; it has 0 (canny), 1 (tile), 2 (depth)"
    )


@pytest.mark.parametrize("mode", ["", "Depth", "64", "-1", "01", "1.0"])
def test_nothing_else_is_a_mode(mode: str) -> None:
    assert mode_number(mode) is None


def _net(name: str = "union", **fields: Any) -> generation_pb2.ControlNet:
    return generation_pb2.ControlNet(name=name, **{"control_mode": "depth", **fields})


REFUSED_BY_RULES = {
    "an unknown mode": (
        [_net(control_mode="sketch")],
        "controlnets[0].control_mode",
        f"must be one of {EIGHT}; with Flux.1 {OF_FLUX}",
    ),
    "guess mode of one image": (
        [_net(), _net(guess_mode=True)],
        "controlnets[1].guess_mode",
        "must be that of the first image: a union computes its images together",
    ),
}


@pytest.mark.parametrize("case", REFUSED_BY_RULES)
def test_a_request_that_breaks_a_rule_is_refused(case: str) -> None:
    nets, field, sentence = REFUSED_BY_RULES[case]
    (violation,) = check_controlnets(generation_pb2.GenerationSpec(controlnets=nets))
    assert (violation.field, violation.description) == (f"spec.{field}", sentence)


@pytest.mark.parametrize(
    "nets",
    [[_net()], [_net(), _net(control_mode="2")], [_net(), _net("other")], [_net(), _net("edges", control_mode="")]],
    ids=len,
)
def test_other_requests_with_modes_are_taken(nets: list[generation_pb2.ControlNet]) -> None:
    assert list(check_controlnets(generation_pb2.GenerationSpec(controlnets=nets))) == []


REFUSED_BY_GATEWAY = {
    "a mode for a net that is no union": (
        "edges",
        "depth",
        f"ControlNet edges is not a union and has no control_mode depth; leave it out. Unions have the modes {EIGHT}",
    ),
    "no mode for a union": ("union", None, f"ControlNet union is a union and needs a control_mode: {SIX}"),
    "a mode that the union lacks": ("union", "6", f"ControlNet union has no control_mode 6; it has {SIX}"),
}


@pytest.mark.parametrize("case", REFUSED_BY_GATEWAY)
def test_the_gateway_refuses_a_mode_that_does_not_fit(case: str) -> None:
    name, mode, sentence = REFUSED_BY_GATEWAY[case]
    house = House()
    house.server(net("edges"), net("union", control_modes=6))
    resolved = ResolvedControlNets(names=[name], modes=[mode], access=ANYTHING, hosts=house.nets)
    with pytest.raises(InvalidRequest) as refused:
        resolved.check_model(MODEL)
    assert refused.value.message == f"spec.controlnets[0].control_mode: {sentence}"


def test_several_images_of_a_union_for_a_unet_are_refused_beside_another() -> None:
    house = House()
    house.server(net("edges"), net("union", control_modes=6))
    resolved = ResolvedControlNets(
        names=["union", "union", "edges"], modes=["0", "1", None], access=ANYTHING, hosts=house.nets
    )
    with pytest.raises(InvalidRequest) as refused:
        resolved.check_model(MODEL)
    sentence = "several images of one union cannot be combined with another ControlNet"
    assert refused.value.message == f"spec.controlnets[1].name: {sentence}"
    nets = [("union", True), ("union", True), ("edges", False)]
    assert list(check_union_images(nets, "16/2x2 tokens of flux 3072+768")) == []
    assert list(check_union_images(nets[:2], "")) == list(check_union_images(nets[1:], "")) == []


async def test_callers_see_how_many_modes_a_union_has() -> None:
    addon = next(addon for addon in sample_addons() if isinstance(addon, ControlNetAddOn))
    addon._hosts.update(House().server(net("edges"), net("union", control_modes=6)))
    listed = [adapter_from(adapter) for adapter in await addon.adapters(ANYTHING, [MODEL])]
    assert {adapter.name: adapter.control_modes for adapter in listed if adapter} == {"edges": 0, "union": 6}


def test_the_gateway_leaves_versions_that_differ_to_the_server() -> None:
    house = House()
    house.server(net("union", control_modes=6), name="s1")
    house.server(net("union", control_modes=8), name="s2")
    ResolvedControlNets(names=["union"], modes=["7"], access=ANYTHING, hosts=house.nets).check_model(MODEL)


@pytest.mark.parametrize(("given", "sent"), [("depth", "depth"), (0, "0"), (None, "")])
def test_the_sdk_sends_a_mode_by_name_or_number(given: str | int | None, sent: str) -> None:
    spec = spec_from("a cat", {"controlnets": [ControlNet("union", b"image", control_mode=given)]})
    assert spec.controlnets[0].control_mode == sent
    (again,) = options_from(spec)["controlnets"] or ()
    assert again.control_mode == (sent or None)


def test_the_command_takes_name_mode_file_and_scale(tmp_path: Any) -> None:
    (tmp_path / "a.png").touch()
    argument = ControlType().convert(f"union:depth={tmp_path / 'a.png'}:0.8", None, None)
    assert argument == ControlArgument(name="union", mode="depth", file=tmp_path / "a.png", scale=0.8)
    with pytest.raises(click.BadParameter, match="'sketch' is no control mode of a union; give one of 0") as refused:
        ControlType().convert(f"union:sketch={tmp_path / 'a.png'}", None, None)
    assert refused.value.message.endswith(f"{EIGHT}; with Flux.1 {OF_FLUX}")


def test_a_picture_shows_each_mode_as_it_was_requested() -> None:
    message = generation_pb2.Provenance(
        parameters=generation_pb2.GenerationSpec(
            controlnets=[_net(control_mode="canny"), _net("edges", control_mode="")]
        ),
        controlnets=[
            generation_pb2.ControlNetUse(name="union", control_mode=3, scale=1),
            generation_pb2.ControlNetUse(name="edges", scale=1),
        ],
    )
    shown = list(describe_uses(provenance_from(message)))
    assert shown == [
        "control union: mode canny, scale 1, waited 0.000 s for it",
        "control edges: scale 1, waited 0.000 s for it",
    ]
    del message.parameters.controlnets[:]
    assert next(describe_uses(provenance_from(message))).startswith("control union: mode 3,")


@pytest.mark.parametrize(
    ("base", "modes"),
    [("16/8 sdxl", "openpose, depth"), ("16/2x2 tokens of flux 3072+768", "canny, tile"), ("", "0 to 1")],
)
def test_tenants_see_the_modes_of_a_union_for_its_model(
    base: str, modes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    union = Adapter(kind="controlnet", name="union", digest="12ab", models=("m",), control_modes=2)
    client = Mock(shows_key=True)
    client.adapters.return_value, client.models.return_value = (union,), (SimpleNamespace(name="m", base=base),)
    assert ask_as_operator(client, "controlnet", client.controlnets) is None
    assert modes in capsys.readouterr().out


def test_like_finds_the_image_of_each_mode(tmp_path: Any) -> None:
    then = [ControlNet("union", control_mode="openpose"), ControlNet("union", control_mode="depth")]
    pose, depth = (
        ControlArgument(name="union", mode=mode, file=tmp_path / f"{mode}.png", scale=None)
        for mode in ("openpose", "depth")
    )
    nets = merged(then, [depth, pose], None)
    assert [(one.image, one.control_mode) for one in nets] == [(pose.file, "openpose"), (depth.file, "depth")]
    with pytest.raises(click.UsageError, match="the ControlNet union:openpose: give its control image with --control"):
        merged(then, [depth], None)
