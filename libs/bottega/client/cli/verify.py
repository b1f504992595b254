"""`bottega verify`: checks the signature of a picture's file, draws the picture again, and compares the two."""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from bottega.client.cli.addons import generation_parts
from bottega.client.cli.generate import GivenMask, mask_options
from bottega.client.cli.options import address_option, connect, timeout_option, with_examples
from bottega.client.cli.terminal import fail, note, say, share_text, short_hash
from bottega.client.types.file_parameters import parameters_of, read_picture_file, texts_of
from bottega.client.types.inputs import MASK_OPTIONS
from bottega.client.types.options import GenerationOptions
from bottega.client.types.picture import Picture
from bottega.codec.metadata import PARAMETERS_KEYWORD, SUMMARY_KEYWORD
from bottega.codec.structure import FORMATS
from bottega.content_credentials import Credentials, read
from bottega.errors import InvalidRequest

# Exit statuses beside 1 (an error) and 2 (a file or a command line that cannot be used).
_BAD_SIGNATURE, _DIFFERENT, _NOT_COMPARABLE = 3, 4, 5

_HALF_PRECISION = frozenset({"float16", "bfloat16"})
_MODEL_HASH = re.compile(r"(?:^|, )Model hash: ([0-9a-f]+)")

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def _input_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of add-ons that give input images again, which are passed to the command as `inputs`."""
    options = [option for part in generation_parts() for option in part.inputs]

    @functools.wraps(command)
    def with_inputs(**arguments: Any) -> None:
        names = {name for name in arguments if name not in _OWN_OPTIONS}
        command(inputs={name: arguments.pop(name) for name in names}, **arguments)

    for option in reversed(options):
        with_inputs = option(with_inputs)
    return with_inputs


_OWN_OPTIONS = frozenset({"file", "trust", "replay", "levels", "image", "mask", "timeout_s", "address"})


@click.command("verify")
@click.argument("file", type=_FILE)
@click.option("--trust", type=_FILE, help="Authorities to trust (PEM): the file must be signed by one of them.")
@click.option("--replay/--no-replay", default=True, help="Draw the picture again and compare (default), or do not.")
@click.option(
    "--tolerance",
    "levels",
    type=click.IntRange(0, 255),
    help="Largest difference of a value; default: 2 levels of 255 in .2 % of the values, in half precision 10 levels"
    " (2 if it is signed as exact).",
)
@click.option("--image", type=_FILE, help="The picture that it was drawn from (image-to-image and edits).")
@mask_options
@_input_options
@timeout_option
@address_option
@with_examples("""
    bottega verify star.png
    bottega verify star.png --trust authorities.pem --no-replay
    bottega verify edited.png --image star.png --mask mask.png --tolerance 8
