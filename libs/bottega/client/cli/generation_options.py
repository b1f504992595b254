"""The keyword arguments of a request as options of a command, by Diffusers' names; those of add-ons as well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from bottega.client.cli.addons import generation_parts
from bottega.client.types.options import FIDELITIES, SAMPLERS
from bottega.client.types.picture import FORMATS

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

_EXISTING = click.Path(exists=True, dir_okay=False, path_type=Path)

# Ranges are the gateway's to check: it knows the model, and names every violation at once.
_OPTIONS = (
    click.option("--seed", type=click.IntRange(min=0), help="The same seed draws the same picture."),
    click.option("--steps", "--num-inference-steps", "num_inference_steps", type=int, help="Denoising steps."),
    click.option("--negative-prompt", metavar="TEXT", help="What not to draw."),
    click.option("--guidance-scale", type=float, help="How closely to follow the prompt; 1 or less: not guided."),
    click.option("--guidance-rescale", type=float, help="0 to 1."),
    click.option("--width", type=int, help="Pixels."),
    click.option("--height", type=int, help="Pixels."),
    click.option("--sampler", type=click.Choice(list(SAMPLERS))),
    click.option("--karras/--no-karras", "use_karras_sigmas", default=None, help="Karras' sigmas (euler, dpmpp_2m)."),
    click.option("--image", type=_EXISTING, help="Start from this picture (image-to-image)."),
    click.option("--strength", type=float, help="How much of --image is redrawn, above 0 to 1."),
    *(option for part in generation_parts() for option in part.options),
    click.option("--prompt-2", metavar="TEXT", help="Prompt of the second text encoder."),
    click.option("--negative-prompt-2", metavar="TEXT", help="Negative prompt of the second text encoder."),
    click.option("--format", type=click.Choice(list(FORMATS)), help="Default: by the file's name, else png."),
    click.option("--quality", type=int, help="Of JPEG and WebP, 1 to 100."),
    click.option("--fidelity", type=click.Choice(list(FIDELITIES)), help="How far approximate techniques may go."),
    click.option("--model", help="As bottega models lists it."),
)


def generation_options(command: CommandT) -> CommandT:
    """Adds an option for each of GenerationOptions; those that are not given are None, or empty."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
