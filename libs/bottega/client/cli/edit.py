"""`bottega edit`: redraws a part of a picture."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import click

from bottega.client.cli.drawing import DrawingTerms, draw, drawing_options
from bottega.client.cli.generation_options import changed, edit_options
from bottega.client.cli.terminal import fail, note
from bottega.client.types.image_source import size_of
from bottega.client.types.mask import Box, Ellipse, MaskShape
from bottega.client.types.options import GenerationOptions
from bottega.client.types.picture import Picture
from bottega.client.types.png_parameters import parameters_of
from bottega.errors import BadImage, Violation

if TYPE_CHECKING:
    from bottega.codec import ImageSize


_WANTED = "--mask FILE, --box X,Y,WIDTH,HEIGHT or --ellipse X,Y,WIDTH,HEIGHT"
_NUMBERS = 4

ShapeT = TypeVar("ShapeT", bound=MaskShape)


class ShapeType(click.ParamType[ShapeT], Generic[ShapeT]):
    """Says what is wrong before anything is asked for."""

    def __init__(self, kind: type[ShapeT]) -> None:
        self.name = kind.__name__.lower()
        self._kind = kind

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> ShapeT:
        words = value.split(",")
        try:
            numbers = [int(word) for word in words]
        except ValueError:
            numbers = []
        if len(numbers) != _NUMBERS:
            self.fail(f"{value!r}: X,Y,WIDTH,HEIGHT is wanted, in whole pixels, such as 8,16,32,32", param, ctx)
        return self._kind(*numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenMask:
    """What a command line says of the mask. alpha: None where nothing was said."""

    file: Path | None
    shapes: tuple[MaskShape, ...]
    alpha: bool | None

    @property
    def named(self) -> str:
        """As it was given, for what is said of it."""
        if self.shapes:
            return " ".join(f"--{_name(shape)} {_text(shape)}" for shape in self.shapes)
        return f"--mask {self.file}" if self.file else "--alpha"

    def put_into(self, options: GenerationOptions, image: Path, like: Path | None) -> None:
        """Sets the mask, in place of what `like` has said of its own.

        --alpha without a mask reads the image itself. Raises click.UsageError for no mask, or for more than one.
        """
        if self.shapes and (self.file or self.alpha):
            other = "--mask" if self.file else "--alpha"
            raise click.UsageError(f"{other} and --box or --ellipse are two masks; leave one of them out.")
        alpha = options.pop("mask_alpha", False) if self.alpha is None and self.file else self.alpha
        options.pop("mask_alpha", None)
        if self.shapes:
            options["mask_image"] = self.shapes
        elif self.file or self.alpha:
            options["mask_image"] = self.file or image
            options["mask_alpha"] = bool(alpha)
        elif like:
            raise click.UsageError(f"{like} does not carry its mask: give it by {_WANTED}.")
        else:
            raise click.UsageError(f"say which part to redraw: {_WANTED}; --alpha for what is transparent.")


_MASK_OPTIONS = (
    click.option(
        "--mask",
        "mask_file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Picture that is white where IMAGE is redrawn; another size than IMAGE's is resized.",
    ),
    click.option(
        "--box",
        "boxes",
        type=ShapeType(Box),
        multiple=True,
        metavar="X,Y,WIDTH,HEIGHT",
        help="Redraw this rectangle, in IMAGE's pixels; may be repeated, and joined with --ellipse.",
    ),
    click.option(
        "--ellipse",
        "ellipses",
        type=ShapeType(Ellipse),
        multiple=True,
        metavar="X,Y,WIDTH,HEIGHT",
        help="Redraw the ellipse in this rectangle; may be repeated, and joined with --box.",
    ),
    click.option(
        "--alpha/--no-alpha",
        "alpha",
        default=None,
        help="Redraw what is transparent: in --mask, or without it in IMAGE.",
    ),
)


def mask_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds options that the command gets as `mask`."""

    @functools.wraps(command)
    def with_mask(
        *,
        mask_file: Path | None,
        boxes: tuple[Box, ...],
        ellipses: tuple[Ellipse, ...],
        alpha: bool | None,
        **said: Any,
    ) -> None:
        command(mask=GivenMask(file=mask_file, shapes=(*boxes, *ellipses), alpha=alpha), **said)

    for option in reversed(_MASK_OPTIONS):
        with_mask = option(with_mask)
    return with_mask


def _name(shape: MaskShape) -> str:
    return type(shape).__name__.lower()


def _text(shape: MaskShape) -> str:
    return f"{shape.x},{shape.y},{shape.width},{shape.height}"


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
