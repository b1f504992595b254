"""Vectors in lists, each around a centre (an inverted file): a search compares those of the nearest lists alone.

Prompts lie in sessions, and sessions in topics: what is most similar to a prompt has the same centre, or one next to
it. In a graph (HNSW) a session of few prompts among a million others is hardly found: with 192 candidates .83 of the
nearest were, here .95 in the same time (768 wide; `make bench-index`); and FAISS's graph neither deletes nor grows
while it is searched. Source: Jegou et al., TPAMI 2011; Douze et al., The Faiss library, 2024.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import faiss
import numpy as np

from bottega.cache.index.settings import IndexSettings
from bottega.cache.index.vector_index import Match, Numbers, Vectors

# Lists for the root of the entries, of whose centres each search compares all.
_LISTS_PER_ROOT = 4
_ROUNDS = 6
# Vectors that centres are made of, for each centre.
_SAMPLE_PER_LIST = 32
_HALF_BYTES = 2
# Of an entry, beside its vector: its number, and its place by number.
_ENTRY_BYTES = 8 + 48


class TrainingStopped(Exception):
    """The centres are no longer wanted."""


class ClusteredLists:
    """A `VectorIndex`, but for one thread at a time. centres: [lists, width]; made for so many entries."""

    def __init__(self, centres: Vectors, settings: IndexSettings, *, made_for: int) -> None:
        lists, width = centres.shape
        self.made_for = made_for
        self._settings = settings
        self._quantizer = faiss.IndexFlatIP(width)
        self._quantizer.add(centres)
        self._index = faiss.IndexIVFScalarQuantizer(
            self._quantizer, width, lists, faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT, False
        )
        self._index.train(centres)  # the centres are there, and half precision needs none
        self._index.set_direct_map_type(faiss.DirectMap.Hashtable)  # type: ignore[attr-defined]  # as its types do not say

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def __contains__(self, number: int) -> bool:
        try:
            self._index.direct_map.get(number)
        except RuntimeError:
            return False
        return True

    @property
    def width(self) -> int:
        """Of its vectors."""
        return int(self._index.d)

    @property
    def size_bytes(self) -> int:
        """Of vectors, numbers and centres, nearly."""
        return len(self) * (_HALF_BYTES * self.width + _ENTRY_BYTES) + self._index.nlist * self.width * 4

    def add(self, number: int, vector: Vectors) -> bool:
        is_new = not self.remove(number)
        self._index.add_with_ids(vector[None], np.array([number], np.int64))
        return is_new

    def add_all(self, numbers: Numbers, vectors: Vectors) -> None:
        """Takes in many, none of which is there yet."""
        if len(numbers):
            self._index.add_with_ids(vectors, numbers)

    def remove(self, number: int) -> bool:
        wanted = np.array([number], np.int64)
        return bool(self._index.remove_ids(faiss.IDSelectorArray(1, faiss.swig_ptr(wanted))))

    def search(self, vector: Vectors, count: int) -> list[Match]:
        self._index.nprobe = self._lists_of_a_search
        similarities, numbers = self._index.search(vector[None], count)
        return [
            Match(number=int(number), similarity=min(float(similarity), 1.0))
            for similarity, number in zip(similarities[0], numbers[0], strict=True)
            if number >= 0
        ]

    def vector(self, number: int) -> Vectors | None:
        """A copy."""
        if number not in self:
            return None
        return np.asarray(self._index.reconstruct(number), np.float32)

    def numbers(self) -> Numbers:
        """Of all vectors, list by list."""
        lists: Any = self._index.invlists
        parts = [
            faiss.rev_swig_ptr(lists.get_ids(place), lists.list_size(place)).copy()
            for place in range(self._index.nlist)
            if lists.list_size(place)
        ]
        return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)

    def vectors(self, numbers: Numbers) -> tuple[Numbers, Vectors]:
        """Those of the numbers that are there, and their vectors; copies."""
        here = np.array([number for number in numbers.tolist() if number in self], np.int64)
        if not len(here):
            return here, np.empty((0, self.width), np.float32)
        return here, self._index.reconstruct_batch(here)

    @property
    def _lists_of_a_search(self) -> int:
        lists = int(self._index.nlist)
        return min(lists, max(1, math.ceil(lists * self._settings.candidates / max(len(self), 1))))


def sample_size(entries: int) -> int:
    """Vectors that `centres_of` wants of so many."""
    return min(entries, _SAMPLE_PER_LIST * _lists(entries))


def centres_of(sample: Vectors, entries: int, *, threads: int, stopped: Callable[[], bool]) -> Vectors:
    """Centres for so many entries, [lists, width], made of some of them. Takes minutes for a million.

    stopped: asked between two rounds. Raises TrainingStopped.
    """
    lists = min(_lists(entries), len(sample))
    threads_before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(threads)  # of this thread alone
    try:
        rng = np.random.default_rng(0)
        centres: Vectors = sample[rng.permutation(len(sample))[:lists]].copy()
        for _ in range(_ROUNDS):
            if stopped():
                raise TrainingStopped
            rounds = faiss.Kmeans(sample.shape[1], lists, niter=1, spherical=True, min_points_per_centroid=1)
            rounds.train(sample, init_centroids=centres)
            centres = np.asarray(rounds.centroids, np.float32)
    finally:
        faiss.omp_set_num_threads(threads_before)
    return centres


def _lists(entries: int) -> int:
    return max(1, int(_LISTS_PER_ROOT * math.sqrt(entries)))
