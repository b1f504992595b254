"""The catalogue of a server's ControlNets by name and folder: configured ones, and those that callers added.

Added ones are kept in a SQLite file. The catalogue does not read the folders' files.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bottega import rules
from bottega.controlnet.catalogue_schema import sound_rows, with_checksum
from bottega.errors import ConfigError, ControlNetExists, InvalidRequest, StorageUnavailable, TooLarge, Violation
from bottega.storage import SqliteDatabase
from bottega.storage.contained_paths import check_below, listed, resolved_below

_log = logging.getLogger(__name__)

# Maximum number that a server may report of itself, by the contract of Load.
_MAX_CONTROLNETS = 1024
_MAX_PATH_CHARACTERS = 4096


class ControlNetCatalogue:
    """The catalogue. Call `open` before anything else.

    Raises ConfigError if a fixed name is not valid.

    Args:
        root: Folder that must contain the folders that are added; None forbids adding.
        fixed: ControlNets of the configuration.
    """

    def __init__(self, database: SqliteDatabase, *, root: Path | None, fixed: Mapping[str, str]) -> None:
        for name in fixed:
            if not rules.is_adapter_name(name):
                raise ConfigError(f"controlnets: {name!r} cannot be the name of a ControlNet")
        self._database = database
        self.root = root.resolve() if root is not None else None
        self._fixed = {name: Path(folder).absolute() for name, folder in fixed.items()}
        self._added: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        """Reasons why added ControlNets may not be hosted any more, by name."""

    async def open(self) -> None:
        """Open the file, and read the added ControlNets. Raises ConfigError, DataLoss, StorageUnavailable."""
        try:
            await self._database.open()
        except StorageUnavailable as error:
            if self._database.path.exists():
                raise
            _log.warning("the list of added ControlNets cannot be saved", extra={"text": error.message})
            return
        rows = await self._database.transact(_all_rows)
        self._added = await asyncio.to_thread(self._usable, dict(sound_rows("controlnets", rows)))

    async def close(self) -> None:
        """Close the file after pending writes."""
        await self._database.close()

    @property
    def folders(self) -> dict[str, Path]:
        """The folder of each ControlNet, by name. The configuration's names have priority over added ones."""
        return {**{name: Path(folder) for name, folder in self._added.items()}, **self._fixed}

    def root_of(self, name: str) -> Path | None:
        """Return the folder that must contain all its files, with links followed; None for one of the configuration."""
        return None if name in self._fixed else self.root

    def checked(self, name: str, folder: str) -> Path:
        """Return the folder that a caller may add under this name. It waits for the disk.

        Raises InvalidRequest, ControlNetExists for a name of the configuration, and TooLarge if there are too many.
        """
        violations = []
        if not rules.is_adapter_name(name):
            violations.append(Violation(field="name", description=f"must be {rules.ADAPTER_NAMES}"))
        if not 0 < len(folder) <= _MAX_PATH_CHARACTERS or "\0" in folder:
            violations.append(Violation(field="folder", description="must be the path of a folder"))
        rules.refuse(violations)
        if name in self._fixed:
            raise ControlNetExists(f"the server's configuration has a ControlNet {name}; add it under another name")
        if name not in self.folders and len(self.folders) >= _MAX_CONTROLNETS:
            raise TooLarge(
                f"the server hosts {_MAX_CONTROLNETS} ControlNets, the maximum", metadata={"limit": "controlnets"}
            )
        return self._below_root(folder)

    async def add(self, name: str, folder: Path) -> None:
        """Add a ControlNet and remember it. Raises StorageUnavailable if it could not be remembered."""
        row = with_checksum(name, str(folder))
        await self._database.transact(lambda found: found.execute("REPLACE INTO controlnets VALUES (?, ?, ?)", row))
        self._added = {**self._added, name: str(folder)}
        self.left_out.pop(name, None)

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
            if name in self._fixed:  # kept, because the configuration may drop it again
                kept[name] = folder
                why = "the configuration has a ControlNet of that name; add it under another name"
                self.left_out[f"{name} (added)"] = why
                facts = {"controlnet": name, "folder": folder}
                _log.warning("an added ControlNet is not hosted: the configuration has its name", extra=facts)
                continue
            try:
                kept[name] = str(self._checked_again(name, folder))
            except InvalidRequest as error:
                self.left_out[name] = error.message
                _log.warning("a ControlNet is not hosted any more", extra={"controlnet": name, "text": error.message})
        return kept

    def _checked_again(self, name: str, folder: str) -> Path:
        """Return the folder of a remembered ControlNet if it is still allowed. Raises InvalidRequest."""
        if not rules.is_adapter_name(name):
            raise _refused(f"the name must be {rules.ADAPTER_NAMES}")
        return self._below_root(folder)


def _all_rows(connection: sqlite3.Connection) -> list[tuple[Any, ...]]:
    return connection.execute("SELECT name, folder, checksum FROM controlnets ORDER BY name").fetchall()


def _refused(rule: str) -> InvalidRequest:
    return InvalidRequest(f"folder: {rule}", violations=[Violation(field="folder", description=rule)])
