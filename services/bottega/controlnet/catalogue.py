"""The catalogue of a server's ControlNets by name and folder, and measured profiles by digest.

ControlNets are configured, or callers have added them. Added ControlNets and profiles are stored in one SQLite file. If
a database is configured, the file is a copy of the catalogue that all servers share (shared_catalogue.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from bottega import rules
from bottega.adapter_rules import MAX_PROFILES, check_residual_profile
from bottega.blobstore.records import RecordTable
from bottega.controlnet.config import ControlNetConfig
from bottega.errors import (
    ConfigError,
    ControlNetExists,
    InvalidRequest,
    StorageUnavailable,
    TooLarge,
    Unavailable,
    Violation,
)
from bottega.miniature import WEIGHTS
from bottega.model_files.digest import controlnet_digest
from bottega.storage import SqliteDatabase, SqliteSchema, folders, os_errors
from bottega.storage.folders import HeldElsewhere, ProcessLock, check_below, listed, resolved_below
from bottega.v1.hosted_pb2 import ResidualProfile

if TYPE_CHECKING:  # psycopg is optional
    from bottega.controlnet.shared_catalogue import SharedControlNetCatalogue

_log = logging.getLogger(__name__)

MAX_CONTROLNETS = 1024
"""Upper bound on the ControlNets of a server, as in its load report (fleet.proto), and of a shared catalogue."""
_MAX_PATH_CHARACTERS = 4096
# Names for the embedded model's own ControlNets in a configuration, wherever the model is installed.
_EMBEDDED = {f"miniature/{name}": str(WEIGHTS / "controlnets" / name) for name in ("edges", "layout")}
MAX_PROFILED = 4096
"""Maximum number of ControlNets with profiles, several times what a server hosts. The oldest are removed first."""

_ADDED = RecordTable(name="controlnets", fixed=("name TEXT", "folder TEXT"))
_PINS = RecordTable(name="pins", fixed=("name TEXT",))
_PROFILES = RecordTable(name="profiles", fixed=("number INTEGER", "digest TEXT", "profile BLOB"))

SCHEMA = SqliteSchema(
    what="the catalogue of ControlNets",
    application_id=0x4274436E,  # "BtCn"
    version=3,
    tables=(
        _ADDED.statement,
        _PINS.statement,
        _PROFILES.statement,
        "CREATE INDEX profiles_digest ON profiles (digest)",
    ),
    remedy="add ControlNets again with bottega controlnets add, and measure them with bottega controlnets profile",
)


def lock_catalogue(config: ControlNetConfig, state_folder: Path) -> ProcessLock:
    """Lock the file of the catalogue and the profiles, because two servers would overwrite each other's changes.

    Raises Unavailable, which names the file and the other process, and StorageUnavailable.
    """
    file = _catalogue_file(config, state_folder)
    lock = ProcessLock(file.with_suffix(".lock"), of=file)
    with os_errors.translated():
        try:
            folders.make(file.parent)
            lock.acquire()
        except HeldElsewhere as held:
            raise Unavailable(f"{held} (key catalogue)") from None
        except OSError as error:
            if error.errno not in os_errors.FORBIDDEN:  # on a read-only disk, nothing can be overwritten
                raise
    return lock


def open_catalogue(config: ControlNetConfig, state_folder: Path) -> tuple[ControlNetCatalogue, ProfileStore]:
    """Return the configured catalogue, and the store of profiles in the same file. Raises ConfigError."""
    file = _catalogue_file(config, state_folder)
    fixed = {name: _EMBEDDED.get(folder, folder) for name, folder in config.controlnets.items()}
    database, shared = SqliteDatabase(file, SCHEMA), _shared_catalogue(config)
    root = Path(config.root) if config.root else None
    return ControlNetCatalogue(database, root=root, fixed=fixed, shared=shared), ProfileStore(database, shared)


def _shared_catalogue(config: ControlNetConfig) -> SharedControlNetCatalogue | None:
    if not config.database:
        if config.objects:
            raise ConfigError("objects: has the files of the ControlNets in a database; set database: postgresql://...")
        return None
    if not config.root:
        raise ConfigError("database: ControlNets that callers add are below a folder; set root to its path")
    from bottega.controlnet.shared_catalogue import SharedControlNetCatalogue

    files = None
    if config.objects:
        from bottega.controlnet.shared_files import SharedFiles

        files = SharedFiles(config.objects, Path(config.root).resolve())
    return SharedControlNetCatalogue(config.database, files)


def too_many_controlnets_error(owner: str) -> TooLarge:
    """Return the error for too many ControlNets. `owner` is the start of its sentence, such as "the server hosts"."""
    return TooLarge(f"{owner} {MAX_CONTROLNETS} ControlNets, the maximum", metadata={"limit": "controlnets"})


def _catalogue_file(config: ControlNetConfig, state_folder: Path) -> Path:
    return Path(config.catalogue) if config.catalogue else state_folder / "controlnets.db"


class ControlNetCatalogue:
    """The ControlNets of a server, by name. Call `open` before anything else.

    Raises ConfigError if a configured name is not valid.

    Args:
        root: Folder that must contain all added folders; None forbids adding.
        fixed: Folders of the configured ControlNets, by name.
        shared: The catalogue of all servers in a database; None if there is none.
    """

    def __init__(
        self,
        database: SqliteDatabase,
        *,
        root: Path | None,
        fixed: Mapping[str, str],
        shared: SharedControlNetCatalogue | None = None,
    ) -> None:
        for name in fixed:
            if not rules.is_adapter_name(name):
                raise ConfigError(f"controlnets: {name!r} is not a valid name of a ControlNet")
        self._database = database
        self.shared = shared
        self.root = root.resolve() if root is not None else None
        self._fixed = {name: Path(folder).absolute() for name, folder in fixed.items()}
        self._added: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        """Reasons why ControlNets that were added earlier are not hosted now, by name."""
        self.pinned: frozenset[str] = frozenset()
        """Names of the ControlNets that are kept in memory, whether they are hosted or not."""

    async def open(self) -> None:
        """Open the catalogue's file, and read the ControlNets added by callers.

        Raises ConfigError, DataLoss, StorageUnavailable. If the shared catalogue cannot be reached, it is opened later.
        """
        if self.shared is not None:
            with contextlib.suppress(StorageUnavailable):
                await self.shared.open()
        try:
            await self._database.open()
        except StorageUnavailable as error:
            if self._database.path.exists():
                raise
            _log.warning("the list of added ControlNets cannot be written", extra={"text": error.message})
            return

        def read(connection: sqlite3.Connection) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
            return _sound_rows(connection, _ADDED), _sound_rows(connection, _PINS)

        rows, pins = await self._database.transact(read)
        self.pinned = frozenset(name for (name,) in pins)
        self._added = await asyncio.to_thread(self._usable, dict(rows))

    async def close(self) -> None:
        """Close the file after pending writes, and the shared catalogue."""
        await self._database.close()
        if self.shared is not None:
            await self.shared.close()

    @property
    def folders(self) -> dict[str, Path]:
        """The folder of each ControlNet, by name. Configured names have priority over added ones."""
        return {**{name: Path(folder) for name, folder in self._added.items()}, **self._fixed}

    def root_of(self, name: str) -> Path | None:
        """Return the folder that must contain a ControlNet's files, symlinks resolved; None if it is configured."""
        return None if name in self._fixed else self.root

    @property
    def added(self) -> dict[str, str]:
        """Folders of the hosted ControlNets that callers have added, relative to the root, by name."""
        return {name: self._below(Path(folder)) for name, folder in self._added.items() if name not in self._fixed}

    def check_folder(self, name: str, folder: str, digest: str = "") -> Path:
        """Return the path of a folder that a caller wants to add, or raise if it must not be added. Reads the disk.

        Raises InvalidRequest, ControlNetExists for a configured name, and TooLarge if there are too many.

        Args:
            digest: Hash that the files must have, as in Hosted; "" for any.
        """
        violations = []
        if not rules.is_adapter_name(name):
            violations.append(Violation(field="name", description=f"must be {rules.ADAPTER_NAMES}"))
        if not 0 < len(folder) <= _MAX_PATH_CHARACTERS or "\0" in folder:
            violations.append(Violation(field="folder", description="must be the path of a folder"))
        rules.refuse(violations)
        if name in self._fixed:
            raise ControlNetExists(f"the server's configuration has a ControlNet {name}; add it under another name")
        if name not in self.folders and len(self.folders) >= MAX_CONTROLNETS:
            raise too_many_controlnets_error("the server hosts")
        path = self._below_root(folder)
        if digest and _digest_of(path, self.root) != digest:
            raise _refused(f"the files of {path} are not those that were added as {name}; copy them to this machine")
        return path

    async def add(self, name: str, folder: Path, *, share: bool = False) -> None:
        """Add a ControlNet and store it, also in the shared catalogue if `share`.

        Raises InvalidRequest if its files cannot be read, and StorageUnavailable and TooLarge if it is not stored.
        """
        if self.shared is not None and share:
            digest = await asyncio.to_thread(_digest_of, folder, self.root)
            await self.shared.add(name, folder=self._below(folder), digest=digest)
        await self._database.transact(lambda connection: _ADDED.add(connection, [((name, str(folder)), ())]))
        self._added = {**self._added, name: str(folder)}
        self.left_out.pop(name, None)

    async def pin(self, name: str, *, pinned: bool) -> None:
        """Store whether a ControlNet is kept in memory. Raises StorageUnavailable, and TooLarge for too many."""
        after = self.pinned | {name} if pinned else self.pinned - {name}
        if len(after) > MAX_CONTROLNETS:
            raise TooLarge(f"{MAX_CONTROLNETS} ControlNets are pinned, the maximum", metadata={"limit": "pins"})

        def write(connection: sqlite3.Connection) -> None:
            if pinned:
                _PINS.add(connection, [((name,), ())])
            else:
                _PINS.delete(connection, [(name,)])

        await self._database.transact(write)
        self.pinned = after

    def _below(self, folder: Path) -> str:
        """Return the path of an added folder relative to the root."""
        assert self.root is not None, "without a root, no ControlNet is added"
        return str(folder.relative_to(self.root))

    def _below_root(self, folder: str) -> Path:
        if self.root is None:
            raise _refused("ControlNets cannot be added to this server: its configuration has no root")
        try:
            path = resolved_below(Path(folder), self.root)
            is_folder = path.is_dir()
        except OSError as error:  # for example a name that is too long for the disk
            raise _refused(error.strerror or "the folder cannot be read") from None
        if not is_folder:
            raise _refused("there is no such folder on the server's machine")
        try:
            read = listed(path, ".safetensors", most=rules.MAX_CONTROLNET_FILES, deep=True)
            check_below([path / "config.json", *read], self.root)
        except OSError as error:
            raise _refused(f"{error.filename} {error.strerror}") from None
        return path

    def _usable(self, added: Mapping[str, str]) -> dict[str, str]:
        """Return the added ControlNets that may still be hosted."""
        kept = {}
        for name, folder in added.items():
            if name in self._fixed:  # kept in the file, because the name may be removed from the configuration
                kept[name] = folder
                why = "the configuration has a ControlNet of that name; add it under another name"
                self.left_out[f"{name} (added)"] = why
                facts = {"controlnet": name, "folder": folder}
                _log.warning("an added ControlNet is not hosted: the configuration has its name, too", extra=facts)
                continue
            try:
                kept[name] = str(self._checked_again(name, folder))
            except InvalidRequest as error:
                self.left_out[name] = error.message
                _log.warning("a ControlNet is not hosted any more", extra={"controlnet": name, "text": error.message})
        return kept

    def _checked_again(self, name: str, folder: str) -> Path:
        """Return the folder of a stored ControlNet if it is still allowed. Raises InvalidRequest."""
        if not rules.is_adapter_name(name):
            raise _refused(f"the name must be {rules.ADAPTER_NAMES}")
        return self._below_root(folder)


