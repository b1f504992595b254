"""Measured profiles of models in a folder, one file each, with a checksum.

<folder>/<SHA-256 of the profile's key>.json    {"checksum": ..., "profile": a protobuf message as JSON}

A damaged file is ignored. All calls are thread-safe.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from google.protobuf import json_format
from google.protobuf.message import Message

from bottega.errors import DataLoss, StorageUnavailable, Violation
from bottega.storage import folders, os_errors
from bottega.storage.sqlite_files import checksum

ProfileT = TypeVar("ProfileT", bound=Message)

# More models and sizes than a fleet serves in years.
_MAX_PROFILES = 10_000

_log = logging.getLogger(__name__)


class ProfileFolder(Generic[ProfileT]):
    """The profiles in a folder. Calls that change something wait for the disk and raise StorageUnavailable.

    Args:
        folder: Created with the first profile.
        message: The class of the profiles.
        key: Returns the key of a profile: a string, or a tuple of values that JSON can represent.
        check: Yields the violations of a profile.
        is_empty: Returns whether a profile has no content besides its key; setting such a profile deletes the old one.
        remedy: Advice in the log: how to replace a damaged profile.
        max_file_bytes: Larger files count as damaged.
    """

    def __init__(
        self,
        folder: Path,
        message: type[ProfileT],
        *,
        key: Callable[[ProfileT], Any],
        check: Callable[[ProfileT], Iterable[Violation]],
        is_empty: Callable[[ProfileT], bool],
        remedy: str,
        max_file_bytes: int,
    ) -> None:
        self._folder = folder
        self._message = message
        self._key = key
        self._check = check
        self._is_empty = is_empty
        self._remedy = remedy
        self._max_file_bytes = max_file_bytes
        self._profiles: Mapping[Any, ProfileT] = MappingProxyType({})
        self._changing = threading.Lock()

    def open(self) -> None:
        """Read the profiles in the folder."""
        with os_errors.translated():
            paths = sorted(self._folder.glob("*.json"))
        found = {}
        for path in paths[:_MAX_PROFILES]:
            try:
                profile = self._read_file(path)
            except (DataLoss, StorageUnavailable) as error:
                facts = {"file": str(path), "text": error.message}
                _log.error(f"a profile cannot be read; {self._remedy}", extra=facts)
            else:
                found[self._key(profile)] = profile
        self._keep(found)

    def all(self) -> list[ProfileT]:
        """Return all profiles, sorted by key."""
        profiles = self._profiles  # `set` may replace them meanwhile
        return [profiles[key] for key in sorted(profiles)]

    def get(self, key: Any) -> ProfileT | None:
        """Return the profile with this key; None if there is none."""
        return self._profiles.get(key)

    def set(self, profile: ProfileT) -> None:
        """Store a profile in place of an existing one with the same key. An empty profile deletes the existing one.

        Raises ValueError if the profile is invalid.
        """
        violation = next(iter(self._check(profile)), None)
        if violation is not None:
            raise ValueError(f"{violation.field}: {violation.description}")
        with self._changing:
            self._set(profile)

    def _set(self, profile: ProfileT) -> None:
        key, path = self._key(profile), self._folder / f"{self._stem(profile)}.json"
        kept = dict(self._profiles)
        if self._is_empty(profile):
            kept.pop(key, None)
            with os_errors.translated():
                path.unlink(missing_ok=True)
        else:
            if key not in kept and len(kept) >= _MAX_PROFILES:
                raise ValueError(f"there are already {_MAX_PROFILES} profiles, which is the maximum")
            copy = self._message()
            copy.CopyFrom(profile)
            kept[key] = copy
            _write_file(path, copy)
        self._keep(kept)

    def _keep(self, profiles: Mapping[Any, ProfileT]) -> None:
        """Replace the profiles in memory."""
        self._profiles = MappingProxyType(profiles)

    def _stem(self, profile: ProfileT) -> str:
        return hashlib.sha256(json.dumps(self._key(profile)).encode()).hexdigest()

    def _read_file(self, path: Path) -> ProfileT:
        """Read a profile. Raise DataLoss if the file is damaged, or StorageUnavailable."""
        with os_errors.translated(), path.open("rb") as file:
            text = file.read(self._max_file_bytes + 1)
        profile = self._message()
        try:
            content = json.loads(text)
            json_format.ParseDict(content["profile"], profile)
            sound = content["checksum"] == _checksum(profile) and self._stem(profile) == path.stem
        except (ValueError, KeyError, TypeError, RecursionError, json_format.ParseError):
            sound = False
        if not sound or any(True for _ in self._check(profile)):
            raise DataLoss(f"the profile {path.name} is damaged")
        return profile


def _write_file(path: Path, profile: Message) -> None:
    content = {"checksum": _checksum(profile), "profile": json_format.MessageToDict(profile)}
    partial = path.with_suffix(".partial")
    with os_errors.translated():
        folders.make(path.parent)
        with partial.open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        folders.sync(path.parent)


def _checksum(profile: Message) -> int:
    return checksum([profile.SerializeToString(deterministic=True)])