""")
def command(
    *,
    file: Path,
    trust: Path | None,
    replay: bool,
    levels: int | None,
    image: Path | None,
    mask: GivenMask,
    inputs: dict[str, Any],
    timeout_s: float,
    address: str,
) -> None:
    """Check who signed a picture, draw it again, and compare.

    FILE has the parameters by which it is drawn again. Without Content Credentials, it says nothing about who made it:
    anyone can write parameters into a file.

    The exit status is 0 if the picture is the same within the tolerance and its signature, if there is one, is valid; 3
    if the signature is not, or --trust is given and no trusted one is there, and then nothing is drawn; 4 if the
    picture is another one; 5 if it differs, and something else than a change may be the cause: it is approximate, the
    suite has another model, dtype or version, or JPEG or WebP rounded it; 1 or 2 if it cannot be checked.
    """
    data = read_picture_file(file)
    credentials = read(data, anchors=trust.read_text(errors="replace") if trust else "")
    _say_signature(credentials, trust)
    is_genuine = credentials.state == "trusted" if credentials and trust else trust is None
    if not is_genuine or (credentials is not None and not credentials.valid):
        fail("the file is not shown to be genuine", status=_BAD_SIGNATURE)
    if not replay:
        return
    texts = texts_of(file)
    if credentials is not None and PARAMETERS_KEYWORD not in texts:
        say("signed; it was drawn without metadata, or by another tool, so it cannot be drawn again")
        return
    prompt, options = parameters_of(file)
    _add_inputs(options, file, image, mask, inputs)
    with connect(address, timeout_s=timeout_s) as client:
        again = client.generate(prompt, timeout_s=timeout_s, **_replayed(options, credentials))
    difference = compare(data, again)
    doubts = list(_doubts(texts.get(SUMMARY_KEYWORD, ""), credentials, again))
    tolerance = tolerance_for(again, credentials, levels)
    _say_difference(difference, tolerance)
    for doubt in doubts:
        note(doubt)
    if difference.is_within(tolerance):
        return
    if not doubts and levels is None and again.format != "png" and difference.is_within(LOSSY):
        doubts.append(f"{again.format} may have rounded it, or someone has changed it a little")
        note(doubts[-1])
    if doubts:
        fail("the pictures cannot be compared", status=_NOT_COMPARABLE)
    fail("the picture is another one", status=_DIFFERENT)


def _replayed(options: GenerationOptions, credentials: Credentials | None) -> GenerationOptions:
    """Return the arguments that draw a picture again, alone in its forward passes, and exactly if it was exact."""
    again: GenerationOptions = {**options, "identical_results": False, "shared_turns": False}
    if credentials is not None and credentials.facts.get("exact") is True:
        for name in (name for part in generation_parts() for name in part.approximations):
            again.pop(name, None)  # type: ignore[misc]
        again.pop("step_caching", None)
        again |= {"fidelity": "exact", "approximate_cache": False}
    return again


def _say_signature(credentials: Credentials | None, trust: Path | None) -> None:
    if credentials is None:
        say("not signed: the file has no Content Credentials, so it does not say who made it")
    elif not credentials.valid:
        say(f"the signature is not valid: {'; '.join(credentials.failures) or 'the file is not as it was signed'}")
    elif credentials.state == "trusted":
        say(f"signed by {credentials.signer}, whose authority is in {trust}")
    elif trust is not None:
        say(f"signed by {credentials.signer}, whose authority is not in {trust}")
    else:
        say(f"signed by someone who is called {credentials.signer} (--trust FILE checks that)")


def _add_inputs(
    options: GenerationOptions, file: Path, image: Path | None, mask: GivenMask, inputs: dict[str, Any]
) -> None:
    """Add the images that a picture's file does not contain. Raise click.UsageError if one is missing."""
    for part in generation_parts():
        if part.inputs:
            part.merge(options, inputs, file)
    if options.keys() & MASK_OPTIONS:
        if image is None:
            raise click.UsageError(f"{file} is an edit; give its image with --image and its mask.")
        mask.put_into(options, image, file)
    if "strength" in options and image is None:
        raise click.UsageError(f"{file} was drawn from another picture: give that one with --image.")
    if image is not None:
        options["image"] = image


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """The largest difference between two pictures that count as the same one."""

    levels: int
    """Difference of a value, of 255."""
    share: float
    """Share of the values of colours that differ."""


# Pictures that were computed in batches of other sizes differ by a level in less than .2 % of their values; resizing
# a part that was cut out doubles that.
TIGHT = Tolerance(levels=2, share=2e-3)
"""The tolerance for pictures in float32, and for those that were drawn exactly."""
# One layer of SDXL that is computed in other batches makes a difference of 10 levels.
HALF = Tolerance(levels=10, share=1.0)
"""The tolerance for pictures in half precision that may have shared their forward passes."""
LOSSY = Tolerance(levels=24, share=0.02)
"""The tolerance within which the rounding of JPEG and WebP, which takes blocks of pixels, may explain a difference."""


