"""A store of blobs: checksummed files beside records in SQLite, written by one thread, within a budget.

Files are written before the records that name them, and deleted after these. Killing the process in between leaves
files without a record, which the next start deletes, or records without a file, whose content then counts as missing.
A disk that is full or fails makes a store read-only until it can be written again.

- `records`: the SQLite file, with a checksum in each row
- `disk`: the records and the files, with the pending deletions and changes
- `writer`: the thread that writes, how it recovers from a failed disk, and counters
- `profiles`: measured profiles of models, a checked file each

The store that uses this package supplies the tables and the policy of eviction, and holds its own data in memory.
"""

from bottega.blobstore.disk import BlobDisk, Completion
from bottega.blobstore.profiles import ProfileFolder
from bottega.blobstore.records import (
    BlobRecords,
    NewRows,
    RecordChanges,
    RecordSchema,
    RecordTable,
    StoredRecord,
    StoredRow,
)
from bottega.blobstore.writer import BlobWriter, StoreCounts

__all__ = [
    "BlobDisk",
    "BlobRecords",
    "BlobWriter",
    "Completion",
    "NewRows",
    "ProfileFolder",
    "RecordChanges",
    "RecordSchema",
    "RecordTable",
    "StoredRow",
    "StoreCounts",
    "StoredRecord",
]
