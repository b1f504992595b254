"""Whether rows of six pictures of one prompt stay as various as from noise, with the embedded model and a store."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import json_format

from bottega.miniature.scenes import read_caption
from bottega.v1.cache_pb2 import CacheProfile
from load.bench.cache_diversity import (
    PROFILE,
    ROW,
    WANTED_GAP,
    measure_diversity,
    open_prompts,
    profile_to,
    settings,
    warm,
)
from load.bench.cache_engine import cached_engine
from tests.support.torch_threads import torch_threads

PROMPTS, ENTRIES = 10, 40


def test_prompts_that_leave_things_open_differ_and_say_no_whole_scene() -> None:
    prompts = open_prompts(24)
    assert len(set(prompts)) == 24
    assert not any(read_caption(prompt) for prompt in prompts)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("fraction", [None, 0.5], ids=["as the profile allows", "up to half of the steps"])
def test_rows_of_six_pictures_are_no_more_alike_than_from_noise(tmp_path: Path, fraction: float | None) -> None:
    measured = json_format.Parse(PROFILE.read_text(encoding="utf-8"), CacheProfile())
    with torch_threads(1), cached_engine(tmp_path, settings(tmp_path, row_pictures=ROW)) as engine:
        engine.store.set_profile(measured if fraction is None else profile_to(fraction, measured))
        warm(engine, ENTRIES)
        diversity = measure_diversity(engine, open_prompts(PROMPTS))
    for rows in (diversity.one, diversity.several):
        assert diversity.gap(rows)[0] <= WANTED_GAP
        assert sum(row.started for row in rows) >= 0.8 * PROMPTS * ROW
