"""Measuring a profile against a suite that follows a script: what is drawn, what is left out, and what is found."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from bottega.addons.cache.client.profiling import (
    CacheMeasurement,
    MeasuredCache,
    PairDrawer,
    estimate_drawing,
    measure_cache,
)
from bottega.addons.cache.client.samples import PromptPair, miniature_pairs
from bottega.addons.cache.client.types import CachedEntry, entry_from
from bottega.addons.cache.starts import parse_start, recorded_steps
from bottega.client.sdk.aio import AsyncGatewayClient
from bottega.client.types.fleet import fleet_from
from bottega.client.types.picture import Picture
from bottega.client.types.provenance import CacheUse, Parameters, Provenance
from bottega.errors import CacheEntryGone, InvalidRequest, NoCache, Unavailable
from bottega.miniature.scenes import Scene, read_caption
from bottega.v1.cache_pb2 import CacheEntry
from bottega.v1.fleet_pb2 import ListMembersResponse
from bottega.v1.generation_pb2 import GenerationSpec
from tests.support.waiting import EVENTUALLY_S

HASH = "ab" * 32
STEPS = 10


@dataclass(kw_only=True)
class ScriptedSuite:
    """Draws prompts as they are; from a latent, what its own prompt says, where too little similarity skips too much.

    Of two scenes, every part that differs costs .1 of the similarity; a fraction f needs .5 + f.
    recorded: the share of pictures that are. gone: steps that are evicted before they are started from; of every
    second entry alone where gone_of_second. failing: whether the cache does not answer that call for its entries.
    """

    recorded: float = 1.0
    gone: frozenset[int] = frozenset()
    gone_of_second: bool = False
    failing: Callable[[int], bool] = lambda call: False
    calls: int = 0
    model_hash: str = HASH
    asked: list[dict[str, Any]] = field(default_factory=list)
    entries: list[CachedEntry] = field(default_factory=list)

    async def generate(self, prompt: str, **options: Any) -> Picture:
        self.asked.append({"prompt": prompt, **options})
        await asyncio.sleep(0)
        parameters = Parameters(prompt=prompt, seed=options["seed"], num_inference_steps=STEPS)
        starts: list[CacheUse] = []
        shown = prompt
        if pin := options.get("cache_entry"):
            shown = self._start(prompt, pin, starts)
        elif options.get("approximate_cache") is not False:
            self._record(prompt, options["seed"])
        provenance = Provenance(
            parameters=parameters, model_hash=self.model_hash, worker="worker", cached_starts=tuple(starts)
        )
        return _picture(shown, provenance)

    async def score(self, prompt: str, picture: bytes) -> float:
        return 1.0 if picture == prompt.encode() else 0.5

    async def list_entries(self, model_hash: str, limit: int) -> Sequence[CachedEntry]:
        assert model_hash == HASH
        self.calls += 1
        if self.failing(self.calls):
            raise NoCache("the cache does not answer")
        return self.entries[::-1][:limit]

    def _record(self, prompt: str, seed: int) -> None:
        if (len(self.entries) + 1) * self.recorded >= sum(bool(each.steps) for each in self.entries) + 1:
            steps = recorded_steps(STEPS)
        else:
            steps = ()
        spec = GenerationSpec(prompt=prompt if steps else "lost", seed=seed, num_inference_steps=STEPS)
        entry = CacheEntry(entry=f"{len(self.entries):032x}", parameters=spec, steps=steps)
        self.entries.append(entry_from(entry))

    def _start(self, prompt: str, pin: str, starts: list[CacheUse]) -> str:
        entry, step = parse_start(pin)
        if step in self.gone and not (self.gone_of_second and int(entry, 16) % 2):
            raise CacheEntryGone(f"{pin} is gone", metadata={"entry": pin})
        first = self.entries[int(entry, 16)].parameters.prompt
        similarity = 1.0 - 0.1 * _differences(_scene(first), _scene(prompt))
        starts.append(CacheUse(entry=pin, similarity=similarity, from_step=step - 1))
        return prompt if similarity >= 0.5 + step / STEPS - 1e-9 else first


def _measure(suite: ScriptedSuite, **wanted: Any) -> MeasuredCache:
    async def measure() -> MeasuredCache:
        measurement.check()
        client = cast("AsyncGatewayClient", suite)
        drawer = PairDrawer(client, suite.list_entries, num_inference_steps=None, model=None)
        return await measure_cache(drawer, suite, measurement, on_pair=lambda done, pairs: told.append((done, pairs)))

    measurement = CacheMeasurement(**{"pairs": miniature_pairs(80), "draws": 1, **wanted})
    told: list[tuple[int, int]] = []
    measured = asyncio.run(measure())
    assert told[-1:] in ([], [(len(measured.samples) + measured.unrecorded, told[-1][1])])
    return measured


@pytest.fixture(autouse=True)
def _without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bottega.addons.cache.client.profiling._POLL_S", 0.001)
    monkeypatch.setattr("bottega.addons.cache.client.profiling._RECORDED_S", 0.05)


def test_the_least_similarity_is_found_from_which_pictures_show_their_prompt() -> None:
    measured = _measure(ScriptedSuite())

    assert len(measured.samples) == 80
    found = measured.profile.balanced.classes[1].thresholds
    # One difference is .9 of similarity, two are .8, and so on: what the script demands, with a twentieth to spare.
    assert found[0.4] == pytest.approx(0.9)
    assert found[0.2] <= 0.8
    assert 0.5 not in found  # no two prompts are the same
    assert (measured.profile.model_hash, measured.method.num_inference_steps) == (HASH, STEPS)
    assert "80 pairs of prompts, 1 seeds each, 10 steps; quality by the oracle" in measured.profile.about


def test_each_draw_has_seeds_of_its_own_and_a_start_the_seed_of_the_uncached_picture() -> None:
    suite = ScriptedSuite()

    _measure(suite, pairs=miniature_pairs(20), draws=2)

    first, *pairs = suite.asked  # the first picture makes the kind of request known
    assert first["fidelity"] == "exact"
    exact = [each for each in pairs if each["fidelity"] == "exact"]
    assert len({each["seed"] for each in exact}) == len(exact) == 2 * 2 * 20
    uncached = {(each["prompt"], each["seed"]) for each in exact if each.get("approximate_cache") is False}
    started = [each for each in pairs if "cache_entry" in each]
    assert len(started) == 20 * 2 * 5
    assert {(each["prompt"], each["seed"]) for each in started} == uncached


def test_a_measurement_goes_on_where_it_stopped(tmp_path: Path) -> None:
    _measure(ScriptedSuite(), pairs=miniature_pairs(25), samples=tmp_path / "samples")
    again = ScriptedSuite()

    measured = _measure(again, pairs=miniature_pairs(30), samples=tmp_path / "samples")

    assert len(measured.samples) == 30
    assert len(again.asked) == 1 + 5 * 7


@pytest.mark.parametrize("of_second", [False, True])
def test_latents_that_are_evicted_meanwhile_are_left_out(of_second: bool) -> None:
    suite = ScriptedSuite(gone=frozenset({4, 5}), gone_of_second=of_second)

    measured = _measure(suite, pairs=miniature_pairs(20), draws=2)

    # Where one of a pair's draws has no such latent, the others say nothing either.
    assert (0.1, 0.2, 0.3) in {tuple(each.cached) for each in measured.samples}
    assert of_second or {tuple(each.cached) for each in measured.samples} == {(0.1, 0.2, 0.3)}


def test_what_was_recorded_with_other_steps_is_not_taken_for_what_this_measurement_draws() -> None:
    """With the same prompts and seeds: latents of another number of steps are never started from."""
    earlier = ScriptedSuite()
    _measure(earlier, pairs=miniature_pairs(20))
    others = [
        replace(entry, parameters=replace(entry.parameters, num_inference_steps=3 * STEPS)) for entry in earlier.entries
    ]
    suite = ScriptedSuite(entries=others)

    _measure(suite, pairs=miniature_pairs(20))

    pins = [parse_start(each["cache_entry"])[0] for each in suite.asked if "cache_entry" in each]
    assert len(pins) == 20 * 5
    assert {suite.entries[int(pin, 16)].parameters.num_inference_steps for pin in pins} == {STEPS}


def test_a_cache_that_does_not_answer_now_and_then_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bottega.addons.cache.client.profiling._RECORDED_S", EVENTUALLY_S)
    measured = _measure(ScriptedSuite(failing=lambda call: call % 3 > 0), pairs=miniature_pairs(20))

    assert len(measured.samples) == 20


def test_a_cache_that_answers_no_more_ends_it() -> None:
    with pytest.raises(NoCache):
        _measure(ScriptedSuite(failing=lambda call: call > 5))


def test_a_cache_that_records_nothing_ends_it() -> None:
    with pytest.raises(Unavailable, match="were not recorded"):
        _measure(ScriptedSuite(recorded=0.0))


def test_a_model_that_is_replaced_meanwhile_ends_it() -> None:
    suite = ScriptedSuite()

    async def replaced(prompt: str, **options: Any) -> Picture:
        picture = await ScriptedSuite.generate(suite, prompt, **options)
        suite.model_hash = "cd" * 32
        return picture

    suite.generate = replaced  # type: ignore[method-assign]
    with pytest.raises(Unavailable, match="was replaced"):
        _measure(suite)


def test_what_is_wrong_with_a_measurement_is_said_before_anything_is_drawn() -> None:
    suite = ScriptedSuite()

    with pytest.raises(InvalidRequest) as refusal:
        _measure(suite, pairs=[PromptPair(first="a", second="b")] * 30, draws=9)

    assert [each.field for each in refusal.value.violations] == ["pairs", "draws"]
    assert not suite.asked


def _picture(shown: str, provenance: Provenance) -> Picture:
    """Its bytes say what it shows."""
    return Picture(
        data=shown.encode(),
        format="png",
        seed=0,
        width=64,
        height=64,
        index=0,
        digest="",
        job_id="",
        provenance=provenance,
    )


def _scene(text: str) -> Scene:
    scene = read_caption(text)
    assert scene is not None
    return scene


def _differences(one: Scene, other: Scene) -> int:
    parts = [(one.ground, other.ground), (one.size, other.size), (one.place, other.place)]
    parts += [(one.relation, other.relation)]
    for first, second in zip(one.things, other.things, strict=True):
        parts += [(first.shape, second.shape), (first.colour, second.colour)]
    return sum(first != second for first, second in parts)


def test_what_is_drawn_is_estimated_from_the_steps_that_workers_have_measured() -> None:
    """Two workers: of a turn of 8 rows each row takes .1 s, of which a picture has two in each step."""
    fleet = ListMembersResponse()
    for name in ("w1", "w2"):
        member = fleet.members.add()
        member.registration.name = name
        member.registration.models.add(name="miniature", default_steps=10)
        member.load.fixed_s = 0.5
        member.load.step_times.add(rows=2, seconds=0.5)
        member.load.step_times.add(rows=8, seconds=0.8)
    wanted = CacheMeasurement(pairs=miniature_pairs(80)[:20], draws=2)
    drawing = estimate_drawing(wanted, fleet_from(fleet))
    assert drawing.pictures == 20 * 2 * 7
    seconds = (20 * 2 * (2 + 0.9 + 0.8 + 0.7 + 0.6 + 0.5) * 10 * 2 * 0.1 + 280 * 0.5) / 2
    assert drawing.seconds == pytest.approx(seconds)
    other = CacheMeasurement(pairs=miniature_pairs(80)[:20], draws=2, model="other")
    assert estimate_drawing(other, fleet_from(fleet)).seconds is None
