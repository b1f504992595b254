"""An index whose vectors are in the memory of a CUDA device. A search compares all of them.

It needs a FAISS for CUDA: the extra `cache-gpu` in place of `cache`. Only indexes with many vectors are there, because
a search in a small one takes longer on a device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import faiss
import numpy as np

from bottega.cache.index.vector_index import Match, Numbers, Vectors
from bottega.errors import ConfigError
from bottega.storage import os_errors

MakeIndex = Callable[[int], faiss.Index]
"""Makes an empty FAISS index for vectors of a width, which compares all by their inner product."""

# Most matches of one search on a device.
_MAX_FOUND = 2048
# Rows of removed vectors are skipped until they are this share of all.
_MAX_REMOVED = 0.25
# Memory of each index for intermediate results; FAISS would take up to 1.5 GB.
_TEMPORARY_BYTES = 64 << 20
_FLOAT_BYTES = 4
# Size of an entry in the dictionary and in the list of numbers.
_PLACE_BYTES = 110


class DeviceIndex:
    """An exact `VectorIndex` on a device. Only one thread may use it at a time.

    FAISS cannot remove vectors from a device, so the rows of removed ones are skipped and dropped later.

    Args:
        make: Makes the index; see `indexes_on`.
    """

    def __init__(self, width: int, make: MakeIndex) -> None:
        self.width = width
        self._index = make(width)
        self._numbers: list[int] = []  # by row; -1 if the vector was removed
        self._rows: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def size_bytes(self) -> int:
        """Bytes of all rows on the device, and of their numbers."""
        return len(self._numbers) * (_FLOAT_BYTES * self.width + _PLACE_BYTES)

    def add(self, number: int, vector: Vectors) -> bool:
        with _translated():
            self._index.add(vector[None])
        is_new = not self.remove(number)
        self._note([number])
        return is_new

    def add_all(self, numbers: Numbers, vectors: Vectors) -> None:
        """Add many vectors whose numbers are not in the index yet."""
        with _translated():
            self._index.add(vectors)
        self._note(numbers.tolist())

    def remove(self, number: int) -> bool:
        row = self._rows.pop(number, None)
        if row is not None:
            self._numbers[row] = -1
        return row is not None

    def search(self, vector: Vectors, count: int) -> list[Match]:
        if not self._rows:
            return []
        if len(self._numbers) - len(self._rows) > _MAX_REMOVED * len(self._numbers):
            self._drop_removed()
        found = self._search(vector, 2 * count)
        if len(found) < min(count, len(self)):
            found = self._search(vector, _MAX_FOUND)
        if len(found) < min(count, len(self)):
            self._drop_removed()
            found = self._search(vector, count)
        return found[:count]

    def vector(self, number: int) -> Vectors | None:
        """Return a copy of the vector with that number, or None."""
        found = self.vectors(np.array([number], np.int64))[1]
        return found[0] if len(found) else None

    def numbers(self) -> Numbers:
        """Return a copy of the numbers of all vectors."""
        return np.array(list(self._rows), np.int64)

    def vectors(self, numbers: Numbers) -> tuple[Numbers, Vectors]:
        """Return the given numbers that exist, and copies of their vectors."""
        here = [number for number in numbers.tolist() if number in self._rows]
        rows = np.array([self._rows[number] for number in here], np.int64)
        with _translated():
            made = self._index.reconstruct_batch(rows) if here else np.empty((0, self.width), np.float32)
        return np.array(here, np.int64), made

    def _search(self, vector: Vectors, count: int) -> list[Match]:
        """Return the vectors that exist among the `count` nearest rows."""
        with _translated():
            similarities, rows = self._index.search(vector[None], min(count, len(self._numbers), _MAX_FOUND))
        return [
            Match(number=number, similarity=min(similarity, 1.0))
            for similarity, row in zip(similarities[0].tolist(), rows[0].tolist(), strict=True)
            if row >= 0 and (number := self._numbers[row]) >= 0
        ]

    def _note(self, numbers: list[int]) -> None:
        """Note the numbers of rows that were added."""
        self._rows.update(zip(numbers, range(len(self._numbers), len(self._numbers) + len(numbers)), strict=True))
        self._numbers += numbers

    def _drop_removed(self) -> None:
        numbers, vectors = self.vectors(self.numbers())
        self._index.reset()
        self._numbers, self._rows = [], {}
        self.add_all(numbers, vectors)


def indexes_on(device: str) -> MakeIndex:
    """Return what makes indexes on a device.

    Args:
        device: "cuda" or "cuda:N".

    Raises:
        ConfigError: FAISS is not made for CUDA, or the device does not exist.
    """
    if not hasattr(faiss, "StandardGpuResources"):
        raise ConfigError(
            f"index.device is {device}, but the installed FAISS is not made for CUDA: pip uninstall faiss-cpu, "
            "then pip install 'bottega-services[cache-gpu]'"
        )
    number = int(device.partition(":")[2] or 0)
    count = faiss.get_num_gpus()
    if number >= count:
        raise ConfigError(f"index.device is {device}, but FAISS finds {count} CUDA devices (nvidia-smi lists them)")

    def make(width: int) -> faiss.Index:
        resources = faiss.StandardGpuResources()  # of its own, because two threads may not use one
        resources.setTempMemory(_TEMPORARY_BYTES)
        settings = faiss.GpuIndexFlatConfig()
        settings.device = number
        return faiss.GpuIndexFlatIP(resources, width, settings)

    return make


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Convert errors of FAISS, such as a lack of memory on the device, to StorageUnavailable."""
    try:
        yield
    except RuntimeError as error:
        text = f"the device of the cache's index fails: {str(error).strip().splitlines()[-1][:200]}"
        raise os_errors.unavailable(text, cause="EIO") from error
