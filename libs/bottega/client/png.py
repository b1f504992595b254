"""The parameters that a drawn PNG carries in its text. Knows the file, not how to draw."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from google.protobuf import json_format

from bottega.client.options import GenerationOptions, options_from
from bottega.errors import BadImage, InvalidRequest
from bottega.v1.generation_pb2 import GenerationSpec

TEXT_KEYWORD = "bottega"
"""Keyword of the PNG text chunk that holds the GenerationSpec as JSON."""

# Far above any prompt, far below what would hurt: the text of a stranger's file is read whole.
_LONGEST_TEXT = 256 * 1024
# The largest picture that the codec takes has 48 MiB of pixels.
_LARGEST_FILE_BYTES = 64 * 2**20


def parameters_of(path: str | os.PathLike[str]) -> tuple[str, GenerationOptions]:
    """The prompt and the keyword arguments that draw the picture again: `client.generate(prompt, **options)`.

    The source of image-to-image is not in the file; pass it as `image`.
    Raises InvalidRequest when the file carries no parameters, and OSError as open() would.
    """
    spec = GenerationSpec()
    try:
        json_format.Parse(_text(path), spec)
    except json_format.ParseError as error:
        raise InvalidRequest(f"{path} carries parameters that this version cannot read: {error}") from None
    return spec.prompt, options_from(spec)


def _check(path: str | os.PathLike[str], file: BinaryIO) -> None:
    """Of a stranger's file too: whatever takes a decoder long is refused before it is decoded."""
    from bottega.codec import structure

    data = file.read(_LARGEST_FILE_BYTES)
    if file.read(1):
        raise InvalidRequest(f"{path} has more than {_LARGEST_FILE_BYTES} bytes; no picture of Bottega's does")
    file.seek(0)
    try:
        structure.check(data)
    except BadImage as error:
        raise InvalidRequest(f"{path} cannot be read: {error.message}") from None


def _text(path: str | os.PathLike[str]) -> str:
    import PIL
    import PIL.Image

    with Path(path).open("rb") as file:
        try:
            _check(path, file)
            with PIL.Image.open(file, formats=["PNG"]) as image:
                image.load()  # the text may stand behind the pixels
                text = image.info.get(TEXT_KEYWORD)
        except PIL.UnidentifiedImageError:
            # JPEG and WebP keep no text of ours.
            raise InvalidRequest(f"{path} is no PNG; only PNGs that Bottega drew carry their parameters") from None
        except (PIL.Image.DecompressionBombError, OSError, SyntaxError, ValueError):
            raise InvalidRequest(f"{path} is a PNG that cannot be read: it is damaged or too large") from None
    if not isinstance(text, str) or len(text) > _LONGEST_TEXT:
        raise InvalidRequest(f"{path} carries no parameters of Bottega; only PNGs that it drew do")
    return text
