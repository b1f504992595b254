"""The similarity index of an approximate cache: finds the entries of a key whose embeddings are most similar.

A key is a hash of all settings of a request except its prompt; an entry is a cached image. A store uses an
`EntryIndex`. `PostgresIndex` is one in a database. `KeyedIndex` has an index in memory for each key, a `KeyIndex`: a
`FlatIndex` or, for many entries, a `SketchedIndex`. Indexes are rebuilt at each start from the stored embeddings.
"""
