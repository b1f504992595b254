"""The similarity index of an approximate cache: for each exact key, the entries with the nearest embeddings.

A store uses an `EntryIndex`, which `KeyedIndex` implements with an index for each key. The index of a key is a
`KeyIndex`: a `FlatIndex` or, for many entries, a `SketchedIndex`. Indexes are not stored; they are rebuilt from the
stored embeddings.
"""

from bottega.cache.index.keyed_index import IndexStatistics, KeyedIndex
from bottega.cache.index.vector_index import EntryIndex, IndexSettings, Match, VectorIndex

__all__ = ["EntryIndex", "IndexSettings", "IndexStatistics", "KeyedIndex", "Match", "VectorIndex"]
