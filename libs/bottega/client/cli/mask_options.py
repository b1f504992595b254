"""The options that say which part of a picture is redrawn, and what becomes of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import click

from bottega.client.types.mask import Box, Ellipse, MaskShape
from bottega.client.types.options import GenerationOptions

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


_OPTIONS = (
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

    for option in reversed(_OPTIONS):
        with_mask = option(with_mask)
    return with_mask


def _name(shape: MaskShape) -> str:
    return type(shape).__name__.lower()


def _text(shape: MaskShape) -> str:
    return f"{shape.x},{shape.y},{shape.width},{shape.height}"
