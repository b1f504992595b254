"""Profiles in their folder: what is taken, what counts for whom, and that damage makes them none."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from bottega.cache.profiles import CacheProfiles
from bottega.v1 import generation_pb2
from bottega.v1.cache_pb2 import CacheLengthClass, CacheProfile, CacheThreshold
from tests.support.cached_latents import MODEL, profile

_BALANCED = generation_pb2.FIDELITY_BALANCED
_FAST = generation_pb2.FIDELITY_FAST


def _profile(*classes: CacheLengthClass, **fields: Any) -> CacheProfile:
    return CacheProfile(**{"model_hash": MODEL, **fields}, balanced=classes)


def _class(*thresholds: tuple[float, float], words: int = 0) -> CacheLengthClass:
    found = [CacheThreshold(fraction=fraction, similarity=similarity) for fraction, similarity in thresholds]
    return CacheLengthClass(max_words=words, thresholds=found)


def test_a_profile_counts_by_fidelity_and_length(tmp_path: Path) -> None:
    folder = CacheProfiles(tmp_path / "profiles")
    folder.open()
    folder.set(profile())
    balanced = folder.skip_profile(MODEL, _BALANCED, width=64)
    assert balanced is not None
    assert [each.max_words for each in balanced.classes] == [15, math.inf]
    assert balanced.thresholds(15)[0.1] == 0.65
    fast = folder.skip_profile(MODEL, _FAST, width=64)
    assert fast is not None
    assert fast.thresholds(100)[0.5] == pytest.approx(0.85)
    assert folder.skip_profile("00", _BALANCED, width=64) is None
    assert folder.skip_profile("00", _BALANCED, width=768) is not None


def test_a_measured_model_has_no_fallback(tmp_path: Path) -> None:
    folder = CacheProfiles(tmp_path)
    folder.set(_profile(_class(words=15)))  # nothing was good enough
    found = folder.skip_profile(MODEL, _BALANCED, width=768)
    assert found is not None
    assert not found.thresholds(5)


def test_fast_without_classes_has_those_of_balanced(tmp_path: Path) -> None:
    folder = CacheProfiles(tmp_path)
    folder.set(_profile(_class((0.1, 0.7))))
    assert folder.skip_profile(MODEL, _FAST, width=64) == folder.skip_profile(MODEL, _BALANCED, width=64)


def test_profiles_are_read_again(tmp_path: Path) -> None:
    CacheProfiles(tmp_path).set(profile())
    folder = CacheProfiles(tmp_path)
    folder.open()
    assert folder.all() == [profile()]


def test_a_longer_skip_at_less_similarity_is_refused(tmp_path: Path) -> None:
    """What else is no profile is in tests/fuzz/cache.py."""
    folder = CacheProfiles(tmp_path)
    with pytest.raises(ValueError, match=r"balanced.*longer skip"):
        folder.set(_profile(_class((0.1, 0.7), (0.2, 0.6))))
    assert folder.all() == []
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_no_profile(tmp_path: Path) -> None:
    CacheProfiles(tmp_path).set(profile())
    (file,) = tmp_path.iterdir()
    data = file.read_bytes()
    step = max(1, len(data) // 100)
    for place in range(0, len(data), step):
        file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        folder = CacheProfiles(tmp_path)
        folder.open()
        assert folder.all() in ([], [profile()])  # a bit of a space tells nothing
    file.rename(tmp_path / "ff.json")
    folder = CacheProfiles(tmp_path)
    folder.open()
    assert folder.all() == []
