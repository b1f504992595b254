"""The keyword arguments of a request as options of a command, by Diffusers' names; those of add-ons as well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from bottega.client.cli.addons import generation_parts
from bottega.client.types.options import FIDELITIES, SAMPLERS, GenerationOptions
from bottega.client.types.picture import FORMATS

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

_EXISTING = click.Path(exists=True, dir_okay=False, path_type=Path)

# Ranges are the gateway's to check: it knows the model, and names every violation at once.
_SAMPLING = (
    click.option("--seed", type=click.IntRange(min=0), help="The same seed draws the same picture."),
    click.option("--steps", "--num-inference-steps", "num_inference_steps", type=int, help="Denoising steps."),
    click.option("--negative-prompt", metavar="TEXT", help="What not to draw."),
    click.option("--guidance-scale", type=float, help="How closely to follow the prompt; 1 or less: not guided."),
    click.option("--guidance-rescale", type=float, help="0 to 1."),
    click.option("--width", type=int, help="Pixels."),
    click.option("--height", type=int, help="Pixels."),
    click.option("--sampler", type=click.Choice(list(SAMPLERS))),
    click.option(
        "--karras/--no-karras",
        "use_karras_sigmas",
        default=None,
        help="Karras' sigmas (euler, dpmpp_2m); default: as the model is configured.",
    ),
)
_IMAGE_TO_IMAGE = (
    click.option("--image", type=_EXISTING, help="Start from this picture (image-to-image)."),
    click.option(
        "--strength", type=float, help="How much of --image is redrawn, above 0 to 1; default: 0.3; with --control 0.8."
    ),
)
_EDITING = (
    click.option(
        "--strength", type=float, help="How much of what is in the mask is redrawn, above 0 to 1; default: 0.9999."
    ),
    click.option(
        "--padding-mask-crop",
        type=int,
        metavar="PIXELS",
        help="Draw only the part around the mask, with so many pixels around it; the picture keeps IMAGE's own size.",
    ),
    click.option(
        "--feather",
        "mask_feather",
        type=int,
        metavar="PIXELS",
        help="Width of the seam, outside the mask, between what is drawn and IMAGE's own pixels; default: 8.",
    ),
    click.option(
        "--keep-unmasked/--no-keep-unmasked",
        default=None,
        help="Put IMAGE's own pixels back outside the mask. Default: yes; no gives Diffusers' picture.",
    ),
    click.option(
        "--masked-blocks/--no-masked-blocks",
        default=None,
        help="Compute the masked part alone where an earlier edit has recorded the rest (approximate). Default: by"
        " --fidelity.",
    ),
)
_OTHERS = (
    click.option("--prompt-2", metavar="TEXT", help="Prompt of the second text encoder."),
    click.option("--negative-prompt-2", metavar="TEXT", help="Negative prompt of the second text encoder."),
    click.option("--format", type=click.Choice(list(FORMATS)), help="Default: by the file's name, else png."),
    click.option("--quality", type=int, help="Of JPEG and WebP, 1 to 100."),
    click.option("--fidelity", type=click.Choice(list(FIDELITIES)), help="How far approximate techniques may go."),
    click.option("--model", help="As bottega models lists it."),
)


def generation_options(command: CommandT) -> CommandT:
    """Adds options for what `bottega generate` draws; those that are not given are None, or empty."""
    parts = [option for part in generation_parts() for option in part.options]
    return _add(command, (*_SAMPLING, *_IMAGE_TO_IMAGE, *parts, *_OTHERS))


def edit_options(command: CommandT) -> CommandT:
    """The same for what `bottega edit` draws, its image and mask aside."""
    parts = [option for part in generation_parts() for option in part.edit_options]
    return _add(command, (*_EDITING, *_SAMPLING, *parts, *_OTHERS))


def changed(options: GenerationOptions, given: dict[str, Any], like: Path | None) -> GenerationOptions:
    """The arguments of a request: those of `like`, changed by those that were given on a command line."""
    options.pop("format", None)  # the new file's name says it
    for part in generation_parts():
        part.merge(options, given, like)
    chosen = {name: value for name, value in given.items() if value is not None and value != ()}
    return cast("GenerationOptions", options | chosen)


def _add(command: CommandT, options: Sequence[Callable[[CommandT], CommandT]]) -> CommandT:
    for option in reversed(options):
        command = option(command)
    return command
