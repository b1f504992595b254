"""`bottega generate` draws pictures, and `bottega edit` redraws a part of one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import click

from bottega.client.cli.drawing import DrawingTerms, draw, drawing_options
from bottega.client.cli.generation_options import changed, edit_options, generation_options
from bottega.client.cli.options import with_examples
from bottega.client.cli.terminal import fail, note
from bottega.client.types.file_parameters import parameters_of
from bottega.client.types.inputs import MASK_OPTIONS, Box, Ellipse, MaskShape, size_of
from bottega.client.types.options import EditOptions, GenerationOptions
from bottega.client.types.picture import Picture
from bottega.errors import BadImage, Violation

if TYPE_CHECKING:
    from bottega.codec import ImageSize

_MASKS = "--mask FILE, --box X,Y,WIDTH,HEIGHT or --ellipse X,Y,WIDTH,HEIGHT"
_NUMBERS = 4

ShapeT = TypeVar("ShapeT", bound=MaskShape)


@click.command("generate")
@click.argument("prompt", required=False)
@click.option(
    "--like",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Repeat this earlier picture, with the other options changed.",
)
@click.option(
    "-p",
    "--prompt",
    "more_prompts",
    metavar="TEXT",
    multiple=True,
    help="Another prompt; its picture is drawn in the same request. Repeatable.",
)
@generation_options
@click.option(
    "--keep-for-editing/--no-keep-for-editing",
    default=None,
    help="Store the picture's latents and activations, so that even its first bottega edit is fast.",
)
@drawing_options
@with_examples("""
    bottega generate "a big red star on a blue background" -o star.png --seed 7
    bottega generate --like star.png --steps 50 -o better.png
    bottega generate "a big red star" -p "a small green ring" -o both.png
    bottega generate "a big red star" --detach
    bottega generate "a big red star" --control edges=edges.png:0.8
""")
def command(
    *, prompt: str | None, more_prompts: tuple[str, ...], like: Path | None, terms: DrawingTerms, **given: Any
) -> None:
    """Draw a picture of PROMPT.

    Further prompts (-p) are drawn in the same request, eight prompts at most. As with --num-images, picture i, counted
    from 0, has the seed SEED + i.
    """
    prompt, options = _parameters(prompt, like, given)
    draw([prompt, *more_prompts], options, terms)


def _parameters(prompt: str | None, like: Path | None, given: dict[str, Any]) -> tuple[str, GenerationOptions]:
    """Return the prompt and the options: those of the earlier picture `like`, overridden by the given ones."""
    earlier, options = parameters_of(like) if like else (None, {})
    prompt = earlier if prompt is None else prompt
    if prompt is None:
        raise click.UsageError("the prompt is missing: bottega generate PROMPT")
    if options.keys() & MASK_OPTIONS:
        raise click.UsageError(f"{like} is an edit; give its image and mask again: bottega edit IMAGE --like {like}")
    options = changed(options, given, like)
    if like and "strength" in options and "image" not in options:
        raise click.UsageError(f"{like} was drawn from another picture: give that one with --image.")
    return prompt, options


class ShapeType(click.ParamType[ShapeT], Generic[ShapeT]):
    """A Click type for a Box or an Ellipse, given as X,Y,WIDTH,HEIGHT."""

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
            self.fail(f"{value!r}: give X,Y,WIDTH,HEIGHT in whole pixels, such as 8,16,32,32", param, ctx)
        return self._kind(*numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenMask:
    """The options of the command line that describe the mask."""

    file: Path | None
    shapes: tuple[MaskShape, ...]
    alpha: bool | None
    """Whether transparency is the mask; None if neither --alpha nor --no-alpha was given."""

    @property
    def named(self) -> str:
        """The given options of the mask, for messages."""
        if self.shapes:
            return " ".join(f"--{_name(shape)} {_text(shape)}" for shape in self.shapes)
        return f"--mask {self.file}" if self.file else "--alpha"

    def put_into(self, options: GenerationOptions, image: Path, like: Path | None) -> None:
        """Set the mask in a request's options, where it replaces a mask of the earlier picture `like`.

        With --alpha alone, the transparency of the image is the mask. Raises click.UsageError if there is no mask, or
        more than one.
        """
        if self.shapes and (self.file or self.alpha):
            other = "--mask" if self.file else "--alpha"
            raise click.UsageError(f"{other} and --box or --ellipse are two masks; give only one.")
        alpha = options.pop("mask_alpha", False) if self.alpha is None and self.file else self.alpha
        options.pop("mask_alpha", None)
        if self.shapes:
            options["mask_image"] = self.shapes
        elif self.file or self.alpha:
            options["mask_image"] = self.file or image
            options["mask_alpha"] = bool(alpha)
        elif like:
            raise click.UsageError(f"{like} does not contain its mask: give it with {_MASKS}.")
        else:
            raise click.UsageError(f"give the part to redraw: {_MASKS}; or --alpha for transparent parts.")


_MASK_OPTIONS = (
    click.option(
        "--mask",
        "mask_file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Mask: a picture that is white where IMAGE is redrawn. It is resized to IMAGE's size.",
    ),
    click.option(
        "--box",
        "boxes",
        type=ShapeType(Box),
        multiple=True,
        metavar="X,Y,WIDTH,HEIGHT",
        help="Redraw this rectangle, in IMAGE's pixels; repeatable, also with --ellipse.",
    ),
    click.option(
        "--ellipse",
        "ellipses",
        type=ShapeType(Ellipse),
        multiple=True,
        metavar="X,Y,WIDTH,HEIGHT",
        help="Redraw the ellipse in this rectangle; repeatable, also with --box.",
    ),
    click.option(
        "--alpha/--no-alpha",
        "alpha",
        default=None,
        help="Redraw the transparent parts of --mask; without --mask, those of IMAGE.",
    ),
)


def mask_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of the mask, which are passed to the command as `mask`."""

    @functools.wraps(command)
    def with_mask(
        *,
        mask_file: Path | None,
        boxes: tuple[Box, ...],
        ellipses: tuple[Ellipse, ...],
        alpha: bool | None,
        **arguments: Any,
    ) -> None:
        command(mask=GivenMask(file=mask_file, shapes=(*boxes, *ellipses), alpha=alpha), **arguments)

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
    help="Repeat this earlier edit, with the other options changed; give its image and mask again.",
)
@edit_options
@drawing_options
@with_examples("""
    bottega edit star.png --mask mask.png "a big green star" -o green.png
    bottega edit star.png --box 4,12,34,40 "a big green star"
    bottega edit in.jpg --ellipse 90,40,30,30 --padding-mask-crop 64 "a balloon"
    bottega edit star.png --mask mask.png --like green.png --steps 50
""")
def edit(
    *, image: Path, prompt: str | None, mask: GivenMask, like: Path | None, terms: DrawingTerms, **given: Any
) -> None:
    """Redraw a part of IMAGE so that the whole picture shows PROMPT.

    Outside the mask, the picture keeps the pixels of IMAGE. Without --seed, later edits of the same IMAGE are faster:
    they compute only the masked part where that is a close approximation (see --fidelity). With --seed, nothing is
    approximated.
    """
    prompt, options = _edit_parameters(prompt, like, given)
    mask.put_into(options, image, like)
    options["image"], own = image, _size_of(image)
    completed = draw([prompt], options, terms, rename=lambda violation: _rename(violation, image, mask))
    if completed is not None:
        _note_resized(completed.images[0], image, own)


