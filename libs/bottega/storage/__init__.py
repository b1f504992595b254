"""Storage that outlives a process: files by content hash, objects, SQLite files, and a thread for blocking work."""

from bottega.storage.blob_files import BlobFiles, ContentReader
from bottega.storage.content import ContentStore
from bottega.storage.content_stores import content_store
from bottega.storage.shared_content import SharedContentStore
from bottega.storage.sqlite_database import SqliteDatabase, SqliteFile, SqliteSchema
from bottega.storage.thread import SerialTask, SerialThread, TaskGroups

__all__ = [
    "BlobFiles",
    "ContentReader",
    "ContentStore",
    "SqliteDatabase",
    "SqliteFile",
    "SqliteSchema",
    "TaskGroups",
    "SharedContentStore",
    "content_store",
    "SerialTask",
    "SerialThread",
]
