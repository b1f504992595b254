"""Measured profiles of models: how many steps may be skipped at a given similarity of two prompts."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from google.protobuf import json_format
from google.protobuf.message import DecodeError

from bottega import rules
from bottega.addons.cache.skip_profile import LengthClass, SkipProfile, fallback_profile
from bottega.addons.cache.starts import FRACTIONS
from bottega.blobstore.profiles import ProfileFolder
from bottega.cache.config import CacheConfig
from bottega.errors import ConfigError, InvalidRequest, Violation
from bottega.v1 import generation_pb2
from bottega.v1.cache_pb2 import CacheLengthClass, CacheProfile, CacheThreshold
from bottega.v1.generation_pb2 import Fidelity

_log = logging.getLogger(__name__)

MAX_ABOUT_CHARACTERS = 1000

_MODEL_HASH = re.compile(r"[0-9a-f]{1,128}")
_MAX_CLASSES = 16
# Upper bound on the words of a prompt, whose text has at most 16 KiB.
_MAX_WORDS = rules.MAX_PROMPT_BYTES
# Tolerance: tenths are not exact in binary, and clients may compute neighbouring values.
_CLOSE = 1e-9
_MAX_FILE_BYTES = 64 << 10


class CacheProfiles(ProfileFolder[CacheProfile]):
    """The profiles of all models of a store, in a folder."""

    def __init__(self, folder: Path) -> None:
        self._by_fidelity: Mapping[str, Mapping[int, SkipProfile]] = MappingProxyType({})
        super().__init__(
            folder,
            CacheProfile,
            key=lambda profile: profile.model_hash,
            check=check_profile,
            is_empty=lambda profile: not (profile.balanced or profile.fast),
            remedy="measure it again with bottega cache profile",
            max_file_bytes=_MAX_FILE_BYTES,
        )

    def has(self, model_hash: str) -> bool:
        """Return whether the model has a profile."""
        return self.get(model_hash) is not None

    def serialized(self) -> dict[str, bytes]:
        """Return all profiles as bytes, by model hash."""
        return {profile.model_hash: profile.SerializeToString(deterministic=True) for profile in self.all()}

    def take_over(self, profiles: Mapping[str, bytes]) -> None:
        """Set the profiles that other caches have. Skip those that this version cannot read. Raise StorageUnavailable.

        Args:
            profiles: As of `serialized`; an empty profile deletes that of its model.
        """
        own = self.serialized()
        for model_hash, data in profiles.items():
            if own.get(model_hash) != data:
                try:
                    profile = CacheProfile.FromString(data)
                    if model_hash in own or profile.balanced or profile.fast:
                        self.set(profile)
                except (DecodeError, ValueError) as error:
                    facts = {"model_hash": model_hash, "text": str(error)}
                    _log.warning("a profile of another cache cannot be used", extra=facts)

    def skip_profile(self, model_hash: str, fidelity: Fidelity.ValueType, *, width: int) -> SkipProfile | None:
        """Return the skip profile of a model for a fidelity; None means that nothing may be reused.

        Args:
            width: Width of the embeddings. It selects default thresholds for models without a profile.
        """
        measured = self._by_fidelity.get(model_hash)
        return measured.get(fidelity) if measured is not None else fallback_profile(width)

    def _keep(self, profiles: Mapping[str, CacheProfile]) -> None:
        self._by_fidelity = MappingProxyType({model: _by_fidelity(profile) for model, profile in profiles.items()})
        super()._keep(profiles)


def check_configured(config: CacheConfig) -> list[CacheProfile]:
    """Check what the configuration says together, and return the profiles that it names. Raises ConfigError."""
    if config.database and config.index.device != "cpu":
        raise ConfigError("index.device is for embeddings in memory: remove it, or database")
    if config.objects and not config.database:
        raise ConfigError("objects: the records of shared entries are in PostgreSQL; set database: postgresql://...")
    if config.objects and not config.name:
        raise ConfigError("objects: caches that share entries tell each other by name; set name")
    return [read_profile(Path(path)) for path in config.profiles]


def read_profile(path: Path) -> CacheProfile:
    """Read the profile in a file. Raises ConfigError."""
    try:
        profile = json_format.Parse(path.read_text(encoding="utf-8"), CacheProfile())
        rules.refuse(list(check_profile(profile)))
    except OSError as error:
        raise ConfigError(f"profiles: {path} cannot be read: {error.strerror}") from None
    except (json_format.ParseError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"profiles: {path} is not a valid CacheProfile: {error}") from None
    except InvalidRequest as error:
        raise ConfigError(f"profiles: {path} cannot be used: {error.message}") from None
    return profile


def check_profile(profile: CacheProfile) -> Iterator[Violation]:
    """Yield the violations of a profile."""
    if _MODEL_HASH.fullmatch(profile.model_hash) is None:
        yield Violation(field="profile.model_hash", description="must be 1 to 128 hex digits")
    if len(profile.about) > MAX_ABOUT_CHARACTERS:
        yield Violation(field="profile.about", description=f"must be at most {MAX_ABOUT_CHARACTERS} characters")
    for path, classes in (("profile.balanced", profile.balanced), ("profile.fast", profile.fast)):
        violations = list(_check_classes(path, classes))
        yield from violations
        if not violations:
            try:
                _skip_profile(classes)
            except ValueError as error:
                yield Violation(field=path, description=str(error))


def _check_classes(path: str, classes: Sequence[CacheLengthClass]) -> Iterator[Violation]:
    if len(classes) > _MAX_CLASSES:
        yield Violation(field=path, description=f"must have at most {_MAX_CLASSES} entries")
        return
    before = 0
    for index, length_class in enumerate(classes):
        unbounded = length_class.max_words == 0 and index == len(classes) - 1
        if not (unbounded or before < length_class.max_words <= _MAX_WORDS):
            rule = f"must be ascending and at most {_MAX_WORDS}; only the last one may be 0 (no bound)"
            yield Violation(field=f"{path}[{index}].max_words", description=rule)
        before = length_class.max_words
        yield from _check_thresholds(f"{path}[{index}].thresholds", length_class.thresholds)


def _check_thresholds(path: str, thresholds: Sequence[CacheThreshold]) -> Iterator[Violation]:
    if len(thresholds) > len(FRACTIONS):
        yield Violation(field=path, description=f"must have at most {len(FRACTIONS)} entries, one for each fraction")
        return
    before = 0.0
    for index, threshold in enumerate(thresholds):
        if not (_known_fraction(threshold.fraction) and threshold.fraction > before + _CLOSE):
            rule = f"must be ascending, each one of {', '.join(map(str, FRACTIONS))}"
            yield Violation(field=f"{path}[{index}].fraction", description=rule)
        before = threshold.fraction
        if not rules.is_cosine(threshold.similarity):
            yield Violation(field=f"{path}[{index}].similarity", description="must be a cosine from -1 to 1")


def _known_fraction(fraction: float) -> float | None:
    """Return the member of FRACTIONS that a rounded number stands for, or None."""
    return next((known for known in FRACTIONS if abs(fraction - known) < _CLOSE), None)


def _by_fidelity(profile: CacheProfile) -> Mapping[int, SkipProfile]:
    """Return skip profiles by fidelity. FAST without classes of its own uses the stricter ones of BALANCED."""
    return {
        generation_pb2.FIDELITY_BALANCED: _skip_profile(profile.balanced),
        generation_pb2.FIDELITY_FAST: _skip_profile(profile.fast or profile.balanced),
    }


def _skip_profile(classes: Iterable[CacheLengthClass]) -> SkipProfile:
    """Convert the classes of one fidelity. Raise ValueError if longer skips need less similarity than shorter ones."""
    return SkipProfile(
        classes=tuple(
            LengthClass(
                max_words=length_class.max_words or math.inf,
                thresholds={
                    _known_fraction(threshold.fraction) or threshold.fraction: threshold.similarity
                    for threshold in length_class.thresholds
                },
            )
            for length_class in classes
        )
    )