def tolerance_for(again: Picture, credentials: Credentials | None, levels: int | None) -> Tolerance:
    """Return the tolerance for a picture that was drawn again.

    Args:
        again: The picture drawn again.
        credentials: The Content Credentials of the file. The wide tolerance of JPEG and WebP, which a faint change may
            hide in, is only for trusted ones.
        levels: The difference that the caller allows; None for the defaults.
    """
    if levels is not None:
        return Tolerance(levels=levels, share=1.0)
    facts = credentials.facts if credentials else {}
    bounds = [TIGHT]
    if again.provenance.dtype in _HALF_PRECISION and facts.get("exact") is not True:
        bounds.append(HALF)
    if again.format != "png" and credentials is not None and credentials.state == "trusted":
        bounds.append(LOSSY)
    return Tolerance(levels=max(bound.levels for bound in bounds), share=max(bound.share for bound in bounds))


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelDifference:
    """The difference between two pictures."""

    levels: int = 0
    """Largest difference of a value, of 255."""
    share: float = 0.0
    """Share of the values of red, green and blue that differ."""
    place: tuple[int, int] = (0, 0)
    """Column and row of a pixel with the largest difference."""
    sizes: tuple[tuple[int, int], tuple[int, int]] | None = None
    """Width and height of both, if those differ; then the other fields are 0."""

    def is_within(self, tolerance: Tolerance) -> bool:
        """Return whether two pictures count as the same one."""
        return self.sizes is None and self.levels <= tolerance.levels and self.share <= tolerance.share


def compare(data: bytes, again: Picture) -> PixelDifference:
    """Return the difference between an encoded picture, which may be hostile, and the same one drawn again.

    Raises:
        InvalidRequest: The picture cannot be decoded.
    """
    from PIL import Image, ImageChops

    try:
        first = Image.open(io.BytesIO(data), formats=FORMATS).convert("RGBA")
    except Exception:  # noqa: BLE001 - Pillow's plugins raise whatever they meet in a broken file
        raise InvalidRequest("the picture cannot be decoded: the file is damaged") from None
    second = again.pil().convert("RGBA")
    if first.size != second.size:
        return PixelDifference(sizes=(first.size, second.size))
    difference = ImageChops.difference(first, second)
    # Opacity counts for the largest difference alone: where it is equal everywhere, it would halve a share.
    largest = functools.reduce(ImageChops.lighter, difference.split())
    values = largest.tobytes()
    levels = max(values)
    row, column = divmod(values.index(levels), largest.width)
    counts = difference.histogram()[: 3 * 256]
    return PixelDifference(levels=levels, share=1 - sum(counts[::256]) / sum(counts), place=(column, row))


def _say_difference(found: PixelDifference, tolerance: Tolerance) -> None:
    if found.sizes is not None:
        (width, height), (new_width, new_height) = found.sizes
        say(f"different: the file has {width}x{height} pixels, the new picture {new_width}x{new_height}")
    elif not found.levels:
        say("equal: drawn again, every pixel is the same")
    else:
        outcome = "within the tolerance" if found.is_within(tolerance) else "different"
        column, row = found.place
        share = share_text(found.share)
        say(f"{outcome}: {share} of the values differ, by at most {found.levels} of 255 (column {column}, row {row})")


def _doubts(summary: str, credentials: Credentials | None, again: Picture) -> Iterator[str]:
    """Yield reasons, other than a change of the file, for which a picture may differ from the new one."""
    new = again.provenance
    facts = dict(credentials.facts) if credentials else {}
    found = _MODEL_HASH.search(summary.rpartition("\n")[2])
    model_hash = str(facts.get("model_hash") or (found[1] if found else ""))
    if model_hash and not new.model_hash.startswith(model_hash):
        yield f"the model has changed: it was {short_hash(model_hash)}, and is {short_hash(new.model_hash)}"
    for name, value in (("dtype", new.dtype), ("bottega_version", new.bottega_version)):
        if name in facts and facts[name] != value:
            yield f"{name} was {facts[name]}, and is {value}"
    if not facts.get("exact", new.exact):
        yield "the picture is approximate, so it may be drawn differently each time"
