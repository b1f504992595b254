"""What ControlNets add to `bottega generate`: --control and --stale-residuals, and lines about where they ran."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from bottega.client.cli.addons import GenerationPart
from bottega.client.cli.controlnets.option import ControlType, merged, name_as_given
from bottega.client.types.options import GenerationOptions
from bottega.client.types.provenance import ControlNetUse, Provenance
from bottega.errors import Violation

_SHORTEST_S = 0.0005


def _merge(options: GenerationOptions, given: dict[str, Any], like: Path | None) -> None:
    if nets := merged(options.pop("controlnets", None) or (), given.pop("controlnets"), like):
        options["controlnets"] = nets


def _rename(violation: Violation, options: GenerationOptions) -> Violation:
    return name_as_given(violation, options.get("controlnets") or ())


def _describe(provenance: Provenance) -> Iterator[str]:
    """Which ControlNets took part, where they ran, and what was waited for."""
    for use in provenance.controlnets:
        yield f"control {use.name}: {', '.join(_facts(use, provenance.worker))}"
    if provenance.controlnets and provenance.encoder_s >= _SHORTEST_S:
        yield f"ControlNets ran beside {provenance.encoder_s:.3f} s of the model's encoder"


def _warn(provenance: Provenance) -> Iterator[str]:
    """Say what of a control image was not looked at, and what had to be done with it first."""
    for use in provenance.controlnets:
        whose = f"the image of control {use.name}"
        if use.transparency_unread:
            yield f"{whose} is transparent in parts, and the colours there were taken as if they were opaque"
        if use.scaled_from_16_bits:
            yield f"{whose} has 16 bits of grey, which were scaled to 8 (Diffusers makes nearly all such levels white)"


def _facts(use: ControlNetUse, worker: str) -> Iterator[str]:
    servers = ["the worker itself" if server == worker else server for server in use.servers]
    if servers:
        yield f"by {', then '.join(servers)}"
    yield f"scale {use.scale:g}"
    yield f"waited {use.waited_s:.3f} s for it"
    if use.stale_steps:
        yield f"{use.stale_steps} steps with residuals one step old (approximate)"
    if use.end_step and use.begin_step == use.end_step:
        yield "active in no step"


PART = GenerationPart(
    options=(
        click.option(
            "--control",
            "controlnets",
            type=ControlType(),
            multiple=True,
            metavar="NAME=FILE[:SCALE]",
            help="Follow this control image by the ControlNet NAME (bottega controlnets lists them); may be repeated.",
        ),
        click.option(
            "--stale-residuals/--no-stale-residuals",
            default=None,
            help="Go on with ControlNets' residuals of the step before (approximate). Default: by --fidelity.",
        ),
    ),
    stage="controlnets",
    describe=_describe,
    warn=_warn,
    merge=_merge,
    rename=_rename,
)
