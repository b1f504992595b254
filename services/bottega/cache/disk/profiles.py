"""Profiles: which similarity allows skipping how many steps of a model. Each is a file in the store's folder.

    profiles/<model hash>.json    {"checksum": ..., "profile": a CacheProfile}

A damaged file is ignored, and nothing is reused for its model. Any thread may call this module.
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
# More models than a fleet serves in years.
_MOST = 10_000

_log = logging.getLogger(__name__)


class ProfileFolder:
    """A folder of profiles. Calls that change something wait for the disk and raise StorageUnavailable.

    Args:
        folder: Created if it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._profiles: Mapping[str, CacheProfile] = MappingProxyType({})
        self._read: Mapping[str, Mapping[int, SkipProfile]] = MappingProxyType({})
        self._changing = threading.Lock()

    def open(self) -> None:
        """Read the profiles in the folder."""
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
        """Return the profiles of all models, sorted by hash."""
        return [self._profiles[model] for model in sorted(self._profiles)]

    def has(self, model_hash: str) -> bool:
        """Return whether there is a profile of the model."""
        return model_hash in self._profiles

    def skip_profile(self, model_hash: str, fidelity: Fidelity.ValueType, *, width: int) -> SkipProfile | None:
        """Return the model's profile; None forbids reuse.

        Args:
            width: Width of the embeddings, which selects the fallback of an unmeasured model.
        """
        measured = self._read.get(model_hash)
        return measured.get(fidelity) if measured is not None else fallback_profile(width)

    def set(self, profile: CacheProfile) -> CacheProfile:
        """Replace the model's profile; one without classes removes it. Raises ValueError."""
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
    """Return the classes of one fidelity. Raises ValueError."""
    return SkipProfile(
        classes=tuple(
            LengthClass(
                max_words=length_class.max_words or math.inf,
                thresholds={threshold.fraction: threshold.similarity for threshold in length_class.thresholds},
            )
            for length_class in classes
        )
    )


def _by_fidelity(profile: CacheProfile) -> Mapping[int, SkipProfile]:
    """Return the profile by fidelity. FAST without classes of its own uses those of BALANCED, which are stricter."""
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
    """Return the profile in a file. Raises DataLoss if it is damaged, and StorageUnavailable."""
    with os_errors.translated(), path.open("rb") as file:
        text = file.read(_MAX_FILE_BYTES + 1)
    try:
        fields = json.loads(text)
        profile = json_format.ParseDict(fields["profile"], CacheProfile())
        sound = fields["checksum"] == _checksum(profile) and profile.model_hash == path.stem
        _check(profile)
    except (ValueError, KeyError, TypeError, RecursionError, json_format.ParseError):
        sound = False
    if not sound:
        raise DataLoss(f"the profile {path.name} is damaged")
    return profile


def _write_file(path: Path, profile: CacheProfile) -> None:
    fields = {"checksum": _checksum(profile), "profile": json_format.MessageToDict(profile)}
    partial = path.with_suffix(".partial")
    with os_errors.translated():
        folders.make(path.parent)
        with partial.open("w", encoding="utf-8") as file:
            json.dump(fields, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        folders.sync(path.parent)


def _checksum(profile: CacheProfile) -> int:
    return checksum([profile.SerializeToString(deterministic=True)])
