"""Bits flipped on the disk of an activation store: how many of the sections that have one are refused."""

from __future__ import annotations

import random
from pathlib import Path

from bottega.activations.store.settings import ActivationStoreSettings
from bottega.activations.store.statistics import DropReason
from bottega.activations.store.store import ActivationStore
from bottega.errors import DataLoss
from load.bench.template_client import TemplateShape, key_of, question_of, recording_of

_ROOM = 1 << 40
# Too little for any section: they are read from the disk each time.
_NO_MEMORY = 1
_WAIT_S = 120.0


def flip_bits(folder: Path, flips: int, shape: TemplateShape) -> dict[str, int]:
    """Records sections, flips one bit of each on the disk, and fetches it: how many were flipped, and how many refused.

    Half of them are fetched by a store that reads them into its memory, half by one that has none. One section that is
    whole is fetched first, of each, to see that they can be. Raises RuntimeError where that is refused.
    """
    found = flipped = 0
    for number, memory_bytes in enumerate((_ROOM, _NO_MEMORY)):
        here = folder / str(number)
        digests = _recorded(here, flips // 2, shape)
        with _Opened(here, memory_bytes) as store:
            if not store.gives(digests[-1]):
                raise RuntimeError("a whole section is refused")
            files = {path.name: path for path in here.rglob("*") if len(path.name) == 64}
            chance = random.Random(number)
            for digest in digests[:-1]:
                _flip(files[digest], chance)
                flipped += 1
                found += not store.gives(digest)
    return {"flipped": flipped, "found": found}


def _recorded(folder: Path, count: int, shape: TemplateShape) -> list[str]:
    """The digests of so many sections, and of one more, in a folder that no store has open."""
    digests: list[str] = []
    with _Opened(folder, _ROOM) as store:
        number = 0
        while len(digests) <= count:
            digests += store.record(key_of(number), shape)
            number += 1
    return digests[: count + 1]


def _flip(path: Path, chance: random.Random) -> None:
    """One bit, anywhere in the file."""
    mode = path.stat().st_mode
    path.chmod(mode | 0o200)
    with path.open("r+b") as file:
        place = chance.randrange(path.stat().st_size)
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << chance.randrange(8)]))


class _Opened:
    """A store in this process."""

    def __init__(self, folder: Path, memory_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._store = ActivationStore(
            ActivationStoreSettings(folder=folder, disk_budget_bytes=_ROOM, memory_budget_bytes=memory_bytes)
        )

    def __enter__(self) -> _Opened:
        self._store.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()

    def record(self, key: str, shape: TemplateShape) -> list[str]:
        """A template; its sections' digests."""
        store = self._store
        store.answer(question_of(key), self)
        for number, header in enumerate(shape.headers(key)):
            tensors = [memoryview(each) for each in shape.tensors_of(f"{key} {number}")]
            intake = store.begin_section(header, shape.layout, self)
            if isinstance(intake, DropReason):
                raise RuntimeError(f"the store does not take a section: {intake}")
            for place, tensor in enumerate(tensors):
                intake.write(place, 0, tensor)
        store.complete(recording_of(key), None, self)
        if not store.flush(_WAIT_S):
            raise RuntimeError("the store does not come to an end with a recording")
        answered = store.answer(question_of(key), self)
        if len(answered.header.sections) != shape.sections:
            raise RuntimeError("the store did not keep a recording")
        return [section.digest for section in answered.header.sections]

    def gives(self, digest: str) -> bool:
        """Whether it hands the section out."""
        try:
            lease = self._store.fetch(digest).result(_WAIT_S)
        except DataLoss:
            return False
        self._store.give_back(lease)
        return True
