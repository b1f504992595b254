"""An index of many vectors. A search compares the sketches of all vectors, and then only the vectors that are near.

A sketch is a vector reduced to some bytes. The first halves of a million sketches take 16 MB, which a core compares in
two milliseconds. Nothing is trained or built, adding and removing change one row, and it does not matter how prompts
cluster. Alternatives were measured with a million prompts of width 768, in small sessions and topics of very different
size (`make bench-index`): a graph (HNSW) found .83 of the nearest, lists around centres .95, because both lead to the
topic and miss the session.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import faiss
import numpy as np
from numpy.typing import NDArray

from bottega.cache.index.vector_index import MAX_COUNT, IndexSettings, Match, Numbers, Vectors

Codes = NDArray[np.uint8]
"""Sketches, [n, CODE_BYTES]: one bit for each plane."""

_PLANES = 256
CODE_BYTES = _PLANES // 8
# The part of a code that is compared for all vectors. The rest is compared only for the nearest ones.
FIRST_BYTES = CODE_BYTES // 2
# Rows that are allocated at once. Unused rows take no memory.
_BLOCK_ROWS = 65_536
# Rows of each block with the most similar first halves of sketches. A session lies in one block.
_SIFTED = 256
_HALF_BYTES, _NUMBER_BYTES = 2, 8
# Size of an entry in the dictionary of numbers.
_PLACE_BYTES = 100


class _Block:
    """A fixed number of rows that are allocated together."""

    def __init__(self, width: int) -> None:
        self.vectors = np.empty((_BLOCK_ROWS, width), np.float16)
        self.first: Codes = np.empty((_BLOCK_ROWS, FIRST_BYTES), np.uint8)
        self.second: Codes = np.empty((_BLOCK_ROWS, CODE_BYTES - FIRST_BYTES), np.uint8)
        self.numbers: Numbers = np.empty(_BLOCK_ROWS, np.int64)

    def write(self, rows: slice, numbers: Numbers, vectors: Vectors, codes: Codes) -> None:
        self.numbers[rows], self.vectors[rows] = numbers, vectors
        self.first[rows], self.second[rows] = codes[:, :FIRST_BYTES], codes[:, FIRST_BYTES:]

    def copy_row(self, row: int, source: _Block, other: int) -> None:
        self.numbers[row], self.vectors[row] = source.numbers[other], source.vectors[other]
        self.first[row], self.second[row] = source.first[other], source.second[other]

    def sift(self, code: Codes, used: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows whose sketches are nearest to `code` ([1, CODE_BYTES]), and their distances in bits."""
        if used <= _SIFTED:
            rows = np.arange(used)
            differ = np.bitwise_count(self.first[:used] ^ code[:, :FIRST_BYTES]).sum(axis=1, dtype=np.int64)
        else:
            # By counting, because there are only 129 distances.
            first = np.ascontiguousarray(code[:, :FIRST_BYTES])
            distances, found = faiss.knn_hamming(first, self.first[:used], _SIFTED, variant="mc")
            rows, differ = found[0], distances[0].astype(np.int64)
        rest = np.bitwise_count(self.second[rows] ^ code[:, FIRST_BYTES:]).sum(axis=1, dtype=np.int64)
        return rows, differ + rest


