"""Samples are kept as they come, and only of one way of measuring."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bottega.client.addons.cache.samples import Method, PairSample, PromptPair, SampleFile
from bottega.errors import InvalidRequest

METHOD = Method(model_hash="ab" * 32, num_inference_steps=30, draws=4, judge="the oracle")
SAMPLE = PairSample(
    first="a star", second="a ring", words=2, similarity=0.8, uncached=0.9, cached={0.1: 0.9, 0.5: 0.25}
)


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    SampleFile(tmp_path / "samples", METHOD).add(SAMPLE)

    kept = SampleFile(tmp_path / "samples", METHOD)

    assert kept.samples == [SAMPLE]
    other = PromptPair(first="a ring", second="a star")
    assert kept.missing([SAMPLE.pair, other]) == [other]


def test_a_line_that_was_cut_off_is_drawn_again_and_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "samples"
    SampleFile(path, METHOD).add(SAMPLE)
    path.write_text(path.read_text() + '{"first": "a st')

    SampleFile(path, METHOD).add(replace(SAMPLE, second="a heart"))

    assert [each.second for each in SampleFile(path, METHOD).samples] == ["a ring", "a heart"]


@pytest.mark.parametrize(
    "other",
    [
        replace(METHOD, model_hash="cd" * 32),
        replace(METHOD, num_inference_steps=20),
        replace(METHOD, draws=1),
        replace(METHOD, judge="a CLIP score"),
    ],
)
def test_a_file_of_another_measurement_is_refused(tmp_path: Path, other: Method) -> None:
    SampleFile(tmp_path / "samples", METHOD)

    with pytest.raises(InvalidRequest, match="another way"):
        SampleFile(tmp_path / "samples", other)


@pytest.mark.parametrize("data", [b"a list\n", b"[]\n", b'{"first": 1}\n', b"cut off", b"\xff\n"])
def test_a_file_that_is_none_of_samples_is_refused_and_left_as_it_is(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "samples"
    path.write_bytes(data)

    with pytest.raises(InvalidRequest):
        SampleFile(path, METHOD)

    assert path.read_bytes() == data


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_drawn(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="No such file or directory; name another file"):
        SampleFile(tmp_path / "nowhere" / "samples", METHOD)


def test_without_a_file_samples_are_kept_in_memory() -> None:
    kept = SampleFile(None, METHOD)
    kept.add(SAMPLE)

    assert kept.samples == [SAMPLE]
