"""Profiles: which similarity is enough to skip how many steps of a model. One file for each, in the store's folder.

    profiles/<model hash>.json    {"checksum": ..., "profile": a CacheProfile}

A file that is damaged is no profile, and nothing is reused for its model. Any thread may call it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from google.protobuf import json_format

from bottega.errors import DataLoss, StorageUnavailable
from bottega.planning.skip_profile import LengthClass, SkipProfile, fallback_profile
from bottega.storage import folders, os_errors
from bottega.storage.checksums import checksum
from bottega.v1 import generation_pb2
from bottega.v1.cache_pb2 import CacheLengthClass, CacheProfile
from bottega.v1.generation_pb2 import Fidelity

_MODEL_HASH = re.compile(r"[0-9a-f]{1,128}")
_MAX_ABOUT = 1000
_MAX_CLASSES = 16
_MAX_FILE_BYTES = 64 << 10
# As many models as a fleet may serve in years.
_MOST = 10_000

_log = logging.getLogger(__name__)


class ProfileFolder:
    """folder: made where there is none. Its calls that change something wait for the disk, raise StorageUnavailable."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._profiles: Mapping[str, CacheProfile] = MappingProxyType({})
        self._read: Mapping[str, Mapping[int, SkipProfile]] = MappingProxyType({})
        self._changing = threading.Lock()

    def open(self) -> None:
        """Reads what is there."""
        with os_errors.translated():
            paths = sorted(self._folder.glob("*.json"))
        found = {}
        for path in paths[:_MOST]:
            try:
                found[path.stem] = _read_file(path)
            except (DataLoss, StorageUnavailable) as error:
                facts = {"file": str(path), "text": error.message}
                _log.error("a profile of the cache cannot be read; bottega cache profile makes it again", extra=facts)
        self._keep(found)

    def all(self) -> list[CacheProfile]:
        """One for each model that has one, by hash."""
        return [self._profiles[model] for model in sorted(self._profiles)]

    def has(self, model_hash: str) -> bool:
        """Whether the model was measured."""
        return model_hash in self._profiles

    def skip_profile(self, model_hash: str, fidelity: Fidelity.ValueType, *, width: int) -> SkipProfile | None:
        """What counts for the model; None: nothing is reused. width: of its embeddings, for the fallback."""
        measured = self._read.get(model_hash)
        return measured.get(fidelity) if measured is not None else fallback_profile(width)

    def set(self, profile: CacheProfile) -> CacheProfile:
        """Keeps it in place of the model's other one; without classes that is forgotten. Raises ValueError."""
        _check(profile)
        with self._changing:
            self._set(profile)
        return profile

    def _set(self, profile: CacheProfile) -> None:
        path = self._folder / f"{profile.model_hash}.json"
        kept = dict(self._profiles)
        if not (profile.balanced or profile.fast):
            kept.pop(profile.model_hash, None)
            with os_errors.translated():
                path.unlink(missing_ok=True)
        else:
            if profile.model_hash not in kept and len(kept) >= _MOST:
                raise ValueError(f"there are profiles of {_MOST} models, as many as there may be")
            kept[profile.model_hash] = profile
            _write_file(path, profile)
        self._keep(kept)

    def _keep(self, profiles: Mapping[str, CacheProfile]) -> None:
        self._read = MappingProxyType({model: _by_fidelity(profile) for model, profile in profiles.items()})
        self._profiles = MappingProxyType(dict(profiles))


def to_skip_profile(classes: Iterable[CacheLengthClass]) -> SkipProfile:
    """The classes of one fidelity. Raises ValueError."""
    return SkipProfile(
        classes=tuple(
            LengthClass(
                max_words=each.max_words or math.inf,
                thresholds={threshold.fraction: threshold.similarity for threshold in each.thresholds},
            )
            for each in classes
        )
    )


def _by_fidelity(profile: CacheProfile) -> Mapping[int, SkipProfile]:
    """FAST without classes of its own has those of BALANCED, which are stricter."""
    return {
        generation_pb2.FIDELITY_BALANCED: to_skip_profile(profile.balanced),
        generation_pb2.FIDELITY_FAST: to_skip_profile(profile.fast or profile.balanced),
    }


def _check(profile: CacheProfile) -> None:
    if not _MODEL_HASH.fullmatch(profile.model_hash):
        raise ValueError("model_hash: a profile is of a model, by its hash in hex")
    if len(profile.about) > _MAX_ABOUT:
        raise ValueError(f"about: has at most {_MAX_ABOUT} characters")
    for name, classes in (("balanced", profile.balanced), ("fast", profile.fast)):
        if len(classes) > _MAX_CLASSES:
            raise ValueError(f"{name}: has at most {_MAX_CLASSES} classes")
        try:
            to_skip_profile(classes)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


def _read_file(path: Path) -> CacheProfile:
    """Raises DataLoss for what is not as it was written, StorageUnavailable."""
    with os_errors.translated(), path.open("rb") as file:
        text = file.read(_MAX_FILE_BYTES + 1)
    try:
        said = json.loads(text)
        profile = json_format.ParseDict(said["profile"], CacheProfile())
        sound = said["checksum"] == _checksum(profile) and profile.model_hash == path.stem
        _check(profile)
    except (ValueError, KeyError, TypeError, RecursionError, json_format.ParseError):
        sound = False
    if not sound:
        raise DataLoss(f"the profile {path.name} is damaged")
    return profile


def _write_file(path: Path, profile: CacheProfile) -> None:
    said = {"checksum": _checksum(profile), "profile": json_format.MessageToDict(profile)}
    partial = path.with_suffix(".partial")
    with os_errors.translated():
        folders.make(path.parent)
        with partial.open("w", encoding="utf-8") as file:
            json.dump(said, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        folders.sync(path.parent)


def _checksum(profile: CacheProfile) -> int:
    return checksum([profile.SerializeToString(deterministic=True)])
