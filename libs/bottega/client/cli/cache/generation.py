"""What the approximate cache adds to `bottega generate`: its switches, and lines about what was reused."""

from __future__ import annotations

from collections.abc import Iterator

import click

from bottega.client.cli.addons import GenerationPart
from bottega.client.types.provenance import Provenance
from bottega.latents import parse_start


class StartType(click.ParamType[str]):
    """Says what is wrong before anything is asked for."""

    name = "entry"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            parse_start(value)
        except ValueError as error:
            self.fail(f"{value!r}: {error}, such as {'0f' * 16}@10", param, ctx)
        return value


def _describe(provenance: Provenance) -> Iterator[str]:
    if provenance.identical_job:
        yield f"nothing was drawn: it is the stored result of job {provenance.identical_job}, an identical request"
    starts = provenance.cached_starts
    for use in starts:
        picture = f"picture {use.image} " if len(starts) > 1 or use.image else ""
        how = "approximate, without the LoRAs" if use.without_loras else "approximate"
        facts = f"similarity {use.similarity:.3f}"
        if use.skipped_steps:  # workers of earlier versions do not say it
            facts += f"; {use.skipped_steps} step{'' if use.skipped_steps == 1 else 's'} skipped"
        yield f"cache: {picture}starts from {use.entry}, {facts} ({how})"


_IDENTICAL = click.option(
    "--identical/--no-identical",
    "identical_results",
    default=None,
    help="Take the stored result of an identical request (exact). Default: as the gateway is configured.",
)

PART = GenerationPart(
    options=(
        click.option(
            "--cache/--no-cache",
            "approximate_cache",
            default=None,
            help="Start from the latent of a similar prompt's picture (approximate). Default: by --fidelity.",
        ),
        click.option(
            "--cache-entry",
            type=StartType(),
            metavar="ENTRY@STEP",
            help="Start from this cached latent, as an earlier picture was said to; with its seed, draws it again.",
        ),
        _IDENTICAL,
    ),
    stage="cache",
    describe=_describe,
    options_of_edits=(_IDENTICAL,),  # no edit starts from a cached latent
)
