"""What LoRAs add to `bottega generate`: --lora and --late-loras, and a line about each."""

from __future__ import annotations

from collections.abc import Iterator

import click

from bottega.client.cli.addons import GenerationPart
from bottega.client.cli.loras.option import LoraType
from bottega.v1.generation_pb2 import Provenance


def _describe(provenance: Provenance) -> Iterator[str]:
    for use in provenance.loras:
        yield f"LoRA {use.name}: scale {use.scale:g}, in from step {use.from_step}, there after {use.load_s:.3f} s"


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
