"""The similarity index of an approximate cache: for each exact key, the entries whose embeddings are nearest to one.

A store asks an `EntryIndex`: `KeyedIndex` is one, with an index for each key; `KeyIndex` is that of one key, a
`FlatIndex` or, for many entries, a `SketchedIndex`. No file of an index is ever read: it is built anew from the stored
embeddings.
"""

from bottega.cache.index.keyed_index import IndexStatistics, KeyedIndex
from bottega.cache.index.settings import IndexSettings
from bottega.cache.index.vector_index import EntryIndex, Match, VectorIndex

__all__ = ["EntryIndex", "IndexSettings", "IndexStatistics", "KeyedIndex", "Match", "VectorIndex"]
