"""How long does a search in the approximate cache's index take at full size, what does it find, and what does it cost?

Vectors are as of prompts: topics of very different size, in them sessions, in these chains of small edits; a search is
for one more edit of a stored prompt. All are under one key. Searches run in one thread, first alone, and then while
another one replaces a tenth of the entries. Recall is the share of searches whose first match is as similar as that of
a comparison with every vector, half precision aside.

Afterwards an index in PostgreSQL (pgvector) and one in memory have fewer vectors (`--stored`): how long loading them,
building the graph and a search take, and what searches find.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import faiss
import numpy as np
import psutil
from numpy.typing import NDArray

from bottega.cache.index.key_index import KeyedIndex
from bottega.cache.index.postgresql import PostgresIndex, cache_database
from bottega.cache.index.vector_index import EntryIndex, IndexSettings, Vectors, unit_vectors
from load.bench.framework import Bench, Option, Sheet, percentile
from tests.support.postgresql import running_server

KEY = "key"
WANTED_P99_MS = 5.0
WANTED_RECALL = 0.98
# Vectors that are made and loaded at once.
PIECE = 50_000
# Prompts of a session; each is an edit of the one before.
EDITS = 8
# Lengths of what is added to a topic for a session, and to a prompt for an edit: cosines of .7 and .96.
SESSION_STEP, EDIT_STEP = 0.9, 0.3
# Matches of a search, as for a job of eight pictures.
COUNT = 8
# Replacements a second: hundreds of times what workers record.
REPLACEMENTS_PER_S = 500.0
# By so much a cosine may change of a vector that is kept in half precision.
HALF_PRECISION = 5e-4
_TIMEOUT_S = 7200.0
BENCH = Bench(
    __file__,
    __doc__,
    Option("--vectors", 1_000_000, "in the index", smallest=2000),
    Option("--widths", [768, 1280], "of a vector", smallest=[64]),
    Option("--searches", 2000, "whose recall is measured", smallest=50),
    Option("--replaced", 0.1, "share of the entries"),
    Option("--stored", 10_000, "vectors in PostgreSQL and, beside it, in memory", smallest=500),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """Milliseconds of each search, and the similarity of its first match."""

    times_ms: list[float]
    similarities: list[float]


class Corpus:
    """Makes vectors, in pieces.

    Args:
        vectors: Their number, about.
        stream: Another stream has other vectors of the same topics.
    """

    def __init__(self, vectors: int, width: int, *, stream: int = 0) -> None:
        self._rng = np.random.default_rng(0)
        self._width = width
        self._topics = unit_vectors(self._noise(max(vectors // 500, 10)))
        self._shares = self._rng.zipf(1.5, size=len(self._topics)).astype(np.float64)
        self._shares /= self._shares.sum()
        self._rng = np.random.default_rng((1, stream))

    def piece(self, count: int) -> Vectors:
        """Return so many vectors of new sessions."""
        sessions = -(-count // EDITS)
        topics = self._topics[self._rng.choice(len(self._topics), size=sessions, p=self._shares)]
        prompt = unit_vectors(topics + SESSION_STEP * self._noise(sessions))
        chain = [prompt := self.edited(prompt) for _ in range(EDITS)]
        return np.concatenate(chain)[:count]

    def edited(self, vectors: Vectors) -> Vectors:
        """Return each vector with one more edit."""
        return unit_vectors(vectors + EDIT_STEP * self._noise(len(vectors)))

    def _noise(self, count: int) -> NDArray[np.float32]:
        """Return vectors of length 1, nearly."""
        made = self._rng.standard_normal((count, self._width), dtype=np.float32)
        made /= np.float32(np.sqrt(self._width))
        return made


class Exact:
    """Finds the nearest vector by comparing each that it was shown."""

    def __init__(self, queries: Vectors) -> None:
        self.queries = queries
        self.similarities = np.full(len(queries), -2.0, np.float32)

    def show(self, vectors: Vectors) -> None:
        """Compare these vectors."""
        nearest, _ = faiss.knn(self.queries, vectors, 1, metric=faiss.METRIC_INNER_PRODUCT)
        np.maximum(self.similarities, nearest[:, 0], out=self.similarities)


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Measure every width."""
    sheet.values["vectors"] = options.vectors
    for width in options.widths:
        measured = _measure(width, options)
        _add_rows(sheet, width, measured)
        sheet.values |= {f"{name}_{width}": value for name, value in measured.items()}
    for name, worst in (("p99_ms", max), ("recall_at_1", min)):
        sheet.values[name] = worst(value for key, value in sheet.values.items() if key.startswith(name))
    _measure_stored(options, sheet)


