"""An engine's pictures start from what a real approximate cache holds, over a real link: recorded, found, pinned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bottega.addons.cache.engine.addon import EngineCachedStarts
from bottega.addons.cache.starts import format_start
from bottega.addons.loras.engine import UNET
from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.spans import TracedSpan
from bottega.engine.spec import ResolvedSpec
from bottega.errors import CacheEntryGone
from bottega.model.model import Model
from tests.fakes.scripted_latents import cached
from tests.samples.engine_loras import LorasByHand, lora_spec, random_layers
from tests.samples.small_model import small_model
from tests.support.cached_desk import Desk, cache_desk
from tests.support.engines import make_engine
from tests.support.manual_engine import Drawing, ManualEngine, load
from tests.support.torch_threads import torch_threads
from tests.support.waiting import wait_until

SPEC = ResolvedSpec(prompt="a small green circle", num_inference_steps=20, width=32, height=32, seed=5)
ORDER = EngineOrder(key="first", spec=SPEC)


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with torch_threads(1):  # fixed_rows of 2 is refused with two
        yield load(small_model())


@pytest.fixture
def desk(model: Model, tmp_path: Path) -> Iterator[Desk]:
    loras = LorasByHand.of({"ink": {UNET: random_layers(model.backbone.unet, 1)}})

    def engine(starts: EngineCachedStarts) -> ManualEngine:
        limits = EngineLimits(fixed_rows=2, max_wait_turns=0)
        return ManualEngine(make_engine(model, limits, loras=loras, addons=(starts,)))

    with cache_desk(model, tmp_path, engine) as desk:
        yield desk


def at_cache(drawing: Drawing) -> dict[str, TracedSpan]:
    """What the cache did for it, by name, all of it while the answer was waited for."""
    spans = drawing.trace.spans
    (asked,) = [span for span in spans if span.name == "look-up"]
    done = {span.name: span for span in spans if span.service == "cache"}
    for span in done.values():
        assert span.track == "look-ups"
        assert span.seconds > 0.0
        assert asked.begin_s <= span.begin_s <= span.begin_s + span.seconds <= asked.begin_s + asked.seconds
    return done


def test_a_picture_is_recorded_found_by_another_job_and_pinned_until_it_is_gone(desk: Desk) -> None:
    first = desk.draw(cached(ORDER))
    assert first.record.exact, "the cache is cold"
    desk.recorded(1)
    (entry,) = desk.store.entries(desk.starts.model.digest, 10)
    assert list(entry.steps) == [2, 4, 6, 8, 10]
    assert (entry.parameters.prompt, entry.parameters.seed, entry.parameters.model) == (SPEC.prompt, 5, "m")

    second = desk.draw(cached(replace(ORDER, key="second", spec=replace(SPEC, seed=6))))
    (start,) = second.record.provenance.cached_starts
    assert (start.entry, start.from_step) == (format_start(entry.entry, 8), 7)
    # The answer came when the picture had made its first step.
    assert start.skipped_steps <= 7
    wait_until(lambda: desk.store.statistics().steps_skipped == start.skipped_steps, "the cache to be told")
    assert start.similarity == pytest.approx(1.0, abs=1e-3)

    name = start.entry
    pinned = cached(replace(ORDER, key="third", spec=replace(SPEC, seed=6)), pin=name)
    third = desk.draw(pinned)
    assert torch.equal(third.latents[0], second.latents[0])
    assert [each.entry for each in third.record.provenance.cached_starts] == [name]

    assert list(at_cache(first)) == ["search", "select"]
    assert list(at_cache(second)) == ["search", "select", "read from the disk"]
    assert list(at_cache(third)) == ["read from the disk"]

    other = desk.draw(cached(replace(ORDER, key="other", spec=replace(SPEC, guidance_scale=4.0))))
    assert other.record.exact, "another key"
    desk.recorded(2)

    desk.store.clear(desk.starts.model.digest)
    gone = desk.draw(replace(pinned, key="fourth"))
    assert isinstance(gone.error, CacheEntryGone)
    assert gone.error.metadata["entry"] == name


def test_a_picture_with_loras_starts_from_what_was_recorded_without_where_the_cache_is_told_so(desk: Desk) -> None:
    desk.draw(cached(ORDER))
    desk.recorded(1)
    (entry,) = desk.store.entries(desk.starts.model.digest, 10)

    for bound, step in ((7, None), (10, 8)):
        styled = replace(SPEC, seed=6, loras=(lora_spec("ink", bound=bound),))
        drawing = desk.draw(cached(replace(ORDER, key=("styled", bound), spec=styled), record=False))
        starts = [(start.entry, start.without_loras) for start in drawing.record.provenance.cached_starts]
        assert starts == ([] if step is None else [(format_start(entry.entry, step), True)])


def test_a_store_that_is_closed_keeps_no_picture_waiting(desk: Desk) -> None:
    desk.store.close()
    drawing = desk.draw(cached(ORDER))
    assert drawing.record.exact