class SketchedIndex:
    """A `VectorIndex` with sketches. One thread may use it at a time. Vectors are stored in half precision.

    Args:
        centre: [width], the mean of some of the vectors, see Sketcher.
    """

    def __init__(self, centre: Vectors, settings: IndexSettings) -> None:
        self.width = len(centre)
        self._settings = settings
        self._sketcher = Sketcher(centre)
        self._blocks: list[_Block] = []
        self._rows: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def size_bytes(self) -> int:
        """Approximate bytes of vectors, sketches and numbers."""
        return len(self._rows) * (_HALF_BYTES * self.width + CODE_BYTES + _NUMBER_BYTES + _PLACE_BYTES)

    def add(self, number: int, vector: Vectors) -> bool:
        row = self._rows.get(number)
        is_new = row is None
        if row is None:
            row = self._rows[number] = len(self._rows)
        self._write(row, np.array([number], np.int64), vector[None])
        return is_new

    def add_all(self, numbers: Numbers, vectors: Vectors) -> None:
        """Add many vectors whose numbers are not in the index yet."""
        first = len(self._rows)
        self._rows.update(zip(numbers.tolist(), range(first, first + len(numbers)), strict=True))
        done = 0
        while done < len(numbers):
            count = min(len(numbers) - done, _BLOCK_ROWS - (first + done) % _BLOCK_ROWS)
            self._write(first + done, numbers[done : done + count], vectors[done : done + count])
            done += count

    def remove(self, number: int) -> bool:
        """Remove a vector. The last row fills the gap."""
        row = self._rows.pop(number, None)
        if row is None:
            return False
        last = len(self._rows)
        if row != last:
            (block, place), (source, other) = self._at(row), self._at(last)
            block.copy_row(place, source, other)
            self._rows[int(block.numbers[place])] = row
        # One empty block stays, so that adding and removing at its border allocates nothing.
        del self._blocks[-(-last // _BLOCK_ROWS) + 1 :]
        return True

    def search(self, vector: Vectors, count: int) -> list[Match]:
        # For this thread. A second thread has nothing to do for one query, and would be woken once a block.
        faiss.omp_set_num_threads(1)
        code = self._sketcher.codes(vector[None])
        sifted = [(block, *block.sift(code, used)) for block, used in self._used()]
        if not sifted:
            return []
        limit = self._limit(np.concatenate([differ for _, _, differ in sifted]))
        numbers, similarities = [], []
        for block, rows, differ in sifted:
            chosen = rows[differ <= limit]
            numbers.append(block.numbers[chosen])
            similarities.append(block.vectors[chosen].astype(np.float32) @ vector)
        joined, cosines = np.concatenate(numbers), np.concatenate(similarities)
        best = np.argsort(-cosines, kind="stable")[:count]
        return [Match(number=int(joined[place]), similarity=min(float(cosines[place]), 1.0)) for place in best]

    def vector(self, number: int) -> Vectors | None:
        """Return a copy of the vector with that number, or None."""
        row = self._rows.get(number)
        if row is None:
            return None
        block, place = self._at(row)
        return np.asarray(block.vectors[place], np.float32)

    def numbers(self) -> Numbers:
        """Return a copy of the numbers of all vectors."""
        parts = [block.numbers[:used] for block, used in self._used()]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def vectors(self, numbers: Numbers) -> tuple[Numbers, Vectors]:
        """Return the given numbers that exist, and copies of their vectors."""
        here = [number for number in numbers.tolist() if number in self._rows]
        found = [self.vector(number) for number in here]
        made = np.array(found, np.float32).reshape(len(here), self.width)
        return np.array(here, np.int64), made

    def _limit(self, differ: NDArray[np.int64]) -> int:
        """Return the largest distance in bits at which a row is a candidate."""
        count = max(MAX_COUNT, self._settings.candidates)
        if count >= len(differ):
            return int(differ.max())
        return int(np.partition(differ, count - 1)[count - 1])

    def _write(self, row: int, numbers: Numbers, vectors: Vectors) -> None:
        while row // _BLOCK_ROWS >= len(self._blocks):
            self._blocks.append(_Block(self.width))
        block, place = self._at(row)
        block.write(slice(place, place + len(numbers)), numbers, vectors, self._sketcher.codes(vectors))

    def _at(self, row: int) -> tuple[_Block, int]:
        return self._blocks[row // _BLOCK_ROWS], row % _BLOCK_ROWS

    def _used(self) -> Iterator[tuple[_Block, int]]:
        """Yield the blocks that have rows, each with its number of rows."""
        for place, block in enumerate(self._blocks):
            used = min(len(self._rows) - place * _BLOCK_ROWS, _BLOCK_ROWS)
            if used > 0:
                yield block, used


class Sketcher:
    """Computes sketches of vectors: bits that say on which side of random planes a vector lies.

    The share of planes between two vectors is approximately proportional to their angle. Over 256 planes, the share of
    a pair with a cosine of .96 is .09, give or take .02, and that of two prompts of one topic (.55) is .31. The planes
    go through the centre of a key's vectors, because prompts lie in a narrow cone: most of them would lie on one side
    of planes through the origin. Source: Charikar, STOC 2002.

    Args:
        centre: [width], the point through which the planes go.
    """

    def __init__(self, centre: Vectors) -> None:
        self._planes = _planes(len(centre))
        self._offsets = centre @ self._planes

    def codes(self, vectors: Vectors) -> Codes:
        """Return the sketches of vectors [n, width]."""
        return np.packbits(vectors @ self._planes > self._offsets, axis=1)


@functools.lru_cache(maxsize=8)
def _planes(width: int) -> NDArray[np.float32]:
    """Return the normals of the planes, [width, planes]. They are the same for all keys."""
    return np.random.default_rng(width).standard_normal((width, _PLANES), dtype=np.float32)
