"""What a ControlNet server remembers of what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from bottega import rules
from bottega.controlnet.profiles import ProfileStore
from bottega.errors import ConfigError, StorageUnavailable
from bottega.v1.controlnet_pb2 import ResidualProfile


def profile(model_hash: str = "m", similarity: float = 0.995) -> ResidualProfile:
    return ResidualProfile(model_hash=model_hash, num_inference_steps=20, similarity=similarity)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state" / "controlnets.profiles.json"


def test_a_profile_is_there_after_a_restart_and_a_newer_one_takes_its_place(file: Path) -> None:
    first = ProfileStore(file)
    first.set("ab", profile("m", 0.9))
    first.set("ab", profile("n", 0.98))
    first.set("ab", profile("m", 0.995))
    first.set("cd", profile("m", 1.0))
    again = ProfileStore(file)
    assert list(again.of("ab")) == [profile("n", 0.98), profile("m", 0.995)]
    assert list(again.of("cd")) == [profile("m", 1.0)]
    assert list(again.of("ef")) == []


def test_of_very_many_base_models_the_first_are_forgotten(file: Path) -> None:
    profiles = ProfileStore(file)
    for number in range(rules.MAX_PROFILES + 2):
        profiles.set("ab", profile(f"m{number}"))
    assert [each.model_hash for each in profiles.of("ab")] == [f"m{number}" for number in range(2, 18)]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"ab": 3}',
        '{"ab": [3]}',
        '{"ab": [{"model": "m"}]}',
        '{"ab": [{"model_hash": "m", "num_inference_steps": 20, "similarity": 7}]}',
    ],
)
def test_a_damaged_file_refuses_to_start_and_is_named(file: Path, text: str) -> None:
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"controlnets\.profiles\.json cannot be used"):
        ProfileStore(file)


def test_what_cannot_be_written_is_not_noted(file: Path) -> None:
    profiles = ProfileStore(file)
    file.parent.write_text("in the way")
    with pytest.raises(StorageUnavailable, match="cannot be written"):
        profiles.set("ab", profile())
    assert list(profiles.of("ab")) == []
