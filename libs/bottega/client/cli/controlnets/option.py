"""The --control option: NAME=FILE[:SCALE], and what becomes of it beside the ControlNets of an earlier picture."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from bottega import rules
from bottega.client.types.control import ControlNet
from bottega.errors import Violation

# As the gateway names fields of a request's ControlNets.
_PLACE = re.compile(r"(?:spec\.)?controlnets\[(\d+)\]\.(\w+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlArgument:
    """One --control. scale: None where none was given."""

    name: str
    file: Path
    scale: float | None


class ControlType(click.ParamType[ControlArgument]):
    """Says what is wrong before anything is asked for."""

    name = "control"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> ControlArgument:
        name, given, rest = value.partition("=")
        if not given or not rest:
            self.fail(f"{value!r}: NAME=FILE or NAME=FILE:SCALE is wanted, such as edges=edges.png:0.8", param, ctx)
        if not rules.is_adapter_name(name):
            self.fail(
                f"{name!r} is no name of a ControlNet: letters, digits and . _ / + - are; bottega controlnets has them",
                param,
                ctx,
            )
        colon = _colon_before_scale(rest)
        file, scale = Path(rest[:colon]), rest[colon + 1 :]
        if not file.exists():
            self.fail(f"{name}: there is no file {file}", param, ctx)
        if file.is_dir():
            self.fail(f"{name}: {file} is a folder; a control image is wanted", param, ctx)
        number = _number(scale)
        if colon < len(rest) and number is None:
            self.fail(f"{name}: {scale!r} is no scale; a number such as 0.8 is wanted after FILE:", param, ctx)
        return ControlArgument(name=name, file=file, scale=number)


def merged(then: Sequence[ControlNet], given: Sequence[ControlArgument], like: Path | None) -> list[ControlNet]:
    """The ControlNets of a picture that was drawn before, each with the control image given now; then the others.

    Raises click.UsageError for one whose image is not given: pictures do not carry them.
    """
    left = list(given)
    nets = []
    for net in then:
        control = next((one for one in left if one.name == net.name), None)
        if control is None:
            known = net.controlnet_conditioning_scale
            was = "" if known is None else f" (its scale was {known:g})"
            raise click.UsageError(
                f"{like} was drawn with the ControlNet {net.name}: give its control image by"
                f" --control {net.name}=FILE{was}."
            )
        left.remove(control)
        scale = net.controlnet_conditioning_scale if control.scale is None else control.scale
        nets.append(replace(net, image=control.file, controlnet_conditioning_scale=scale))
    nets += [ControlNet(new.name, new.file, controlnet_conditioning_scale=new.scale) for new in left]
    return nets


def name_as_given(violation: Violation, nets: Sequence[ControlNet]) -> Violation:
    """What is wrong with a request, its ControlNet named as on the command line."""
    found = _PLACE.match(violation.field)
    if not found or int(found[1]) >= len(nets):
        return violation
    net, part = nets[int(found[1])], found[2]
    file = f"={net.image}" if isinstance(net.image, Path) else ""
    field = f"--control {net.name}{file}" if part == "image" else f"--control {net.name}, {part}"
    return Violation(field=field, description=violation.description)


def _colon_before_scale(rest: str) -> int:
    """Where in FILE:SCALE the colon is; the length where there is no scale. A file may have colons in its name."""
    at = rest.rfind(":")
    if at < 1 or Path(rest).exists():
        return len(rest)
    # What stands behind a colon is part of a name that is not there, unless it can be meant as a number.
    return at if Path(rest[:at]).exists() or _number(rest[at + 1 :]) is not None else len(rest)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
