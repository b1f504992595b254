"""The catalogue of ControlNets in PostgreSQL, which all servers of a fleet share, and how a server follows it.

Import this module only where a database is configured: it needs the extra `postgresql`. A row has the folder of a
ControlNet, relative to the root of every server, and the hash of its files. A ControlNet that a caller adds at one
server is thus hosted by all servers, also by those that join later. The files are not in the database: all servers
mount the root, or each machine has a copy of it, or servers get the files from S3 (shared_files.py). A server refuses
files whose hash differs.

Each server keeps a copy in its own catalogue, so that it starts and serves while the database is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bottega.adapter_rules import MAX_PROFILES
from bottega.background_tasks import BackgroundTasks
from bottega.controlnet.catalogue import (
    MAX_CONTROLNETS,
    MAX_PROFILED,
    ControlNetCatalogue,
    read_profile,
    too_many_controlnets_error,
)
from bottega.errors import BottegaError, InvalidRequest, StorageUnavailable, Unavailable
from bottega.storage.postgresql import Migration, PostgresDatabase, lock, rows_of
from bottega.v1.hosted_pb2 import ResidualProfile

if TYPE_CHECKING:
    from bottega.controlnet.server import ControlNetServer
    from bottega.controlnet.shared_files import SharedFiles  # obstore is optional

_log = logging.getLogger(__name__)

_COMPONENT = "controlnets"
_MIGRATIONS = (
    Migration(
        statements="""
        CREATE TABLE bottega_controlnets (
            name text COLLATE "C" PRIMARY KEY, folder text NOT NULL, digest text NOT NULL, files text NOT NULL);
        CREATE TABLE bottega_controlnet_profiles (
            number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, digest text NOT NULL, model_hash text NOT NULL,
            profile bytea NOT NULL, UNIQUE (digest, model_hash))
        """
    ),
    Migration(
        statements="""
        CREATE TABLE bottega_controlnet_catalogue (id text NOT NULL);
        INSERT INTO bottega_controlnet_catalogue VALUES (left(replace(gen_random_uuid()::text, '-', ''), 12))
        """
    ),
)
_PROFILES = "bottega_controlnet_profiles"
_DROP_PROFILES = f"""
    DELETE FROM {_PROFILES} WHERE (digest, model_hash) = (%(digest)s, %(model_hash)s)
        -- The oldest of the other profiles: of this ControlNet, then of all ControlNets.
        OR digest = %(digest)s AND number <= (SELECT number FROM {_PROFILES}
            WHERE digest = %(digest)s AND model_hash <> %(model_hash)s ORDER BY number DESC OFFSET %(others)s LIMIT 1)
        OR number <= (SELECT number FROM {_PROFILES} WHERE (digest, model_hash) <> (%(digest)s, %(model_hash)s)
            ORDER BY number DESC OFFSET %(all)s LIMIT 1)
