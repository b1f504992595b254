"""Measured profiles of ControlNets, by digest, which a server keeps in its catalogue's file."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from bottega import rules
from bottega.controlnet.catalogue_schema import sound_rows, with_checksum
from bottega.errors import StorageUnavailable
from bottega.storage import SqliteDatabase
from bottega.v1.hosted_pb2 import ResidualProfile

_log = logging.getLogger(__name__)

# Maximum number of ControlNets, several times what a server hosts. Those that were profiled first are forgotten first.
_MAX_PROFILED = 4096


class ProfileStore:
    """The profiles of a server's ControlNets. The catalogue opens the database before `read`."""

    def __init__(self, database: SqliteDatabase) -> None:
        self._database = database
        self._profiles: dict[str, tuple[ResidualProfile, ...]] = {}

    async def read(self) -> None:
        """Read the stored profiles. Damaged ones are logged and skipped."""
        try:
            rows = await self._database.transact(_all_rows)
        except StorageUnavailable as error:
            _log.warning("no profiles can be read", extra={"text": error.message})
            return
        for digest, raw in sound_rows("profiles", rows):
            self._profiles[digest] = (*self.of(digest), *_usable(digest, raw))

    def of(self, digest: str) -> Sequence[ResidualProfile]:
        """Return the profiles of the ControlNet with that digest."""
        return self._profiles.get(digest, ())

    async def set(self, digest: str, profile: ResidualProfile) -> None:
        """Store a profile in place of the one for its base model.

        Raises StorageUnavailable if it could not be stored.
        """
        others = [other for other in self.of(digest) if other.model_hash != profile.model_hash]
        kept = tuple([*others, profile][-rules.MAX_PROFILES :])
        profiles = {key: value for key, value in self._profiles.items() if key != digest}
        forgotten = [digest, *list(profiles)[: max(0, len(profiles) + 1 - _MAX_PROFILED)]]
        rows = [with_checksum(digest, stored.SerializeToString(deterministic=True)) for stored in kept]

        def write(connection: sqlite3.Connection) -> None:
            connection.executemany("DELETE FROM profiles WHERE digest = ?", [(old,) for old in forgotten])
            connection.executemany("INSERT INTO profiles (digest, profile, checksum) VALUES (?, ?, ?)", rows)

        await self._database.transact(write)
        self._profiles = {key: value for key, value in profiles.items() if key not in forgotten} | {digest: kept}


def _all_rows(connection: sqlite3.Connection) -> list[tuple[Any, ...]]:
    return connection.execute("SELECT digest, profile, checksum FROM profiles ORDER BY number").fetchall()


def _usable(digest: str, raw: bytes) -> Iterator[ResidualProfile]:
    """Yield the profile, unless it breaks today's rules."""
    try:
        profile = ResidualProfile.FromString(raw)
        broken = next((str(violation) for violation in rules.check_profile("profile", profile)), "")
    except DecodeError:
        broken = "it cannot be decoded"
    if broken:
        _log.warning("a profile is not used any more", extra={"digest": digest, "why": broken})
    else:
        yield profile
