"""A store of blobs: checksummed files beside records in SQLite, written by one thread, within a byte budget.

Files are written before the records that name them, and deleted after the records. If the process is killed in between,
there are files without a record, which the next start deletes, or records without a file, whose content then counts as
missing. While a disk is full or fails, a store is read-only.

- `records`: the SQLite file, with a checksum in each row
- `disk`: the records and the files, with the pending deletions and changes
- `writer`: the thread that writes, how it recovers from a failed disk, and counters
- `profiles`: measured profiles of models, one checked file each

A store that uses this package supplies the tables and the policy of eviction, and holds its own data in memory.
"""