"""
_ADD_PROFILE = f"INSERT INTO {_PROFILES} (digest, model_hash, profile) VALUES (%(digest)s, %(model_hash)s, %(profile)s)"
# PostgreSQL channel on which servers notify each other of changes.
_CHANNEL = "bottega_controlnets"
# Seconds between two reads of the catalogue, in case a notification was missed.
_SYNC_S = 30.0
# Seconds until the server tries again to host a ControlNet that it could not host: an operator may have copied its
# files by then. A try is expensive, because hashing the files may take seconds.
_RETRY_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedControlNet:
    """A ControlNet in the shared catalogue."""

    name: str
    folder: str
    """Folder of the ControlNet, relative to the root of a server."""
    digest: str
    """Hash of its files, as in Hosted."""
    files: str
    """Description of its files in S3; empty if they are not there, or not yet."""


class SharedControlNetCatalogue:
    """The ControlNets that callers have added at any server of a database, and their profiles.

    Every method may raise StorageUnavailable and DataLoss.

    Args:
        url: A `postgresql://` URL.
        files: The files of the ControlNets in S3; None if all servers have the files on disk.
    """

    def __init__(self, url: str, files: SharedFiles | None = None) -> None:
        self.files = files
        self.database = PostgresDatabase(url, application="bottega ControlNet server", max_connections=2)
        self.identity = ""
        """The same for all servers that share the catalogue, such as bottega/0c2f9d5be811; empty before `open`."""
        self._migrated = False

    async def open(self) -> None:
        """Connect, and create or upgrade the tables. Do nothing if that has succeeded before.

        Raises ConfigError if the database cannot be used. This may happen long after the start, if the database was
        away.
        """
        if not self._migrated:
            await self.database.open()
            await self.database.migrate(_COMPONENT, _MIGRATIONS)
            query = "SELECT current_database() || '/' || id FROM bottega_controlnet_catalogue"
            ((self.identity,),) = await self.database.fetch(query)
            if self.files is not None:
                await asyncio.to_thread(self.files.open)
            self._migrated = True

    async def close(self) -> None:
        if self.files is not None:
            self.files.close()
        await self.database.close()

    async def add(self, name: str, *, folder: str, digest: str) -> None:
        """Add a ControlNet (see SharedControlNet), or replace that of its name, without files. Raises TooLarge."""
        await self.open()
        async with self.database.transaction() as connection:
            await lock(connection, _COMPONENT)
            query = "SELECT count(*) FROM bottega_controlnets WHERE name <> %s"
            ((others,),) = await rows_of(connection, query, (name,))
            if others >= MAX_CONTROLNETS:
                raise too_many_controlnets_error("the shared catalogue has")
            await connection.execute(
                "INSERT INTO bottega_controlnets VALUES (%s, %s, %s, '') ON CONFLICT (name)"
                " DO UPDATE SET (folder, digest, files) = (excluded.folder, excluded.digest, excluded.files)",
                (name, folder, digest),
            )
            await connection.execute("SELECT pg_notify(%s, '')", (_CHANNEL,))

    async def upload(self, name: str, *, folder: str, digest: str) -> None:
        """Upload the files of a ControlNet to S3, unless it is replaced meanwhile. Takes minutes for some GiB."""
        assert self.files is not None, "the caller has checked this"
        files = await asyncio.to_thread(self.files.upload, folder)
        async with self.database.transaction() as connection:
            await lock(connection, _COMPONENT)
            query = "UPDATE bottega_controlnets SET files = %s WHERE (name, digest) = (%s, %s)"
            await connection.execute(query, (files, name, digest))
            await connection.execute("SELECT pg_notify(%s, '')", (_CHANNEL,))

    async def sweep(self, hosted: Collection[str]) -> None:
        """Delete files that are not needed any more, here and in S3. hosted: hashes of what the server hosts."""
        assert self.files is not None, "the caller has checked this"
        objects = await asyncio.to_thread(self.files.unused_for_long)
        async with self.database.transaction() as connection:
            await lock(connection, _COMPONENT)  # so that nobody adds one meanwhile, and uploads these objects again
            rows = await rows_of(connection, "SELECT digest, files FROM bottega_controlnets")
            digests = {digest for digest, _ in rows}.union(hosted)
            await asyncio.to_thread(self.files.sweep, digests, [files for _, files in rows], objects)

    async def set_profile(self, digest: str, profile: ResidualProfile) -> None:
        """Store a profile of the ControlNet with this digest. It replaces the profile for that base model."""
        await self.open()
        async with self.database.transaction() as connection:
            await lock(connection, _COMPONENT)
            values: dict[str, object] = {
                "digest": digest,
                "model_hash": profile.model_hash,
                "profile": profile.SerializeToString(deterministic=True),
                "others": MAX_PROFILES - 1,
                "all": MAX_PROFILED - 1,
            }
            await connection.execute(_DROP_PROFILES.encode(), values)
            await connection.execute(_ADD_PROFILE.encode(), values)
            await connection.execute("SELECT pg_notify(%s, '')", (_CHANNEL,))

    async def read(self) -> Sequence[SharedControlNet]:
        """Return all ControlNets, sorted by name."""
        await self.open()
        rows = await self.database.fetch("SELECT name, folder, digest, files FROM bottega_controlnets ORDER BY name")
        return [
            SharedControlNet(name=name, folder=folder, digest=digest, files=files)
            for name, folder, digest, files in rows
        ]

    async def profiles_of(self, digests: Sequence[str]) -> Mapping[str, Sequence[ResidualProfile]]:
        """Return the profiles of ControlNets by digest, oldest first. Log and skip damaged profiles."""
        query = f"SELECT digest, profile FROM {_PROFILES} WHERE digest = ANY(%s) ORDER BY number"
        found: dict[str, list[ResidualProfile]] = {}
        for digest, raw in await self.database.fetch(query, (list(digests),)):
            found.setdefault(digest, []).extend(read_profile(digest, bytes(raw)))
        return found


class CatalogueFollower:
    """Makes a server host the ControlNets that callers have added at other servers, and shares its own ControlNets.

    Args:
        catalogue: The catalogue of the server.
        shared: The shared catalogue.
        server: The server; it must have started.
    """

    def __init__(
        self, catalogue: ControlNetCatalogue, shared: SharedControlNetCatalogue, server: ControlNetServer
    ) -> None:
        self._catalogue = catalogue
        self._shared = shared
        self._server = server
        self._failed: dict[str, tuple[SharedControlNet, str, float]] = {}
        """ControlNets that cannot be hosted, by name, with the reasons and the monotonic times of the last tries."""
        self._unshared: dict[str, float] = {}
        """ControlNets of this server that could not be shared, with the monotonic times of the next tries."""
        self._swept: tuple[Sequence[SharedControlNet], set[str]] = ((), set())
        self._readable = True
        self._wake = asyncio.Event()
        self._tasks = BackgroundTasks("following the shared catalogue of ControlNets")

    def start(self) -> None:
        """Begin to follow."""
        self._tasks.start(self._follow())
        self._tasks.start(self._listen())

    async def stop(self) -> None:
        """Stop following."""
        await self._tasks.cancel()

    async def _follow(self) -> None:
        while True:
            await self._sync()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SYNC_S):
                    await self._wake.wait()
            self._wake.clear()

    async def _listen(self) -> None:
        async with contextlib.aclosing(self._shared.database.listen(_CHANNEL)) as notifications:
            async for _ in notifications:
                self._wake.set()

    async def _sync(self) -> None:
        try:
            nets = await self._shared.read()
            for net in nets:
                await self._host(net)
            await self._follow_profiles()
            await self._share_own({net.name: net for net in nets})
            await self._sweep(nets)
        except BottegaError as error:
            if self._readable:
                text = "the shared catalogue of ControlNets cannot be followed; the server goes on with its own copy"
                _log.error(text, extra={"text": error.message})
            self._readable = False
        except Exception:  # noqa: BLE001 - the boundary of the task, which must go on
            _log.exception("following the shared catalogue of ControlNets failed; it is tried again")
        else:
            if not self._readable:
                _log.info("the shared catalogue of ControlNets can be followed again")
            self._readable = True

    async def _share_own(self, known: Mapping[str, SharedControlNet]) -> None:
        """Upload the files of what was added at this server, and add what was added before it had the database."""
        digests = {net.name: net.digest for net in self._server.hosted}
        for name, folder in self._catalogue.added.items():
            digest, net = digests.get(name), known.get(name)
            lacks_files = net is not None and self._shared.files is not None and not net.files and net.digest == digest
            if digest is None or time.monotonic() < self._unshared.get(name, -math.inf):
                continue
            try:
                if net is None:
                    await self._shared.add(name, folder=folder, digest=digest)
                elif lacks_files:
                    await self._shared.upload(name, folder=folder, digest=digest)
            except BottegaError as error:
                if name not in self._unshared:
                    facts = {"controlnet": name, "text": error.message}
                    _log.error("a ControlNet that was added here cannot be shared; it is tried again", extra=facts)
                self._unshared[name] = time.monotonic() + _RETRY_S
                self._catalogue.left_out[name] = f"it is hosted here, but other servers cannot get it: {error.message}"
            else:
                if self._unshared.pop(name, None) is not None:
                    self._catalogue.left_out.pop(name, None)

    async def _follow_profiles(self) -> None:
        hosted = self._server.hosted
        profiles = await self._shared.profiles_of(sorted({net.digest for net in hosted}))
        for net in hosted:
            for profile in profiles.get(net.digest, ()):
                if profile in net.profiles:
                    continue
                try:
                    await self._server.set_profile(net.name, net.digest, profile, shared=True)
                except BottegaError as error:
                    facts = {"controlnet": net.name, "text": error.message}
                    _log.warning("profiles of the shared catalogue cannot be stored; it is tried again", extra=facts)
                    return

    async def _sweep(self, nets: Sequence[SharedControlNet]) -> None:
        """Delete shared files that no ControlNet needs any more, if ControlNets have changed since the last call."""
        hosted = {net.digest for net in self._server.hosted}
        if self._shared.files is not None and self._swept != (nets, hosted):
            await self._shared.sweep(hosted)
            self._swept = nets, hosted

    async def _host(self, net: SharedControlNet) -> None:
        """Make the server host a ControlNet, unless it already hosts it or has failed to in the last `_RETRY_S`."""
        failed, reason, failed_at = self._failed.get(net.name, (None, "", 0.0))
        is_hosted = any((each.name, each.digest) == (net.name, net.digest) for each in self._server.hosted)
        if failed == net and not is_hosted and time.monotonic() - failed_at < _RETRY_S:
            return
        try:
            if not is_hosted:
                await self._add(net)
        except BottegaError as error:
            # Soon if the server itself is not ready, such as its engine.
            soon = isinstance(error, Unavailable) and not isinstance(error, StorageUnavailable)
            self._failed[net.name] = (net, error.message, -math.inf if soon else time.monotonic())
            self._catalogue.left_out[net.name] = f"it is in the shared catalogue, but {error.message}"
            if error.message != reason:
                facts = {"controlnet": net.name, "folder": net.folder, "text": error.message}
                _log.error("a ControlNet of the shared catalogue cannot be hosted; the reason follows", extra=facts)
        else:
            if self._failed.pop(net.name, None) is not None:
                self._catalogue.left_out.pop(net.name, None)

    async def _add(self, net: SharedControlNet) -> None:
        """Make the server host a ControlNet from its own files, or else from a copy of the files in S3."""
        try:
            await self._server.add(net.name, net.folder, digest=net.digest)
        except InvalidRequest as error:
            if self._shared.files is None:
                raise
            if not net.files:
                raise InvalidRequest(f"{error.message}; its files are not in S3 yet") from None
            folder = await asyncio.to_thread(self._shared.files.fetch, net.digest, net.files)
            await self._server.add(net.name, folder, digest=net.digest)
