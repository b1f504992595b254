"""Pictures of a long bench that are kept in a folder, so that one that was ended goes on where it was.

Each batch is a JSON file and a PNG for each picture; the JSON file comes last, so that a batch is there whole or not
at all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import PIL.Image

from bottega.diffusion.engine.events import CachedStart


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPictures:
    """Of one ask. starts: None for a picture that was drawn from noise."""

    pictures: tuple[PIL.Image.Image, ...]
    starts: tuple[CachedStart | None, ...]


class PictureFolder:
    """Batches in the order in which they were asked for. A folder is of one bench with one set of options."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._next = 0

    def take(self, asks: Sequence[str]) -> list[KeptPictures] | None:
        """The next batch, or None where that was not drawn yet; `keep` it then. asks: what each picture was asked by.

        Raises SystemExit where the folder has something else.
        """
        file = self._file(self._next)
        if not file.exists():
            return None
        said = json.loads(file.read_text(encoding="utf-8"))
        if said["asks"] != list(asks):
            raise SystemExit(f"{file} is of other options, or of another version: give an empty folder")
        kept = [self._read(place, starts) for place, starts in enumerate(said["starts"])]
        self._next += 1
        return kept

    def keep(self, asks: Sequence[str], drawn: Sequence[KeptPictures]) -> None:
        """Writes the batch that was asked for."""
        for place, each in enumerate(drawn):
            for image, picture in enumerate(each.pictures):
                picture.save(self._picture(place, image))
        starts = [[None if start is None else asdict(start) for start in each.starts] for each in drawn]
        file = self._file(self._next)
        part = file.with_suffix(".part")
        part.write_text(json.dumps({"asks": list(asks), "starts": starts}), encoding="utf-8")
        part.replace(file)
        self._next += 1

    def _read(self, place: int, starts: Sequence[dict[str, object] | None]) -> KeptPictures:
        pictures = []
        for image in range(len(starts)):
            with PIL.Image.open(self._picture(place, image)) as picture:
                pictures.append(picture.copy())
        found = [None if start is None else CachedStart(**start) for start in starts]  # type: ignore[arg-type]
        return KeptPictures(pictures=tuple(pictures), starts=tuple(found))

    def _file(self, batch: int) -> Path:
        return self._folder / f"{batch:04d}.json"

    def _picture(self, place: int, image: int) -> Path:
        return self._folder / f"{self._next:04d}-{place:03d}-{image}.png"