def _measure(width: int, options: argparse.Namespace) -> dict[str, float]:
    process = psutil.Process()
    before_bytes = process.memory_info().rss
    index = KeyedIndex(settings=IndexSettings())
    try:
        build_s, queries, nearest = _build(index, width, options)
        memory_bytes = process.memory_info().rss - before_bytes
        _search(index, queries[: len(queries) // 10])  # caches are warm, as in a service that has run a while
        alone = _search(index, queries)
        values = {
            "build_s": build_s,
            "index_mib": index.statistics().size_bytes / 2**20,
            "memory_mib": memory_bytes / 2**20,
            "alone_p50_ms": percentile(alone.times_ms, 0.5),
            "alone_p99_ms": percentile(alone.times_ms, 0.99),
            "alone_recall_at_1": _recall(alone, nearest),
        }
        return values | _replaced(index, queries, width, options)
    finally:
        index.close()


def _build(index: KeyedIndex, width: int, options: argparse.Namespace) -> tuple[float, Vectors, Vectors]:
    """Return the index's seconds, searches to make [searches, width], and their greatest similarities [searches]."""
    corpus, edits = Corpus(options.vectors, width), Corpus(options.vectors, width, stream=1)
    exact: Exact | None = None
    build_s = 0.0
    for numbers, vectors in _pieces(corpus, options.vectors):
        if exact is None:
            picked = np.random.default_rng(2).integers(len(vectors), size=options.searches)
            exact = Exact(edits.edited(vectors[picked]))
        exact.show(vectors)
        began = time.perf_counter()
        index.load(KEY, numbers, vectors)
        build_s += time.perf_counter() - began
    assert exact is not None
    return build_s, exact.queries, exact.similarities


def _replaced(index: KeyedIndex, queries: Vectors, width: int, options: argparse.Namespace) -> dict[str, float]:
    """Search while a share of the entries is replaced by others, and again when that is done."""
    count = int(options.replaced * options.vectors)
    gone = np.random.default_rng(3).permutation(options.vectors)[:count]
    fresh = Corpus(options.vectors, width, stream=2).piece(count)
    replacing = threading.Thread(target=_replace, args=(index, gone, fresh, options.vectors))
    began = time.perf_counter()
    replacing.start()
    times_ms: list[float] = []
    while replacing.is_alive() and time.perf_counter() - began < _TIMEOUT_S:
        times_ms += _search(index, queries[: PIECE // 100]).times_ms
    replacing.join(_TIMEOUT_S)
    seconds = time.perf_counter() - began
    exact = Exact(queries)
    for numbers, vectors in _pieces(Corpus(options.vectors, width), options.vectors):
        exact.show(vectors[~np.isin(numbers, gone)])
    exact.show(fresh)
    return {
        "p50_ms": percentile(times_ms, 0.5),
        "p99_ms": percentile(times_ms, 0.99),
        "max_ms": max(times_ms),
        "recall_at_1": _recall(_search(index, queries), exact.similarities),
        "replaced_per_s": count / seconds,
    }


def _replace(index: KeyedIndex, gone: NDArray[np.int64], fresh: Vectors, first: int) -> None:
    """Replace each of `gone` by one of `fresh`, whose numbers begin at `first`."""
    began = time.perf_counter()
    for place, (number, vector) in enumerate(zip(gone.tolist(), fresh, strict=True)):
        index.remove(KEY, number)
        index.add(KEY, first + place, vector)
        time.sleep(max(began + place / REPLACEMENTS_PER_S - time.perf_counter(), 0.0))


def _search(index: EntryIndex, queries: Vectors) -> Searched:
    times_ms, similarities = [], []
    for query in queries:
        began = time.perf_counter()
        found = index.search(KEY, query, COUNT)
        times_ms.append((time.perf_counter() - began) * 1e3)
        similarities.append(found[0].similarity)
    return Searched(times_ms=times_ms, similarities=similarities)


def _recall(searched: Searched, nearest: Vectors) -> float:
    return float(np.mean(np.array(searched.similarities) >= nearest - HALF_PRECISION))


def _pieces(corpus: Corpus, vectors: int) -> Iterator[tuple[NDArray[np.int64], Vectors]]:
    for first in range(0, vectors, PIECE):
        count = min(PIECE, vectors - first)
        yield np.arange(first, first + count), corpus.piece(count)


def _measure_stored(options: argparse.Namespace, sheet: Sheet) -> None:
    """Measure the index in PostgreSQL and the one in memory with the same vectors and searches."""
    corpus = Corpus(options.stored, options.widths[0])
    vectors = corpus.piece(options.stored)
    queries = corpus.edited(vectors[:: max(1, len(vectors) // options.searches)])
    exact = Exact(queries)
    exact.show(vectors)
    with running_server(durable=True, vector=True) as server:
        stored = PostgresIndex(cache_database(server.url(server.new_database())), cache="cache")
        stored.open()
        for name, index in (("memory", KeyedIndex()), ("postgresql", stored)):
            began = time.perf_counter()
            index.load(KEY, np.arange(len(vectors)), vectors)
            load_s = time.perf_counter() - began
            index.loaded()
            while isinstance(index, PostgresIndex) and not index.has_graphs:
                if time.perf_counter() - began > _TIMEOUT_S:
                    raise TimeoutError("the graph is not built")
                time.sleep(0.1)
            graph_s = time.perf_counter() - began - load_s
            _search(index, queries[: len(queries) // 10])
            searched = _search(index, queries)
            index.close()
            sheet.row(f"{len(vectors)} vectors, {name}: loaded, graph built in", f"{load_s:.1f}, {graph_s:.1f} s")
            p50_ms, p99_ms = (percentile(searched.times_ms, share) for share in (0.5, 0.99))
            sheet.row("  search: p50, p99", f"{p50_ms:.2f}, {p99_ms:.2f} ms")
            sheet.row("  recall at 1", f"{_recall(searched, exact.similarities):.4f}")
            sheet.values |= {
                f"stored_{name}_p50_ms": p50_ms,
                f"stored_{name}_p99_ms": p99_ms,
                f"stored_{name}_recall": _recall(searched, exact.similarities),
                f"stored_{name}_load_s": load_s,
                f"stored_{name}_graph_s": graph_s,
            }


def _add_rows(sheet: Sheet, width: int, values: Mapping[str, float]) -> None:
    sheet.row(f"{width} wide: built in", f"{values['build_s']:.0f} s")
    sizes = f"{values['index_mib']:.0f}, {values['memory_mib']:.0f} MiB"
    sheet.row("  memory of the index; of the process", sizes)
    sheet.row("  search, alone: p50, p99", f"{values['alone_p50_ms']:.2f}, {values['alone_p99_ms']:.2f} ms")
    recall = f"at least {WANTED_RECALL:g}"
    sheet.row("  recall at 1, alone", f"{values['alone_recall_at_1']:.4f}", recall)
    sheet.row("  while replacing: entries a second", f"{values['replaced_per_s']:.0f}")
    sheet.row("  search: p50, longest", f"{values['p50_ms']:.2f}, {values['max_ms']:.1f} ms")
    sheet.row("  search: p99 (p99_ms)", f"{values['p99_ms']:.2f} ms", f"at most {WANTED_P99_MS:g} ms")
    sheet.row("  recall at 1, afterwards (recall_at_1)", f"{values['recall_at_1']:.4f}", recall)


if __name__ == "__main__":
    sys.exit(BENCH.command())
