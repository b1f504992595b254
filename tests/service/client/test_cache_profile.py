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
from tests.support.running_gateway import Running as RunningGateway
from tests.support.running_gateway import running_gateway
from tests.support.terminal import run_at
from tests.support.waiting import eventually

PAIRS = 40
METHOD = Method(model_hash=MODEL_HASH, num_inference_steps=30, draws=2, judge=judge_name(None))


@pytest.fixture
async def gateway(own_folder: Path) -> AsyncIterator[RunningGateway]:
    async with running_gateway() as made:
        yield made


@pytest.fixture
async def cache(gateway: RunningGateway, own_folder: Path) -> AsyncIterator[Running]:
    async with joined_cache(gateway, own_folder / "cache") as made:
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
    gateway: RunningGateway, cache: Running, own_folder: Path
) -> None:
    worker = await gateway.worker()
    _measured(own_folder / "samples", lambda fraction: 1.0 if fraction < 0.25 else 0.85)
    files = ("--samples", own_folder / "samples", "--output", own_folder / "profile.json")

    result = await run_at(gateway, "cache", "profile", "--yes", "--pairs", PAIRS, "--draws", 2, *files)

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


async def test_where_nothing_is_good_enough_that_is_said_and_nothing_is_reused(
    gateway: RunningGateway, cache: Running, own_folder: Path
) -> None:
    await gateway.worker()
    _measured(own_folder / "samples", lambda fraction: 0.5)

    files = ("--samples", own_folder / "samples", "--output", own_folder / "nowhere" / "profile.json")
    result = await run_at(gateway, "cache", "profile", "--yes", "--pairs", PAIRS, "--draws", 2, *files)

    assert result.exit_code == 0, result.output
    assert "cannot be written: No such file or directory. The caches have the profile" in result.stderr
    assert result.stdout.splitlines() == [
        f"{fidelity}: nothing is reused: no similarity keeps {alpha} of the quality in 95% of pairs."
        for fidelity, alpha in (("balanced", 0.9), ("fast", 0.8))
    ]
    (kept,) = cache.cache.store.profiles()
    assert [list(each.thresholds) for each in kept.balanced] == [[]]


async def test_other_models_need_prompts_and_somebody_who_scores(
    gateway: RunningGateway, cache: Running, own_folder: Path
) -> None:
    worker = await gateway.worker()
    (own_folder / "prompts.txt").write_text("one red star\none blue ring\n")

    result = await run_at(gateway, "cache", "profile", "--model", "other")
    assert (result.exit_code, "--prompts FILE --clip FOLDER" in result.stderr) == (2, True)
    (own_folder / "latin.txt").write_bytes("ein grüner Stern\n".encode("latin-1"))
    result = await run_at(gateway, "cache", "profile", "--yes", "--prompts", "latin.txt")
    assert (result.exit_code, "latin.txt is no UTF-8 text" in result.stderr) == (2, True)
    result = await run_at(gateway, "cache", "profile", "--yes", "--prompts", "prompts.txt")
    assert (result.exit_code, "20 to 5000 different ones are needed; got 1" in result.stderr) == (2, True)
    (own_folder / "clip").mkdir()
    result = await run_at(gateway, "cache", "profile", "--yes", "--clip", own_folder / "clip")
    assert (result.exit_code, "it has no config.json" in result.stderr) == (2, True)

    assert not worker.requests


async def _has_measured_steps(gateway: RunningGateway) -> bool:
    fleet = await gateway.fleet.ListMembers(ListMembersRequest(), timeout=5)
    return any(member.load.step_times for member in fleet.members)


async def test_what_would_be_drawn_is_said_and_nothing_is_drawn_unless_somebody_says_yes(
    gateway: RunningGateway, cache: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await gateway.worker(step_s={2: 0.1})
    await eventually(lambda: _has_measured_steps(gateway), "the worker's first report")

    result = await run_at(gateway, "cache", "profile", "--pairs", PAIRS)
    assert result.exit_code == 2, result.output
    assert f"{PAIRS} pairs of prompts: {PAIRS * 2 * 7} pictures to draw, about " in result.stderr
    assert "Confirm with --yes." in result.stderr
    monkeypatch.setattr(cli_drawing, "is_interactive", lambda: True)
    result = await run_at(gateway, "cache", "profile", "--pairs", PAIRS)  # its stdin says nothing
    assert (result.exit_code, "Draw them?" in result.stderr) == (1, True)
    assert not worker.requests
