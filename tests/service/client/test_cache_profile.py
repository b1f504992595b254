"""`bottega cache profile` against a real gateway and a real cache; what was measured before is not drawn again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from google.protobuf import json_format

from bottega.addons.cache.client import cli_drawing
from bottega.addons.cache.client.profiling import judge_name
from bottega.addons.cache.client.samples import Method, PairSample, SampleFile, miniature_pairs
from bottega.addons.cache.skip_profile import count_words
from bottega.addons.cache.starts import FRACTIONS
from bottega.v1.cache_pb2 import CacheProfile
from bottega.v1.fleet_pb2 import ListMembersRequest
from bottega.v1.generation_pb2 import FIDELITY_EXACT
from tests.support.running_cache import MODEL_HASH, Running, joined_cache
from tests.support.running_gateway import Running as House
from tests.support.terminal import run_at
from tests.support.waiting import eventually

PAIRS = 40
METHOD = Method(model_hash=MODEL_HASH, num_inference_steps=30, draws=2, judge=judge_name(None))


@pytest.fixture
async def cache(house: House, own_folder: Path) -> AsyncIterator[Running]:
    async with joined_cache(house, own_folder / "cache") as made:
        yield made


def _measured(path: Path, cached: Callable[[float], float]) -> None:
    """Samples of all pairs. cached: quality by the fraction of the steps that is skipped."""
    kept = SampleFile(path, METHOD)
    for number, pair in enumerate(miniature_pairs(PAIRS)):
        qualities = {fraction: cached(fraction) for fraction in FRACTIONS}
        words = min(count_words(pair.second), 15)
        similarity = number / PAIRS
        kept.add(
            PairSample(
                first=pair.first,
                second=pair.second,
                words=words,
                similarity=similarity,
                uncached=1.0,
                cached=qualities,
            )
        )


async def test_the_cache_keeps_what_was_measured_and_it_is_said_what_it_means(
    house: House, cache: Running, own_folder: Path
) -> None:
    worker = await house.worker()
    _measured(own_folder / "samples", lambda fraction: 1.0 if fraction < 0.25 else 0.85)
    files = ("--samples", own_folder / "samples", "--output", own_folder / "profile.json")

    result = await run_at(house, "cache", "profile", "--yes", "--pairs", PAIRS, "--draws", 2, *files)

    assert result.exit_code == 0, result.output
    (profile,) = cache.cache.store.profiles()
    assert [each.fraction for each in profile.balanced[1].thresholds] == [0.1, 0.2]
    assert [each.fraction for each in profile.fast[1].thresholds] == [*FRACTIONS]
    assert json_format.Parse((own_folder / "profile.json").read_text(), CacheProfile()) == profile
    # All but the picture after which this kind of request is recorded was there already.
    (first,) = worker.requests
    assert first.spec.techniques.identical_results is False
    assert first.spec.fidelity == FIDELITY_EXACT
    rows = [line.split() for line in result.stdout.splitlines() if "up to 15" in line]
    assert rows[0][-5:] == ["0.000", "0.000", "-", "-", "-"]
    assert "balanced: 100% of these pairs start from a latent, which saves 20% of all steps" in result.stdout
    assert "mean quality is 1.000, from noise 1.000" in result.stdout
    assert f"{PAIRS} pairs of prompts, 2 seeds each, 30 steps; quality by the oracle" in result.stderr


async def _has_measured_steps(house: House) -> bool:
    fleet = await house.fleet.ListMembers(ListMembersRequest(), timeout=5)
    return any(member.load.step_times for member in fleet.members)


async def test_what_would_be_drawn_is_said_and_nothing_is_drawn_unless_somebody_says_yes(
    house: House, cache: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await house.worker(step_s={2: 0.1})
    await eventually(lambda: _has_measured_steps(house), "the worker's first report")

    result = await run_at(house, "cache", "profile", "--pairs", PAIRS)
    assert result.exit_code == 2, result.output
    assert f"{PAIRS} pairs of prompts: {PAIRS * 2 * 7} pictures to draw, about " in result.stderr
    assert "Confirm with --yes." in result.stderr
    monkeypatch.setattr(cli_drawing, "is_interactive", lambda: True)
    result = await run_at(house, "cache", "profile", "--pairs", PAIRS)  # its stdin says nothing
    assert (result.exit_code, "Draw them?" in result.stderr) == (1, True)
    assert not worker.requests
