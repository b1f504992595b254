"""Command line options for the parameters of a request, named as in Diffusers, including those of add-ons."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from bottega.client.cli.addons import generation_parts
from bottega.client.types.options import FIDELITIES, PROMPT_SYNTAXES, SAMPLERS, GenerationOptions
from bottega.client.types.picture import FORMATS
from bottega.rules import LAST_SIGMAS, SPACINGS

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


class Numbers(click.ParamType[tuple[float, ...]]):
    """A list of numbers with commas between them."""

    name = "numbers"

    def __init__(self, kind: type[int] | type[float]) -> None:
        self._kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        """Return the numbers. Raise BadParameter if one is none."""
        if not isinstance(value, str):
            return tuple(value)
        try:
            return tuple(self._kind(number) for number in value.split(","))
        except ValueError:
            what = "whole numbers" if self._kind is int else "numbers"
            self.fail(f"{value!r} must be {what} with commas between them", param, ctx)


_EXISTING = click.Path(exists=True, dir_okay=False, path_type=Path)

# The gateway checks ranges: it knows the model, and names all violations at once.
_SAMPLING = (
    click.option(
        "--seed", type=click.IntRange(min=0), help="Seed of the first picture; the same seed draws the same picture."
    ),
    click.option(
        "--steps",
        "--num-inference-steps",
        "num_inference_steps",
        type=int,
        help="Denoising steps; default: the model's.",
    ),
    click.option("--negative-prompt", metavar="TEXT", help="Negative prompt: things that the picture should not show."),
    click.option(
        "--guidance-scale",
        type=float,
        help="How closely to follow the prompt; guidance is off at 1 or less (with Z-Image, only at 0).",
    ),
    click.option("--guidance-rescale", type=float, help="Guidance rescale against overexposure, 0 to 1."),
    click.option(
        "--true-cfg-scale",
        type=float,
        help="Classifier-free guidance with --negative-prompt in models of Flux.1, whose guidance scale is embedded; "
        "default: off, as at 1 or less.",
    ),
    click.option(
        "--cfg-normalization",
        type=float,
        help="Largest norm of a guided prediction, relative to the unguided one (Z-Image); default: 0, no limit.",
    ),
    click.option(
        "--cfg-truncation",
        type=float,
        help="Progress from noise (0) to picture (1) at which guidance stops (Z-Image); default: 1, never.",
    ),
    click.option("--width", type=int, help="Width in pixels; default: the model's."),
    click.option("--height", type=int, help="Height in pixels; default: the model's."),
    click.option(
        "--sampler",
        type=click.Choice(list(SAMPLERS)),
        metavar="NAME",
        help=f"Sampler; default: the model's. One of {', '.join(SAMPLERS)}.",
    ),
    click.option(
        "--karras/--no-karras",
        "use_karras_sigmas",
        default=None,
        help="Use Karras sigmas (euler, flow_match_euler, lms, deis, unipc, heun, kdpm2*, dpmpp_*). "
        "Default: as the model is configured.",
    ),
    click.option(
        "--exponential/--no-exponential",
        "use_exponential_sigmas",
        default=None,
        help="Use exponential sigmas, with the same samplers.",
    ),
    click.option("--beta/--no-beta", "use_beta_sigmas", default=None, help="Use beta sigmas, with the same samplers."),
    click.option(
        "--timestep-spacing", type=click.Choice(list(SPACINGS)), help="Spacing of timesteps; default: the model's."
    ),
    click.option(
        "--final-sigmas-type",
        type=click.Choice(list(LAST_SIGMAS)),
        help="Noise level after the last step; default: the model's.",
    ),
    click.option(
        "--timesteps",
        type=Numbers(int),
        metavar="T,T,...",
        help="The timestep of each step, falling, such as 999,749,499,249.",
    ),
    click.option(
        "--sigmas",
        type=Numbers(float),
        metavar="S,S,...",
        help="The noise level before each step and after the last one, falling, such as 14.6,2.9,0.5,0.",
    ),
)
_WITHOUT_MASK = (
    click.option("--image", type=_EXISTING, help="Start from this picture (image-to-image)."),
    click.option(
        "--strength",
        type=float,
        help="Share of --image that is redrawn, above 0 to 1; default: 0.3 with SDXL, 0.6 with Stable Diffusion 3, "
        "Flux.1 and Z-Image, else and with --control 0.8.",
    ),
    click.option(
        "--step-caching/--no-step-caching",
        default=None,
        help="Reuse blocks of earlier steps while these change little (approximate), with transformers such as Stable "
        "Diffusion 3 and Flux.1. Needs --fidelity fast; what it loses has not been measured. Default: off.",
    ),
)
_EDITING = (
    click.option(
        "--strength",
        type=float,
        help="How much the masked part may change, above 0 to 1; default: 0.9999 with SDXL, 0.6 with Stable "
        "Diffusion 3 and Flux.1, 1 with other models.",
    ),
    click.option(
        "--padding-mask-crop",
        type=int,
        metavar="PIXELS",
        help="Draw only the mask and this many pixels around it; the picture keeps IMAGE's own size.",
    ),
    click.option(
        "--feather",
        "mask_feather",
        type=int,
        metavar="PIXELS",
        help="Width in pixels of the border of the mask in which drawn pixels fade into IMAGE's own; default: 8.",
    ),
    click.option(
        "--keep-unmasked/--no-keep-unmasked",
        default=None,
        help="Restore IMAGE's own pixels outside the mask (default), or return the picture as Diffusers does.",
    ),
    click.option(
        "--masked-blocks/--no-masked-blocks",
        default=None,
        help="Compute only the masked part if an earlier edit recorded activations of the rest (approximate). "
        "Default: by --fidelity.",
    ),
)
_OTHERS = (
    click.option("--prompt-2", metavar="TEXT", help="Prompt of the second text encoder."),
    click.option("--negative-prompt-2", metavar="TEXT", help="Negative prompt of the second text encoder."),
    click.option(
        "--prompt-syntax",
        type=click.Choice(list(PROMPT_SYNTAXES)),
        help="How prompts are read: plain, as in Diffusers (default), or weighted, as in AUTOMATIC1111's web UI, with "
        "(word:1.3), [word], BREAK and any length up to 1500 tokens.",
    ),
    click.option("--clip-skip", type=int, help="Last layers of the text encoders to skip, as in Diffusers."),
    click.option("--max-sequence-length", type=int, help="Tokens of a prompt that T5 or Qwen3 reads, 1 to 512."),
    click.option(
        "--format", type=click.Choice(list(FORMATS)), help="File format; default: by the file's name, else png."
    ),
    click.option("--quality", type=int, help="Quality of JPEG and WebP, 1 to 100."),
    click.option(
        "--metadata/--no-metadata",
        default=None,
        help="Write the parameters into the picture's file (default), or nothing.",
    ),
    click.option(
        "--fidelity",
        type=click.Choice(list(FIDELITIES)),
        help="How much may be approximated; default: exact with --seed, else balanced. Half precision is rounded "
        "as in Diffusers only if you give --fidelity exact.",
    ),
    click.option("--model", help="Model to draw with; default: the only one that is served."),
)

_LISTS = ("timesteps", "sigmas")
_SWITCHES = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas")
# By option, the parts of an earlier picture's schedule that contradict it.
_REPLACED: Mapping[str, Sequence[str]] = {
    "num_inference_steps": _LISTS,
    "timestep_spacing": _LISTS,
    "final_sigmas_type": ("sigmas",),
    "timesteps": ("sigmas", "num_inference_steps", "timestep_spacing", *_SWITCHES),
    "sigmas": ("timesteps", "num_inference_steps", "timestep_spacing", "final_sigmas_type", *_SWITCHES),
    **dict.fromkeys(_SWITCHES, (*_LISTS, *_SWITCHES)),
}


def generation_options(command: CommandT) -> CommandT:
    """Add the options of `bottega generate`. Options that are not given are None or empty."""
    parts = [option for part in generation_parts() for option in part.options]
    return _add(command, (*_SAMPLING, *_WITHOUT_MASK, *parts, *_OTHERS))


def edit_options(command: CommandT) -> CommandT:
    """Add the options of `bottega edit`, except for its image and mask."""
    parts = [option for part in generation_parts() for option in part.edit_options]
    return _add(command, (*_EDITING, *_SAMPLING, *parts, *_OTHERS))


def changed(options: GenerationOptions, given: dict[str, Any], like: Path | None) -> GenerationOptions:
    """Return the parameters of a request: those of an earlier picture, overridden by the given options."""
    options.pop("format", None)  # the new file's name decides
    for part in generation_parts():
        part.merge(options, given, like)
    chosen = {name: value for name, value in given.items() if value is not None and value != ()}
    return cast("GenerationOptions", _without_replaced(options, chosen) | chosen)


def _without_replaced(options: GenerationOptions, chosen: Mapping[str, object]) -> dict[str, Any]:
    """Return the options of an earlier picture without the parts of its schedule that chosen options replace."""
    left: dict[str, Any] = {**options}
    for name in (name for name, value in chosen.items() if value is not False):
        for replaced in _REPLACED.get(name, ()):
            # A switch is turned off, because without it the model's own setting would apply.
            if isinstance(left.pop(replaced, None), bool):
                left[replaced] = False
    return left


def _add(command: CommandT, options: Sequence[Callable[[CommandT], CommandT]]) -> CommandT:
    for option in reversed(options):
        command = option(command)
    return command
