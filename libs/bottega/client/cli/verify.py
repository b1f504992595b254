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
from bottega.codec.structure import FORMATS
from bottega.content_credentials import Credentials, read
from bottega.errors import InvalidRequest

# Exit statuses beside 1 (an error) and 2 (a file or a command line that cannot be used).
_BAD_SIGNATURE, _DIFFERENT = 3, 4

# Pictures that were computed in batches of other sizes differ by a level in less than .2 % of their values; resizing
# a part that was cut out doubles that. JPEG and WebP round blocks of pixels together.
_LEVELS, _SHARE = 2, 2e-3
_LOSSY_LEVELS, _LOSSY_SHARE = 24, 0.02
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
    help="Largest difference of a value; default: 2 levels of 255 in .2 % of the values, in JPEG and WebP 24 in 2 %.",
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
    if the signature is not, or --trust is given and no trusted one is there; 4 if the picture is another one; 1 or 2 if
    it cannot be checked.
    """
    data = read_picture_file(file)
    credentials = read(data, anchors=trust.read_text(errors="replace") if trust else "")
    _say_signature(credentials, trust)
    is_genuine = credentials.state == "trusted" if credentials and trust else trust is None
    is_broken = not is_genuine or (credentials is not None and not credentials.valid)
    difference = None
    if replay:
        prompt, options = parameters_of(file)
        _add_inputs(options, file, image, mask, inputs)
        with connect(address, timeout_s=timeout_s) as client:
            again = client.generate(prompt, timeout_s=timeout_s, **{**options, "identical_results": False})  # type: ignore[arg-type]
        difference = compare(data, again)
        _say_difference(difference, levels, lossy=again.format != "png")
        for line in _other_facts(texts_of(file).get("parameters", ""), credentials, again):
            note(line)
    if is_broken:
        fail("the file is not shown to be genuine", status=_BAD_SIGNATURE)
    if difference is not None and not difference.is_within(levels, lossy=again.format != "png"):
        fail("the picture is another one", status=_DIFFERENT)


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
class PixelDifference:
    """The difference between two pictures."""

    levels: int = 0
    """Largest difference of a value, of 255."""
    share: float = 0.0
    """Share of the values that differ."""
    sizes: tuple[tuple[int, int], tuple[int, int]] | None = None
    """Width and height of both, if those differ; then the other fields are 0."""

    def is_within(self, levels: int | None, *, lossy: bool) -> bool:
        """Return whether two pictures count as the same one.

        Args:
            levels: Largest difference of a value that is allowed; None for the defaults.
            lossy: Whether the format is lossy.
        """
        most_levels, most_share = (_LOSSY_LEVELS, _LOSSY_SHARE) if lossy else (_LEVELS, _SHARE)
        if levels is not None:
            most_levels, most_share = levels, 1.0
        return self.sizes is None and self.levels <= most_levels and self.share <= most_share


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
    counts = ImageChops.difference(first, second).histogram()
    by_level = [sum(counts[level::256]) for level in range(256)]
    levels = max(level for level, count in enumerate(by_level) if count)
    return PixelDifference(levels=levels, share=1 - by_level[0] / sum(by_level))


def _say_difference(found: PixelDifference, levels: int | None, *, lossy: bool) -> None:
    if found.sizes is not None:
        (width, height), (new_width, new_height) = found.sizes
        say(f"different: it has {width}x{height} pixels, drawn again {new_width}x{new_height}")
    elif not found.levels:
        say("equal: drawn again, every pixel is the same")
    else:
        outcome = "within the tolerance" if found.is_within(levels, lossy=lossy) else "different"
        say(f"{outcome}: {share_text(found.share)} of the values differ, by at most {found.levels} of 255")


def _other_facts(summary: str, credentials: Credentials | None, again: Picture) -> Iterator[str]:
    """Yield what the file says of its picture that does not hold for the new one."""
    new = again.provenance
    facts = dict(credentials.facts) if credentials else {}
    found = _MODEL_HASH.search(summary.rpartition("\n")[2])
    model_hash = str(facts.get("model_hash") or (found[1] if found else ""))
    if model_hash and not new.model_hash.startswith(model_hash):
        yield f"the model has changed: it was {short_hash(model_hash)}, and is {short_hash(new.model_hash)}"
    for name, value in (("dtype", new.dtype), ("exact", new.exact), ("bottega_version", new.bottega_version)):
        if name in facts and facts[name] != value:
            yield f"{name} was {facts[name]}, and is {value}"
