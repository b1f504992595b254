"""What LoRAs add to `bottega generate`: --lora and --late-loras, and a line about each."""

from __future__ import annotations

import math
from collections.abc import Iterator

import click

from bottega import rules
from bottega.client.cli.addons import GenerationPart
from bottega.client.types.lora import Lora
from bottega.client.types.provenance import Provenance


class LoraType(click.ParamType[Lora]):
    """Says what is wrong before anything is asked for."""

    name = "lora"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> Lora:
        name, colon, scale = value.partition(":")
        if not rules.is_adapter_name(name):
            self.fail(f"{name!r} is no name of a LoRA; NAME or NAME:SCALE is wanted, such as outline:0.8", param, ctx)
        if not colon:
            return Lora(name)
        try:
            number = float(scale)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            self.fail(f"{name}: {scale!r} is no scale; a number such as 0.8 is wanted after NAME:", param, ctx)
        return Lora(name, number)


def _describe(provenance: Provenance) -> Iterator[str]:
    for use in provenance.loras:
        yield f"LoRA {use.name}: scale {use.scale:g}, in from step {use.from_step}, there after {use.load_s:.3f} s"
        if use.mixed_alphas:
            yield f"LoRA {use.name}: its modules have different alphas; stock Diffusers may load it otherwise"
        if use.stock_may_leave_out:
            yield f"LoRA {use.name}: stock Diffusers may leave out its {', '.join(use.stock_may_leave_out)}"


PART = GenerationPart(
    options=(
        click.option(
            "--lora",
            "lora",
            type=LoraType(),
            multiple=True,
            metavar="NAME[:SCALE]",
            help="Draw with the LoRA NAME (bottega loras lists them); may be repeated.",
        ),
        click.option(
            "--late-loras/--no-late-loras",
            "bounded_lora_loading",
            default=None,
            help="Make steps before the LoRAs are there (approximate). Default: by --fidelity.",
        ),
    ),
    stage="loras",
    describe=_describe,
)
