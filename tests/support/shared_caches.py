"""Stores of cached latents that share their entries in PostgreSQL and in a bucket, in the test's own process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bottega.cache.index.postgresql import PostgresIndex, cache_database
from bottega.cache.records import FILE_NAMES
from bottega.cache.shared_entries import FilesInObjects, SharedEntries
from bottega.cache.shared_records import OWNER_NAMES, SharedRecords
from bottega.cache.store.store import LatentStore
from bottega.storage import BlobFiles
from bottega.storage.objects import s3_location
from bottega.storage.s3 import S3Objects
from tests.support import cached_latents


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The database and the bucket that caches share. The environment says where S3 is."""

    url: str
    objects: str
    """Address, s3://..."""
    folder: Path
    """Has a folder for each cache."""

    @property
    def url_name(self) -> str:
        """Name of the database."""
        return urlsplit(self.url).path[1:]

    def entries(self, name: str, cache: str = "") -> tuple[SharedEntries, PostgresIndex]:
        """Return the entries of a cache and its index, opened. Close the index last."""
        database, cache = cache_database(self.url), cache or f"folder of {name}"
        index = PostgresIndex(database, cache=cache)
        folder = self.folder / cache.replace(" ", "-")
        objects, reading = (
            S3Objects(s3_location(self.objects), names=FILE_NAMES, request_s=request_s)
            for request_s in (None, cached_latents.WAIT_S)
        )
        tier = BlobFiles(folder / "tier", names=FILE_NAMES)
        entries = SharedEntries(
            folder,
            database,
            SharedRecords(database.database, objects=self.objects, name=name, cache=cache),
            FilesInObjects(objects, tier, reading=reading, local_bytes=1 << 20),
            owner=S3Objects(s3_location(f"{self.objects}/owner"), names=OWNER_NAMES),
            name=name,
        )
        index.open()
        return entries, index

    @contextlib.contextmanager
    def running(self, name: str, cache: str = "", *, measured: bool = True, **changed: Any) -> Iterator[LatentStore]:
        """Start a store of this name, and close it after the block. measured: its model has a profile."""
        entries, index = self.entries(name, cache)
        settings = cached_latents.settings(self.folder / (cache or f"folder of {name}").replace(" ", "-"), **changed)
        store = LatentStore(settings, index=index, disk=entries)
        store.start()
        try:
            store.flush(cached_latents.WAIT_S)
            if measured and not store.profiles():
                store.set_profile(cached_latents.profile())
            yield store
        finally:
            store.close()
