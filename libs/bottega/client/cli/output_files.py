"""The files to which a command writes pictures."""

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
    """The file name and format for the pictures of one command."""

    named: Path | None
    """The file that the user named; None for a new name made from prompt and seed, which replaces no file.

    The named file is replaced if it exists. Its suffix fits `format`, or is missing."""
    format: Format
    prompts: Sequence[str]
    """The prompt of all pictures, or the prompt of each picture."""

    def path_of(self, picture: Picture, count: int) -> Path:
        """Return the file for a picture of a job that has `count` pictures."""
        if self.named is None:
            prompt = self.prompts[picture.index] if picture.index < len(self.prompts) else self.prompts[0]
            return _free(Path(f"{_slug(prompt)}-{picture.seed}{_SUFFIX_OF[self.format]}"))
        number = f"-{picture.index}" if count > 1 else ""
        return self.named.with_name(f"{self.named.stem}{number}{self.named.suffix or _SUFFIX_OF[self.format]}")


def choose_output(named: Path | None, format: Format | None, prompts: Sequence[str]) -> OutputTarget:
    """Return the target of a command's pictures. Raise click.UsageError if they cannot be written there."""
    by_suffix = SUFFIXES.get(named.suffix.lower()) if named else None
    if named and named.suffix and not by_suffix:
        raise click.UsageError(f"{named}: its name must end in {', '.join(SUFFIXES)}; try {named}.png, for example.")
    if format and by_suffix and by_suffix != format:
        raise click.UsageError(f"{named} is the name of a {by_suffix} file, but the format is {format}.")
    folder = named.parent if named else Path()
    if not folder.is_dir():
        raise click.UsageError(f"there is no folder {folder}; make it first.")
    if not os.access(folder, os.W_OK):
        raise click.UsageError(f"the folder {folder.resolve()} cannot be written to.")
    return OutputTarget(named=named, format=format or by_suffix or "png", prompts=prompts)


def save_all(pictures: Sequence[Picture], output: OutputTarget) -> None:
    """Save the pictures of one job and print their files. End the command if that fails."""
    for picture in pictures:
        path = output.path_of(picture, len(pictures))
        replaced = path.exists()
        try:
            picture.save(path)
        except OSError as error:
            fail(
                f"the picture cannot be written: {error.strerror}",
                f"The gateway keeps it for a while: bottega jobs get {picture.job_id} -o FILE",
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