def _refused(rule: str) -> InvalidRequest:
    return InvalidRequest(f"folder: {rule}", violations=[Violation(field="folder", description=rule)])


def _digest_of(folder: Path, root: Path | None) -> str:
    try:
        return controlnet_digest(folder, root)
    except (OSError, ValueError) as error:
        raise _refused(str(error.strerror if isinstance(error, OSError) else error)) from None


class ProfileStore:
    """The stored profiles of a server's ControlNets. The catalogue must open the database before `read`."""

    def __init__(self, database: SqliteDatabase, shared: SharedControlNetCatalogue | None = None) -> None:
        self._database = database
        self._shared = shared
        self._profiles: dict[str, tuple[ResidualProfile, ...]] = {}

    async def read(self) -> None:
        """Read the stored profiles. Damaged ones are logged and skipped."""
        try:
            rows = await self._database.transact(lambda connection: _sound_rows(connection, _PROFILES))
        except StorageUnavailable as error:
            _log.warning("the stored profiles cannot be read; none is used", extra={"text": error.message})
            return
        for _, digest, raw in rows:
            self._profiles[digest] = (*self.of(digest), *read_profile(digest, raw))

    def of(self, digest: str) -> Sequence[ResidualProfile]:
        """Return the profiles of the ControlNet with that digest."""
        return self._profiles.get(digest, ())

    async def set(self, digest: str, profile: ResidualProfile, *, share: bool = True) -> None:
        """Store a profile, also in the shared catalogue if `share`. It replaces the profile for that base model.

        Raises StorageUnavailable if it could not be stored.
        """
        if self._shared is not None and share:
            await self._shared.set_profile(digest, profile)
        others = [other for other in self.of(digest) if other.model_hash != profile.model_hash]
        kept = tuple([*others, profile][-MAX_PROFILES:])
        profiles = {key: value for key, value in self._profiles.items() if key != digest}
        forgotten = [digest, *list(profiles)[: max(0, len(profiles) + 1 - MAX_PROFILED)]]
        raws = [stored.SerializeToString(deterministic=True) for stored in kept]

        def write(connection: sqlite3.Connection) -> None:
            connection.executemany("DELETE FROM profiles WHERE digest = ?", [(old,) for old in forgotten])
            ((last,),) = connection.execute("SELECT coalesce(max(number), 0) FROM profiles")
            _PROFILES.add(connection, (((number, digest, raw), ()) for number, raw in enumerate(raws, start=last + 1)))

        await self._database.transact(write)
        self._profiles = {key: value for key, value in profiles.items() if key not in forgotten} | {digest: kept}


def read_profile(digest: str, raw: bytes) -> Iterator[ResidualProfile]:
    """Yield the profile, unless it breaks the current rules."""
    try:
        profile = ResidualProfile.FromString(raw)
        broken = next((str(violation) for violation in check_residual_profile("profile", profile)), "")
    except DecodeError:
        broken = "it cannot be decoded"
    if broken:
        _log.warning("a stored profile is not valid any more", extra={"digest": digest, "why": broken})
    else:
        yield profile


def _sound_rows(connection: sqlite3.Connection, table: RecordTable) -> list[tuple[Any, ...]]:
    """Return the undamaged rows of a table, sorted by key. Log damaged ones."""
    rows = sorted(table.read(connection), key=lambda row: row.key)
    for row in rows:
        if not row.intact:
            facts = {"table": table.name, "row": str(row.values[0])}
            _log.error("a row of the catalogue of ControlNets is damaged and is ignored", extra=facts)
    return [row.values for row in rows if row.intact]
