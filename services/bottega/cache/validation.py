"""Validation of CacheService's requests: it reports all violations at once, with their fields."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from bottega import rules
from bottega.errors import Violation
from bottega.latents import ENTRY_PATTERN
from bottega.latents.names import FRACTIONS
from bottega.v1.cache_pb2 import CacheLengthClass, CacheProfile, CacheThreshold

MAX_ENTRIES = 500
"""Maximum number of entries in one list."""

MAX_ABOUT_CHARACTERS = 1000
_HASH = re.compile(r"[0-9a-f]{1,128}")
_HASHES = "1 to 128 hex digits"
_MAX_CLASSES = 16
# Words of a prompt, whose texts have 16 KiB at most.
_MAX_WORDS = rules.MAX_PROMPT_BYTES
# Tenths are not exact in binary, and clients may compute neighbouring values.
_CLOSE = 1e-9


def check_entry(entry: str) -> Iterator[Violation]:
    """Yield the violations of an entry's name, without a step."""
    if ENTRY_PATTERN.fullmatch(entry) is None:
        yield Violation(field="entry", description="must be 32 hex digits, with @ and a step behind them or without")


def check_model_hash(model_hash: str) -> Iterator[Violation]:
    """Yield the violations of a model hash, where "" means all models."""
    if model_hash and _HASH.fullmatch(model_hash) is None:
        yield Violation(field="model_hash", description=f"must be {_HASHES}, or empty for all models")


def check_limit(limit: int) -> Iterator[Violation]:
    """Yield the violations of a list's limit; 0 means the contract's default."""
    if not 0 <= limit <= MAX_ENTRIES:
        yield Violation(field="limit", description=f"must be 0 to {MAX_ENTRIES}")


def check_profile(profile: CacheProfile) -> Iterator[Violation]:
    """Yield the violations of a profile."""
    if _HASH.fullmatch(profile.model_hash) is None:
        yield Violation(field="profile.model_hash", description=f"must be {_HASHES}")
    if len(profile.about) > MAX_ABOUT_CHARACTERS:
        yield Violation(field="profile.about", description=f"must be at most {MAX_ABOUT_CHARACTERS} characters")
    yield from _check_classes("profile.balanced", profile.balanced)
    yield from _check_classes("profile.fast", profile.fast)


def _check_classes(path: str, classes: Sequence[CacheLengthClass]) -> Iterator[Violation]:
    if len(classes) > _MAX_CLASSES:
        yield Violation(field=path, description=f"must be at most {_MAX_CLASSES}")
        return
    before = 0
    for index, each in enumerate(classes):
        unbounded = each.max_words == 0 and index == len(classes) - 1
        if not (unbounded or before < each.max_words <= _MAX_WORDS):
            rule = f"must be ascending, at most {_MAX_WORDS}; only the last one may be 0, which means no bound"
            yield Violation(field=f"{path}[{index}].max_words", description=rule)
        before = each.max_words
        yield from _check_thresholds(f"{path}[{index}].thresholds", each.thresholds)


def _check_thresholds(path: str, thresholds: Sequence[CacheThreshold]) -> Iterator[Violation]:
    if len(thresholds) > len(FRACTIONS):
        yield Violation(field=path, description=f"must be at most {len(FRACTIONS)}, one for each fraction")
        return
    before = 0.0
    for index, each in enumerate(thresholds):
        known = any(abs(each.fraction - fraction) < _CLOSE for fraction in FRACTIONS)
        if not (known and each.fraction > before + _CLOSE):
            rule = f"must be one of {', '.join(map(str, FRACTIONS))}, ascending"
            yield Violation(field=f"{path}[{index}].fraction", description=rule)
        before = each.fraction
        if not rules.is_cosine(each.similarity):
            yield Violation(field=f"{path}[{index}].similarity", description="must be a cosine, -1 to 1")
