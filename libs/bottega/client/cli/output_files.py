"""Which files a command draws into. Knows names and formats, not pictures."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from bottega.client.cli.terminal import fail, say
from bottega.client.types.picture import SUFFIXES, Format, Picture

_SUFFIX_OF: dict[Format, str] = {"png": ".png", "jpeg": ".jpg", "webp": ".webp"}
_LONGEST_STEM = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTarget:
    """Where the pictures of one command go.

    named: the file that was asked for, with a suffix of `format` or none; it is replaced. Without it a name is
        made from the prompt and the seed, and nothing is ever replaced.
    """

    named: Path | None
    format: Format
    prompt: str

    def path_of(self, picture: Picture, count: int) -> Path:
        """Where a picture goes that is one of `count`."""
        if self.named is None:
            return _free(Path(f"{_slug(self.prompt)}-{picture.seed}{_SUFFIX_OF[self.format]}"))
        number = f"-{picture.index}" if count > 1 else ""
        return self.named.with_name(f"{self.named.stem}{number}{self.named.suffix or _SUFFIX_OF[self.format]}")


def choose_output(named: Path | None, format: Format | None, prompt: str) -> OutputTarget:
    """Checks before anything is drawn that the picture can be written. Raises click.UsageError."""
    by_suffix = SUFFIXES.get(named.suffix.lower()) if named else None
    if named and named.suffix and not by_suffix:
        raise click.UsageError(f"{named}: pictures are {', '.join(SUFFIXES)}; name it {named}.png, say.")
    if format and by_suffix and by_suffix != format:
        raise click.UsageError(f"{named} is a name for {by_suffix}, but the picture is {format}.")
    folder = named.parent if named else Path()
    if not folder.is_dir():
        raise click.UsageError(f"there is no folder {folder}; make it first.")
    if not os.access(folder, os.W_OK):
        raise click.UsageError(f"the folder {folder.resolve()} cannot be written to.")
    return OutputTarget(named=named, format=format or by_suffix or "png", prompt=prompt)


def save_all(pictures: Sequence[Picture], output: OutputTarget) -> None:
    """Saves the pictures of one job and says where they are; ends the command when that fails."""
    for picture in pictures:
        path = output.path_of(picture, len(pictures))
        replaced = path.exists()
        try:
            picture.save(path)
        except OSError as error:
            fail(
                f"the picture cannot be written: {error.strerror}",
                f"It is kept for a while: bottega jobs get {picture.job_id} -o FILE",
            )
        size = f"{picture.width}x{picture.height}"
        say(f"{path}  {size}  seed {picture.seed}{'  (replaced)' if replaced else ''}")


def _slug(prompt: str) -> str:
    words = re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")
    if len(words) > _LONGEST_STEM:
        words = words[: _LONGEST_STEM + 1].rpartition("-")[0] or words[:_LONGEST_STEM]
    return words or "picture"


def _free(target: Path) -> Path:
    taken, number = target, 2
    while taken.exists():
        taken = target.with_stem(f"{target.stem}-{number}")
        number += 1
    return taken
