"""Reads the parameters that Bottega writes into its PNG, JPEG and WebP files.

The file is untrusted: its size is limited, and its parameters are validated like those of a request.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from google.protobuf import json_format

from bottega import adapter_rules, rules
from bottega.client.types.messages import describe
from bottega.client.types.options import GenerationOptions, options_from
from bottega.errors import BadImage, InvalidRequest, Violation
from bottega.v1.generation_pb2 import GenerationSpec

# Keywords of texts with the parameters of a picture, and the tools that write them.
_OTHER_TOOLS = {
    "parameters": "AUTOMATIC1111's web UI or one like it",
    "workflow": "ComfyUI",
    "prompt": "ComfyUI",
    "invokeai_metadata": "InvokeAI",
    "sd-metadata": "InvokeAI",
}

# Far above any prompt, and small enough to read from an untrusted file. Pillow bounds the sum of a file's texts.
_LONGEST_TEXT = 256 * 1024
# The largest picture that the codec takes has 48 MiB of pixels.
_LARGEST_FILE_BYTES = 64 * 2**20
# Pictures are decoded before their text is known. Four times the suite's limit for an input image.
_MAX_PIXELS = 64 << 20
# The first bytes of a JPEG and of a WebP file.
_OTHER_SIGNATURES = (b"\xff\xd8\xff", b"RIFF")
# Characters of a parser's message, which repeats its input.
_MOST_LETTERS = 300


def parameters_of(path: str | os.PathLike[str]) -> tuple[str, GenerationOptions]:
    """Return the prompt and the arguments that draw a picture again: `client.generate(prompt, **options)`.

    The source of image-to-image is not in the file; pass it as `image`.

    Raises:
        InvalidRequest: The file has no parameters of Bottega, or invalid ones.
        OSError: The file cannot be read.
    """
    spec = _spec(path)
    if broken := list(_check(spec)):
        rules_broken = "; ".join(f"{item.field.removeprefix('spec.')} {item.description}" for item in broken)
        raise InvalidRequest(f"{path} has parameters that cannot be drawn: {rules_broken}")
    try:
        return spec.prompt, options_from(spec)
    except InvalidRequest as error:
        raise InvalidRequest(f"{path} has parameters that this version cannot read: {error.message}") from None


def _spec(path: str | os.PathLike[str]) -> GenerationSpec:
    spec = GenerationSpec()
    try:
        json_format.Parse(_text(path), spec)
    except json_format.ParseError as error:
        why = str(error)
    except (RecursionError, TypeError, ValueError) as error:  # errors that the parser does not handle
        why = f"{type(error).__name__}: {error}"
    else:
        return spec
    why = why if len(why) <= _MOST_LETTERS else f"{why[:_MOST_LETTERS]}..."
    raise InvalidRequest(f"{path} has parameters that this version cannot read: {why}")


def _check(spec: GenerationSpec) -> Iterator[Violation]:
    """Yield violations of the rules that hold for every model."""
    for name, (low, high) in rules.RANGES.items():
        if spec.HasField(name) and not low <= getattr(spec, name) <= high:  # type: ignore[arg-type]
            yield Violation(field=name, description=f"must be {low} to {high}; got {describe(getattr(spec, name))}")
    if spec.HasField("strength") and not 0 < spec.strength <= 1:
        yield Violation(field="strength", description=f"must be above 0 and at most 1; got {describe(spec.strength)}")
    yield from rules.check_texts(spec)
    yield from rules.check_model_name(spec)
    yield from adapter_rules.check_controlnets(spec)
    yield from adapter_rules.check_loras(spec)


def texts_of(path: str | os.PathLike[str]) -> Mapping[str, str]:
    """Return the texts in a picture's file by keyword, Bottega's own and others. Raise as `parameters_of` does."""
    from bottega.codec import metadata

    data = read_picture_file(path)
    return metadata.read_exif_texts(data) if data.startswith(_OTHER_SIGNATURES) else _png_texts(path, data)


def _text(path: str | os.PathLike[str]) -> str:
    from bottega.codec import metadata

    texts = texts_of(path)
    text = texts.get(metadata.PARAMETERS_KEYWORD)
    if text is None and (other := _other_tool(texts)):
        raise InvalidRequest(
            f"{path} was written by another tool ({other}); only pictures of Bottega can be drawn again"
        )
    if text is None or len(text) > _LONGEST_TEXT:
        raise InvalidRequest(
            f"{path} has no parameters of Bottega: it was not drawn by Bottega, was drawn without metadata, or another"
            " program has written it again"
        )
    return text


def read_picture_file(path: str | os.PathLike[str]) -> bytes:
    """Return the contents of a picture's file. Raise InvalidRequest if it would take too much memory or time."""
    from bottega.codec import structure

    with Path(path).open("rb") as file:
        data = file.read(_LARGEST_FILE_BYTES)
        if file.read(1):
            raise InvalidRequest(f"{path} is larger than {_LARGEST_FILE_BYTES} bytes, as no picture of Bottega is")
    try:
        structure.check(data)
    except BadImage as error:
        raise InvalidRequest(f"{path} cannot be read: {error.message}") from None
    return data


def _other_tool(texts: Mapping[str, str]) -> str:
    """Return the tool that may have written a file with these texts; empty if none is known."""
    return next((tool for keyword, tool in _OTHER_TOOLS.items() if keyword in texts), "")


def _png_texts(path: str | os.PathLike[str], data: bytes) -> Mapping[str, str]:
    import PIL
    import PIL.Image

    with warnings.catch_warnings():
        warnings.simplefilter("error", PIL.Image.DecompressionBombWarning)
        try:
            with PIL.Image.open(io.BytesIO(data), formats=["PNG"]) as image:
                if image.width * image.height > _MAX_PIXELS:
                    raise ValueError("too large")
                image.load()  # the text may follow the pixels
                return {str(keyword): value for keyword, value in image.info.items() if isinstance(value, str)}
        except PIL.UnidentifiedImageError:
            raise InvalidRequest(f"{path} is no PNG, JPEG or WebP file") from None
        except (
            PIL.Image.DecompressionBombError,
            PIL.Image.DecompressionBombWarning,
            OSError,
            SyntaxError,
            ValueError,
        ):
            raise InvalidRequest(f"{path} is a PNG that cannot be read: it is damaged or too large") from None
