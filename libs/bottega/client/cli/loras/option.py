"""The --lora option: NAME[:SCALE]."""

from __future__ import annotations

import math

import click

from bottega import rules
from bottega.client.types.lora import Lora


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
