"""The parameters that a drawn PNG carries in its text. Knows the file, not how to draw.

The file may be anybody's: what it says is bounded, and checked by the contract's rules before it is believed.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from google.protobuf import json_format

from bottega import rules
from bottega.client.types.messages import describe
from bottega.client.types.options import GenerationOptions, options_from
from bottega.errors import BadImage, InvalidRequest, Violation
from bottega.v1.generation_pb2 import GenerationSpec

TEXT_KEYWORD = "bottega"
"""Keyword of the PNG text chunk that holds the GenerationSpec as JSON."""

# Keywords of texts that tell how a picture was drawn, and what writes them.
_OTHER_TOOLS = {
    "parameters": "AUTOMATIC1111's web UI or one like it",
    "workflow": "ComfyUI",
    "prompt": "ComfyUI",
    "invokeai_metadata": "InvokeAI",
    "sd-metadata": "InvokeAI",
}

# Far above any prompt, far below what would hurt: the text of an untrusted file is read whole. Pillow has bounds of its
# own on what a file's texts may have in all, packed or not.
_LONGEST_TEXT = 256 * 1024
# The largest picture that the codec takes has 48 MiB of pixels.
_LARGEST_FILE_BYTES = 64 * 2**20
# Pictures are decoded before their text is known; four times what the suite takes as an input image.
_MAX_PIXELS = 64 << 20
# Of what a parser says, which repeats what it has read.
_MOST_LETTERS = 300


def parameters_of(path: str | os.PathLike[str]) -> tuple[str, GenerationOptions]:
    """The prompt and the keyword arguments that draw the picture again: `client.generate(prompt, **options)`.

    The source of image-to-image is not in the file; pass it as `image`.
    Raises InvalidRequest, which names file and value, when the file carries no parameters or none that can be, and
    OSError as open() would.
    """
    spec = _spec(path)
    if broken := list(_check(spec)):
        said = "; ".join(f"{item.field.removeprefix('spec.')} {item.description}" for item in broken)
        raise InvalidRequest(f"{path} carries parameters that cannot be drawn: {said}")
    try:
        return spec.prompt, options_from(spec)
    except InvalidRequest as error:
        raise InvalidRequest(f"{path} carries parameters that this version cannot read: {error.message}") from None


def _spec(path: str | os.PathLike[str]) -> GenerationSpec:
    spec = GenerationSpec()
    try:
        json_format.Parse(_text(path), spec)
    except json_format.ParseError as error:
        why = str(error)
    except (RecursionError, TypeError, ValueError) as error:  # what the parser does not expect
        why = f"{type(error).__name__}: {error}"
    else:
        return spec
    why = why if len(why) <= _MOST_LETTERS else f"{why[:_MOST_LETTERS]}..."
    raise InvalidRequest(f"{path} carries parameters that this version cannot read: {why}")


def _check(spec: GenerationSpec) -> Iterator[Violation]:
    """What breaks a rule that holds for every model; each names its value where it is not too long to be repeated."""
    for name, (low, high) in rules.RANGES.items():
        if spec.HasField(name) and not low <= getattr(spec, name) <= high:  # type: ignore[arg-type]
            yield Violation(field=name, description=f"must be {low} to {high}; got {describe(getattr(spec, name))}")
    if spec.HasField("strength") and not 0 < spec.strength <= 1:
        yield Violation(field="strength", description=f"must be above 0 and at most 1; got {describe(spec.strength)}")
    yield from rules.check_texts(spec)
    yield from rules.check_model_name(spec)
    yield from rules.check_controlnets(spec)
    yield from rules.check_loras(spec)


def _check_structure(path: str | os.PathLike[str], file: BinaryIO) -> None:
    """For untrusted files too: a file that would take a decoder long is refused before it is decoded."""
    from bottega.codec import structure

    data = file.read(_LARGEST_FILE_BYTES)
    if file.read(1):
        raise InvalidRequest(f"{path} has more than {_LARGEST_FILE_BYTES} bytes; no picture of Bottega's does")
    file.seek(0)
    try:
        structure.check(data)
    except BadImage as error:
        raise InvalidRequest(f"{path} cannot be read: {error.message}") from None


def _other_tool(texts: Mapping[str, str]) -> str:
    """Return what may have written a PNG with these texts; empty where they tell of no drawing."""
    return next((tool for keyword, tool in _OTHER_TOOLS.items() if keyword in texts), "")


def _text(path: str | os.PathLike[str]) -> str:
    import PIL
    import PIL.Image

    with Path(path).open("rb") as file, warnings.catch_warnings():
        warnings.simplefilter("error", PIL.Image.DecompressionBombWarning)
        try:
            _check_structure(path, file)
            with PIL.Image.open(file, formats=["PNG"]) as image:
                if image.width * image.height > _MAX_PIXELS:
                    raise ValueError("too large")
                image.load()  # the text may stand behind the pixels
                texts = {str(keyword): value for keyword, value in image.info.items() if isinstance(value, str)}
                text = texts.get(TEXT_KEYWORD)
        except PIL.UnidentifiedImageError:
            # JPEG and WebP keep no text of ours.
            raise InvalidRequest(f"{path} is no PNG; only PNGs that Bottega drew carry their parameters") from None
        except (
            PIL.Image.DecompressionBombError,
            PIL.Image.DecompressionBombWarning,
            OSError,
            SyntaxError,
            ValueError,
        ):
            raise InvalidRequest(f"{path} is a PNG that cannot be read: it is damaged or too large") from None
    if text is None and (other := _other_tool(texts)):
        raise InvalidRequest(
            f"{path} carries the text of another tool ({other}); only PNGs that Bottega drew can be drawn again"
        )
    if not isinstance(text, str) or len(text) > _LONGEST_TEXT:
        raise InvalidRequest(f"{path} carries no parameters of Bottega; only PNGs that it drew do")
    return text
