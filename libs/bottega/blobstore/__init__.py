"""A store of blobs: checksummed files beside records in SQLite, written by one thread, within a budget.

Files are written before the records that name them, and deleted after these. Killing the process in between leaves
files without a record, which the next start deletes, or records without a file, whose content then counts as missing.
A disk that is full or fails makes a store read-only until it can be written again.

- `files`: files in a folder, checked by SHA-256 when they are read
- `tables`, `records`: the SQLite file, with a checksum in each row
- `disk`: both of them, with the pending deletions and changes
- `writer`: the thread that writes, and how it recovers from a failed disk
- `profiles`: measured profiles of models, a checked file each
- `counts`: counters of a store

The store that uses this package supplies the tables and the policy of eviction, and holds its own data in memory.
"""

from bottega.blobstore.counts import StoreCounts
from bottega.blobstore.disk import BlobDisk, Completion
from bottega.blobstore.files import BlobFiles
from bottega.blobstore.profiles import ProfileFolder
from bottega.blobstore.records import BlobRecords, NewRows, RecordChanges, RecordSchema, StoredRecord
from bottega.blobstore.tables import RecordTable, StoredRow
from bottega.blobstore.writer import BlobWriter

__all__ = [
    "BlobDisk",
    "BlobFiles",
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
