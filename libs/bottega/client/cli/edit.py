"""`bottega edit`: redraws a part of a picture, and says what happened."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bottega.client.cli.drawing import DrawingTerms, draw, drawing_options
from bottega.client.cli.generation_options import changed, edit_options
from bottega.client.cli.mask_options import GivenMask, mask_options
from bottega.client.cli.terminal import fail, note
from bottega.client.types.image_source import size_of
from bottega.client.types.options import GenerationOptions
from bottega.client.types.picture import Picture
from bottega.client.types.png_parameters import parameters_of
from bottega.errors import BadImage, Violation

if TYPE_CHECKING:
    from bottega.codec import ImageSize


@click.command("edit")
@click.argument("image", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("prompt", required=False)
@mask_options
@click.option(
    "--like",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Edit as this picture of ours was drawn, as changed by the other options; give its image and mask again.",
)
@edit_options
@drawing_options
def command(
    *, image: Path, prompt: str | None, mask: GivenMask, like: Path | None, terms: DrawingTerms, **given: Any
) -> None:
    """Redraw a part of IMAGE, so that all of it shows PROMPT.

    Outside the mask the picture has IMAGE's own pixels. Without --seed, later edits of the same IMAGE compute the
    masked part alone where that is close enough (--fidelity); with it they are exact.

    \b
      bottega edit star.png --mask mask.png "a big green star on a blue background" -o green.png
      bottega edit star.png --box 4,12,34,40 "a big green star on a blue background"
      bottega edit photo.jpg --ellipse 900,400,300,300 --padding-mask-crop 64 "a red balloon"
      bottega edit star.png --mask mask.png --like green.png --steps 50
    """
    prompt, options = _parameters(prompt, like, given)
    mask.put_into(options, image, like)
    options["image"], own = image, _size_of(image)
    completed = draw(prompt, options, terms, rename=lambda violation: _rename(violation, image, mask))
    if completed is not None:
        _say_of_size(completed.images[0], image, own)


def _parameters(prompt: str | None, like: Path | None, given: dict[str, Any]) -> tuple[str, GenerationOptions]:
    """The prompt and the arguments: those of `like`, changed by those that were given."""
    then, options = parameters_of(like) if like else (None, {})
    prompt = then if prompt is None else prompt
    if prompt is None:
        raise click.UsageError("say what the picture shall show: bottega edit IMAGE --mask FILE PROMPT")
    options.pop("keep_for_editing", None)  # of a picture that is no edit
    if given["keep_unmasked"] is False:
        options.pop("mask_feather", None)  # which goes with what is kept
    return prompt, changed(options, given, like)


def _size_of(image: Path) -> ImageSize:
    """Before anything is asked for: ends the command where it is no image that is taken."""
    try:
        return size_of(image)
    except OSError as error:
        fail(f"{image} cannot be read: {error.strerror}", status=2)
    except BadImage as error:
        fail(f"{image} cannot be edited: {error.message}", status=2)


def _rename(violation: Violation, image: Path, mask: GivenMask) -> Violation:
    """What is wrong with the two images, named as on the command line."""
    names = {"image": f"IMAGE {image}", "mask_image": mask.named}
    field = violation.field.removeprefix("spec.")
    return Violation(field=names.get(field, violation.field), description=violation.description)


def _say_of_size(drawn: Picture, image: Path, own: ImageSize) -> None:
    """That the picture has not the size of its source, and what helps."""
    if (own.width, own.height) != (drawn.width, drawn.height):
        note(f"{image} is {own.width}x{own.height}, and was resized to {drawn.width}x{drawn.height} to be drawn.")
        note("--width and --height draw another size; --padding-mask-crop PIXELS keeps its own.")
