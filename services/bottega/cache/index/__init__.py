"""The similarity index of an approximate cache: for each exact key, the entries whose embeddings are nearest to one.

`KeyedIndex` has an index for each key; `KeyIndex` is that of one key, a `FlatIndex` or, for many entries, a
`SketchedIndex`. No file of an index is ever read: it is built anew from the stored embeddings.
"""

from bottega.cache.index.keyed_index import IndexStatistics, KeyedIndex
from bottega.cache.index.settings import IndexSettings
from bottega.cache.index.vector_index import Match, VectorIndex

__all__ = ["IndexSettings", "IndexStatistics", "KeyedIndex", "Match", "VectorIndex"]
