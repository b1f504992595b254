"""Draws prompts from latents of similar ones, through a running suite that has a cache and a profile of its model.

`python -m load.cache_sheet FILE`, beside `bottega up`. A row for each prompt: the picture whose latent it starts from,
with its prompt; the picture from noise; the picture from the latent, with the step and the similarity. README.md of the
cache shows the sheet.
"""

from __future__ import annotations

import argparse
import io
import time
from dataclasses import dataclass
from pathlib import Path

import PIL.Image

from bottega.client import Client, Picture
from load.contact_sheet import compose

COLUMNS = 6
_RECORDED_S, _POLL_S = 15.0, 0.1
# One hit in twenty is drawn from noise all the same.
_TRIES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Refined:
    """A prompt that follows another one, each with a seed with which its picture from noise is right."""

    first: str
    second: str
    first_seed: int
    seed: int


PAIRS = (
    Refined(
        first="a big red star on the left on a blue background",
        second="a big yellow star on the left on a blue background",
        first_seed=2,
        seed=7,
    ),
    Refined(
        first="a big pink ring in the center on a green background",
        second="a big pink circle in the center on a green background",
        first_seed=4,
        seed=1,
    ),
    Refined(
        first="a white heart left of a yellow circle on a purple background",
        second="a white heart left of a yellow circle on a black background",
        first_seed=5,
        seed=3,
    ),
    Refined(
        first="a black diamond above a red square on a yellow background",
        second="a black diamond above a red ring on a yellow background",
        first_seed=3,
        seed=8,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """Captions and pictures of one pair."""

    captions: tuple[str, str, str]
    pictures: tuple[PIL.Image.Image, PIL.Image.Image, PIL.Image.Image]


def draw(client: Client, pair: Refined) -> Row:
    """Raises SystemExit where the second prompt starts from nothing."""
    for _ in range(2):  # a kind of request is recorded when it is seen again
        client.generate(pair.first, seed=pair.first_seed, fidelity="exact", identical_results=False)
    _wait_until_recorded(client, pair)
    noise = client.generate(pair.second, seed=pair.seed, approximate_cache=False, fidelity="exact")
    started = _start(client, pair)
    (use,) = started.provenance.cached_starts
    entry = client.cache_entry(use.entry)
    steps = started.provenance.parameters.num_inference_steps
    step = use.entry.partition("@")[2]
    return Row(
        captions=(
            entry.parameters.prompt,
            f"from noise: {pair.second}",
            f"from its latent after {step} of {steps} steps, similarity {use.similarity:.3f}",
        ),
        pictures=(_opened(entry.picture), _opened(noise.data), _opened(started.data)),
    )


def main() -> None:
    """Draws the sheet and writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="PNG to write")
    options = parser.parse_args()
    with Client() as client:
        rows = [draw(client, pair) for pair in PAIRS]
    captions = [caption for row in rows for caption in row.captions]
    sheet = compose(captions, [picture for row in rows for picture in row.pictures], columns=COLUMNS)
    sheet.quantize(128, dither=PIL.Image.Dither.NONE).save(options.file, optimize=True)
    print(options.file)


def _start(client: Client, pair: Refined) -> Picture:
    for _ in range(_TRIES):
        picture = client.generate(
            pair.second, seed=pair.seed, fidelity="balanced", approximate_cache=True, identical_results=False
        )
        if picture.provenance.cached_starts:
            return picture
    raise SystemExit(f"{pair.second!r} starts from no latent: bottega cache profiles says what is similar enough")


def _wait_until_recorded(client: Client, pair: Refined) -> None:
    deadline = time.monotonic() + _RECORDED_S
    while time.monotonic() < deadline:
        if any(each.parameters.prompt == pair.first for each in client.cache_entries()):
            return
        time.sleep(_POLL_S)
    raise SystemExit(f"{pair.first!r} was not recorded: bottega cache says why")


def _opened(data: bytes) -> PIL.Image.Image:
    return PIL.Image.open(io.BytesIO(data)).convert("RGB")


if __name__ == "__main__":
    main()