def _edit_parameters(prompt: str | None, like: Path | None, given: dict[str, Any]) -> tuple[str, GenerationOptions]:
    """Return the prompt and the options: those of the earlier picture `like`, overridden by the given ones."""
    earlier, options = parameters_of(like) if like else (None, {})
    prompt = earlier if prompt is None else prompt
    if prompt is None:
        raise click.UsageError("the prompt is missing: bottega edit IMAGE --mask FILE PROMPT")
    # The earlier picture may be no edit.
    of_edits = {name: value for name, value in options.items() if name in EditOptions.__optional_keys__}
    options = cast("GenerationOptions", of_edits)
    if given["keep_unmasked"] is False:
        options.pop("mask_feather", None)  # there is no seam without kept pixels
    return prompt, changed(options, given, like)


def _size_of(image: Path) -> ImageSize:
    """Return the size of an image. End the command if the services would refuse the image."""
    try:
        return size_of(image)
    except OSError as error:
        fail(f"{image} cannot be read: {error.strerror}", status=2)
    except BadImage as error:
        fail(f"{image} cannot be edited: {error.message}", status=2)


def _rename(violation: Violation, image: Path, mask: GivenMask) -> Violation:
    """Return a violation in which image and mask have the names that they have on the command line."""
    names = {"image": f"IMAGE {image}", "mask_image": mask.named}
    field = violation.field.removeprefix("spec.")
    return Violation(field=names.get(field, violation.field), description=violation.description)


def _note_resized(drawn: Picture, image: Path, own: ImageSize) -> None:
    """Print that the picture's size differs from that of its source, and how to keep the source's size."""
    if (own.width, own.height) != (drawn.width, drawn.height):
        note(f"{image} was resized from {own.width}x{own.height} to {drawn.width}x{drawn.height} to be drawn.")
        note("--width and --height draw another size; --padding-mask-crop PIXELS keeps the image's own.")
