"""The embedded model's profile of cached starts is of its weights, and one that a cache takes."""

from __future__ import annotations

from google.protobuf import json_format

from bottega.addons.cache.skip_profile import LengthClass, SkipProfile, skip_steps
from bottega.addons.cache.starts import FRACTIONS
from bottega.miniature import WEIGHTS
from bottega.model_files.digest import model_digest
from bottega.model_files.folder_check import check_model_folder
from bottega.v1.cache_pb2 import CacheProfile


def test_it_was_measured_with_these_weights_and_allows_more_under_fast() -> None:
    said = json_format.Parse((WEIGHTS / "cache_profile.json").read_text(encoding="utf-8"), CacheProfile())

    assert said.model_hash == model_digest(check_model_folder(WEIGHTS)), (
        "bottega cache profile --output measures it again"
    )
    assert "pairs of prompts" in said.about
    balanced, fast = (
        SkipProfile(
            classes=tuple(
                LengthClass(
                    max_words=each.max_words or float("inf"),
                    thresholds={threshold.fraction: threshold.similarity for threshold in each.thresholds},
                )
                for each in classes
            )
        )
        for classes in (said.balanced, said.fast)
    )
    for words in (0, 1, 4, 10, 18, 100):  # no pair of so few or so many words was measured
        assert skip_steps(fast, similarity=1.0, words=words, steps=30) == ()
        assert skip_steps(balanced, similarity=1.0, words=words, steps=30) == ()
    for words in (11, 15, 17):
        skipped = max(skip_steps(balanced, similarity=1.0, words=words, steps=30))
        assert 0 < skipped <= max(skip_steps(fast, similarity=1.0, words=words, steps=30))
        assert skipped / 30 in FRACTIONS
