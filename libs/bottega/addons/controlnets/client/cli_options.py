"""What ControlNets add to `bottega generate` and `bottega edit`: --control, output lines and the names of fields."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import click

from bottega import rules
from bottega.adapter_rules import is_mode, list_all_modes
from bottega.client.types.inputs import ControlNet
from bottega.client.types.options import GenerationOptions
from bottega.client.types.provenance import ControlNetUse, Provenance
from bottega.errors import Violation

# Seconds of the encoder that are worth a line.
_SHORTEST_S = 0.0005


def merge_controlnets(options: GenerationOptions, given: dict[str, Any], like: Path | None) -> None:
    """Put the ControlNets of a request into its options; see `merged`."""
    if nets := merged(options.pop("controlnets", None) or (), given.pop("controlnets"), like):
        options["controlnets"] = nets


def describe_uses(provenance: Provenance) -> Iterator[str]:
    """Yield what to say about each ControlNet of a picture."""
    # Numbers of modes mean something else with each kind of model, so the request's own words are shown.
    given = provenance.parameters.controlnets or ()
    for use, net in zip_longest(provenance.controlnets, given[: len(provenance.controlnets)]):
        mode = use.control_mode if net is None or net.control_mode is None else net.control_mode
        yield f"control {use.name}: {', '.join(_use_facts(use, mode, provenance.worker))}"
    if provenance.controlnets and provenance.encoder_s >= _SHORTEST_S:
        yield f"ControlNets ran during {provenance.encoder_s:.3f} s of the model's blocks that need none"


def warn_of_images(provenance: Provenance) -> Iterator[str]:
    """Yield warnings about control images."""
    for use in provenance.controlnets:
        image = f"the image of control {use.name}"
        if use.transparency_unread:
            yield f"{image} is partly transparent; its colours were used as if it were opaque"
        if use.scaled_from_16_bits:
            yield f"{image} has 16 bits of grey, which were scaled to 8 (Diffusers makes nearly all of these white)"


def _use_facts(use: ControlNetUse, mode: str | int | None, worker: str) -> Iterator[str]:
    servers = ["the worker itself" if server == worker else server for server in use.servers]
    if servers:
        yield f"by {', then '.join(servers)}"
    if mode is not None:
        yield f"mode {mode}"
    yield f"scale {use.scale:g}"
    yield f"waited {use.waited_s:.3f} s for it"
    if use.stale_steps:
        yield f"{use.stale_steps} steps with residuals one step old (approximate)"
    if use.end_step and use.begin_step == use.end_step:
        yield "active in no step"


# The gateway's names for fields of a request's ControlNets.
_PLACE = re.compile(r"(?:spec\.)?controlnets\[(\d+)\]\.(\w+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlArgument:
    """The value of an option --control."""

    name: str
    mode: str | None = None
    """Control mode of a union; None if none was given."""
    file: Path
    scale: float | None
    """The scale; None if none was given."""


class ControlType(click.ParamType[ControlArgument]):
    """A Click type for a ControlNet, given as NAME[:MODE]=FILE[:SCALE]."""

    name = "control"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> ControlArgument:
        given_name, given, rest = value.partition("=")
        name, has_mode, mode = given_name.partition(":")
        if not given or not rest:
            self.fail(f"{value!r}: give NAME=FILE or NAME=FILE:SCALE, such as edges=edges.png:0.8", param, ctx)
        if not rules.is_adapter_name(name):
            self.fail(
                f"{name!r} is no name of a ControlNet (letters, digits and . _ / + -); bottega controlnets lists them",
                param,
                ctx,
            )
        if has_mode and not is_mode(mode):
            self.fail(f"{mode!r} is no control mode of a union; give one of {list_all_modes()}", param, ctx)
        colon = _colon_before_scale(rest)
        file, scale = Path(rest[:colon]), rest[colon + 1 :]
        if not file.exists():
            self.fail(f"{name}: there is no file {file}", param, ctx)
        if file.is_dir():
            self.fail(f"{name}: {file} is a folder; give an image file", param, ctx)
        number = _number(scale)
        if colon < len(rest) and number is None:
            self.fail(f"{name}: {scale!r} is no scale; give a number such as 0.8 after FILE:", param, ctx)
        return ControlArgument(name=name, mode=mode or None, file=file, scale=number)


def merged(then: Sequence[ControlNet], given: Sequence[ControlArgument], like: Path | None) -> list[ControlNet]:
    """Return the ControlNets of a request: those of an earlier picture with the images given now, then the others.

    Args:
        then: ControlNets of the earlier picture, without their images.
        given: Values of the options --control.
        like: File of the earlier picture.

    Raises:
        click.UsageError: The image of an earlier ControlNet was not given; PNG files do not contain it.
    """
    left = list(given)
    nets = []
    for net in then:
        same = [one for one in left if one.name == net.name and one.mode in (None, net.control_mode)]
        control = next(iter(sorted(same, key=lambda one: one.mode is None)), None)
        if control is None:
            known = net.controlnet_conditioning_scale
            its_scale = "" if known is None else f" (its scale was {known:g})"
            name = net.name if net.control_mode is None else f"{net.name}:{net.control_mode}"
            raise click.UsageError(
                f"{like} was drawn with the ControlNet {name}: give its control image with"
                f" --control {name}=FILE{its_scale}."
            )
        left.remove(control)
        scale = net.controlnet_conditioning_scale if control.scale is None else control.scale
        nets.append(replace(net, image=control.file, controlnet_conditioning_scale=scale))
    nets += [
        ControlNet(new.name, new.file, controlnet_conditioning_scale=new.scale, control_mode=new.mode) for new in left
    ]
    return nets


def name_as_given(violation: Violation, options: GenerationOptions) -> Violation:
    """Return a violation in which the ControlNet is named as on the command line."""
    nets = options.get("controlnets") or ()
    found = _PLACE.match(violation.field)
    if not found or int(found[1]) >= len(nets):
        return violation
    net, part = nets[int(found[1])], found[2]
    file = f"={net.image}" if isinstance(net.image, Path) else ""
    field = f"--control {net.name}{file}" if part == "image" else f"--control {net.name}, {part}"
    return Violation(field=field, description=violation.description)


def _colon_before_scale(rest: str) -> int:
    """Return the index of the colon in FILE:SCALE; the length without a scale. File names may contain colons."""
    at = rest.rfind(":")
    if at < 1 or Path(rest).exists():
        return len(rest)
    # If no such file exists, the text after the colon is a scale only if it is a number.
    return at if Path(rest[:at]).exists() or _number(rest[at + 1 :]) is not None else len(rest)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


CONTROL = click.option(
    "--control",
    "controlnets",
    type=ControlType(),
    multiple=True,
    metavar="NAME[:MODE]=FILE[:SCALE]",
    help="Steer the picture by this control image with the ControlNet NAME; repeatable. "
    "A union needs the MODE of the image, such as union:depth. bottega controlnets lists both.",
)
