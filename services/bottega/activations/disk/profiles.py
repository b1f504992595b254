"""Profiles: what the blocks of a model take, as it was measured. One file for each, in the store's folder.

    profiles/<SHA-256 of model, element type and size>.json    {"checksum": ..., "profile": a BlockProfile}

A file that is damaged is no profile. Any thread may call it.
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
# As many models and sizes as a fleet may serve in years.
_MOST = 1000

_log = logging.getLogger(__name__)

ProfileKey = tuple[str, str, int, int]
"""Model's hash, element type, width and height."""


def profile_key(profile: BlockProfile) -> ProfileKey:
    """What a profile is of."""
    return profile.model_hash, profile.dtype, profile.width, profile.height


class BlockProfileFolder:
    """folder: made where there is none. Its calls that change something wait for the disk, raise StorageUnavailable."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._profiles: Mapping[ProfileKey, BlockProfile] = MappingProxyType({})
        self._changing = threading.Lock()

    def open(self) -> None:
        """Reads what is there."""
        with os_errors.translated():
            paths = sorted(self._folder.glob("*.json"))
        found = {}
        for path in paths[:_MOST]:
            try:
                profile = _read_file(path)
            except (DataLoss, StorageUnavailable) as error:
                facts = {"file": str(path), "text": error.message}
                _log.error("a profile of blocks cannot be read; bottega templates profile makes it again", extra=facts)
            else:
                found[profile_key(profile)] = profile
        self._profiles = MappingProxyType(found)

    def all(self) -> list[BlockProfile]:
        """All, by model, element type and size."""
        return [self._profiles[key] for key in sorted(self._profiles)]

    def get(self, key: ProfileKey) -> BlockProfile | None:
        """That of a model at a size; None where it was not measured."""
        return self._profiles.get(key)

    def set(self, profile: BlockProfile) -> None:
        """Keeps it in place of the other one; without blocks that is forgotten. Raises ValueError."""
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
                raise ValueError(f"there are {_MOST} profiles, as many as there may be")
            copy = BlockProfile()
            copy.CopyFrom(profile)
            kept[key] = copy
            _write_file(path, copy)
        self._profiles = MappingProxyType(kept)


def check_profile(profile: BlockProfile) -> None:
    """Raises ValueError for what is none; one without blocks says which one is to be forgotten."""
    if not _MODEL_HASH.fullmatch(profile.model_hash):
        raise ValueError("model_hash: a profile is of a model, by its hash in hex")
    if not (profile.dtype.isprintable() and 0 < len(profile.dtype) <= _MAX_DTYPE):
        raise ValueError(f"dtype: has 1 to {_MAX_DTYPE} characters")
    if not (1 <= profile.width <= _MAX_SIDE and 1 <= profile.height <= _MAX_SIDE):
        raise ValueError(f"width: a picture has 1 to {_MAX_SIDE} pixels a side")
    if len(profile.about) > _MAX_ABOUT:
        raise ValueError(f"about: has at most {_MAX_ABOUT} characters")
    if len(profile.blocks) > _MAX_BLOCKS:
        raise ValueError(f"blocks: are at most {_MAX_BLOCKS}")
    shares = list(profile.shares)
    if len(shares) > _MAX_SHARES or shares != sorted(set(shares)) or not all(0 < share <= 1 for share in shares):
        raise ValueError(f"shares: are at most {_MAX_SHARES}, ascending, above 0 and at most 1")
    if not _is_time(profile.forward_s):
        raise ValueError("forward_s: is a number of seconds")
    _check_blocks(profile)


def _check_blocks(profile: BlockProfile) -> None:
    if len({block.name for block in profile.blocks}) < len(profile.blocks):
        raise ValueError("blocks: two have the same name")
    for place, block in enumerate(profile.blocks):
        if not (0 < len(block.name) <= _MAX_NAME and block.name.isprintable()):
            raise ValueError(f"blocks[{place}].name: has 1 to {_MAX_NAME} printable characters")
        if block.size_bytes < 0 or not _is_time(block.full_s):
            raise ValueError(f"blocks[{place}]: has bytes and seconds that are not negative")
        if len(block.masked_s) != len(profile.shares) or not all(map(_is_time, block.masked_s)):
            raise ValueError(f"blocks[{place}].masked_s: has a number of seconds for each of the shares")


def _is_time(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds >= 0.0


def _name(profile: BlockProfile) -> str:
    return hashlib.sha256(json.dumps(profile_key(profile)).encode()).hexdigest()


def _read_file(path: Path) -> BlockProfile:
    """Raises DataLoss for what is not as it was written, StorageUnavailable."""
    with os_errors.translated(), path.open("rb") as file:
        text = file.read(_MAX_FILE_BYTES + 1)
    try:
        said = json.loads(text)
        profile = json_format.ParseDict(said["profile"], BlockProfile())
        sound = said["checksum"] == _checksum(profile) and _name(profile) == path.stem
        check_profile(profile)
    except (ValueError, KeyError, TypeError, RecursionError, json_format.ParseError):
        sound = False
    if not sound:
        raise DataLoss(f"the profile {path.name} is damaged")
    return profile


def _write_file(path: Path, profile: BlockProfile) -> None:
    said = {"checksum": _checksum(profile), "profile": json_format.MessageToDict(profile)}
    partial = path.with_suffix(".partial")
    with os_errors.translated():
        folders.make(path.parent)
        with partial.open("w", encoding="utf-8") as file:
            json.dump(said, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        folders.sync(path.parent)


def _checksum(profile: BlockProfile) -> int:
    return checksum([profile.SerializeToString(deterministic=True)])
