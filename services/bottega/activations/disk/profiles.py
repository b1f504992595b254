"""Measured block costs of models, one file each in the store's folder.

    profiles/<SHA-256 of model, dtype and size>.json    {"checksum": ..., "profile": a BlockProfile}

Damaged files are ignored. All calls are thread-safe.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from google.protobuf import json_format

from bottega.errors import DataLoss, StorageUnavailable
from bottega.storage import folders, os_errors
from bottega.storage.checksums import checksum
from bottega.v1.activations_pb2 import BlockProfile

_MODEL_HASH = re.compile(r"[0-9a-f]{1,128}")
_MAX_DTYPE = 32
_MAX_NAME = 200
_MAX_ABOUT = 1000
_MAX_SHARES = 8
_MAX_BLOCKS = 4096
_MAX_SIDE = 1 << 14
_MAX_FILE_BYTES = 8 << 20
# More models and sizes than a fleet serves in years.
_MOST = 1000

_log = logging.getLogger(__name__)

ProfileKey = tuple[str, str, int, int]
"""Model hash, dtype, width and height."""


def profile_key(profile: BlockProfile) -> ProfileKey:
    """Return the key of a profile."""
    return profile.model_hash, profile.dtype, profile.width, profile.height


class BlockProfileFolder:
    """The profiles in a folder, which is created if missing. Changes block on the disk and raise StorageUnavailable."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._profiles: Mapping[ProfileKey, BlockProfile] = MappingProxyType({})
        self._changing = threading.Lock()

    def open(self) -> None:
        """Read all files."""
        with os_errors.translated():
            paths = sorted(self._folder.glob("*.json"))
        found = {}
        for path in paths[:_MOST]:
            try:
                profile = _read_file(path)
            except (DataLoss, StorageUnavailable) as error:
                facts = {"file": str(path), "text": error.message}
                _log.error(
                    "a block profile cannot be read; measure it again with `bottega templates profile`", extra=facts
                )
            else:
                found[profile_key(profile)] = profile
        self._profiles = MappingProxyType(found)

    def all(self) -> list[BlockProfile]:
        """Return all profiles, sorted by key."""
        return [self._profiles[key] for key in sorted(self._profiles)]

    def get(self, key: ProfileKey) -> BlockProfile | None:
        """Return a profile, or None."""
        return self._profiles.get(key)

    def set(self, profile: BlockProfile) -> None:
        """Set a profile; one without blocks deletes the existing one. Raise ValueError if it is invalid."""
        check_profile(profile)
        with self._changing:
            self._set(profile)

    def _set(self, profile: BlockProfile) -> None:
        key, path = profile_key(profile), self._folder / f"{_name(profile)}.json"
        kept = dict(self._profiles)
        if not profile.blocks:
            kept.pop(key, None)
            with os_errors.translated():
                path.unlink(missing_ok=True)
        else:
            if key not in kept and len(kept) >= _MOST:
                raise ValueError(f"there are already {_MOST} profiles, which is the maximum")
            copy = BlockProfile()
            copy.CopyFrom(profile)
            kept[key] = copy
            _write_file(path, copy)
        self._profiles = MappingProxyType(kept)


def check_profile(profile: BlockProfile) -> None:
    """Raise ValueError if a profile is invalid. One without blocks is valid; it names a profile to delete."""
    if not _MODEL_HASH.fullmatch(profile.model_hash):
        raise ValueError("model_hash: must be 1 to 128 hex digits")
    if not (profile.dtype.isprintable() and 0 < len(profile.dtype) <= _MAX_DTYPE):
        raise ValueError(f"dtype: must be 1 to {_MAX_DTYPE} characters")
    if not (1 <= profile.width <= _MAX_SIDE and 1 <= profile.height <= _MAX_SIDE):
        raise ValueError(f"width, height: must be 1 to {_MAX_SIDE}")
    if len(profile.about) > _MAX_ABOUT:
        raise ValueError(f"about: must be at most {_MAX_ABOUT} characters")
    if len(profile.blocks) > _MAX_BLOCKS:
        raise ValueError(f"blocks: must be at most {_MAX_BLOCKS}")
    shares = list(profile.shares)
    if len(shares) > _MAX_SHARES or shares != sorted(set(shares)) or not all(0 < share <= 1 for share in shares):
        raise ValueError(f"shares: must be at most {_MAX_SHARES}, ascending, above 0 and at most 1")
    if not _is_time(profile.forward_s):
        raise ValueError("forward_s: must be finite and not negative")
    _check_blocks(profile)


def _check_blocks(profile: BlockProfile) -> None:
    if len({block.name for block in profile.blocks}) < len(profile.blocks):
        raise ValueError("blocks: names must be unique")
    for place, block in enumerate(profile.blocks):
        if not (0 < len(block.name) <= _MAX_NAME and block.name.isprintable()):
            raise ValueError(f"blocks[{place}].name: must be 1 to {_MAX_NAME} printable characters")
        if block.size_bytes < 0 or not _is_time(block.full_s):
            raise ValueError(f"blocks[{place}]: size_bytes and full_s must not be negative")
        if len(block.masked_s) != len(profile.shares) or not all(map(_is_time, block.masked_s)):
            raise ValueError(f"blocks[{place}].masked_s: must have one number of seconds for each share")


def _is_time(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds >= 0.0


def _name(profile: BlockProfile) -> str:
    return hashlib.sha256(json.dumps(profile_key(profile)).encode()).hexdigest()


def _read_file(path: Path) -> BlockProfile:
    """Read a profile. Raise DataLoss if the file is damaged, or StorageUnavailable."""
    with os_errors.translated(), path.open("rb") as file:
        text = file.read(_MAX_FILE_BYTES + 1)
    try:
        content = json.loads(text)
        profile = json_format.ParseDict(content["profile"], BlockProfile())
        sound = content["checksum"] == _checksum(profile) and _name(profile) == path.stem
        check_profile(profile)
    except (ValueError, KeyError, TypeError, RecursionError, json_format.ParseError):
        sound = False
    if not sound:
        raise DataLoss(f"the profile {path.name} is damaged")
    return profile


def _write_file(path: Path, profile: BlockProfile) -> None:
    content = {"checksum": _checksum(profile), "profile": json_format.MessageToDict(profile)}
    partial = path.with_suffix(".partial")
    with os_errors.translated():
        folders.make(path.parent)
        with partial.open("w", encoding="utf-8") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        folders.sync(path.parent)


def _checksum(profile: BlockProfile) -> int:
    return checksum([profile.SerializeToString(deterministic=True)])
