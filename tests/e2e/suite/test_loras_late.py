"""LoRAs over a slow link, and from a store that dies: real processes, where pictures are equal byte for byte."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bottega.client import Client, Lora, Picture
from bottega.errors import NoLora
from tests.e2e.conftest import LORA_SILENCE_S, LORA_TIMEOUT_S, Suite
from tests.samples.lora_files import Part, base_shapes, kohya, save
from tests.support.services import Service
from tests.support.waiting import wait_until

_PROMPT = "a big red star on the left on a blue background"
_DRAW: dict[str, Any] = {"seed": 3, "num_inference_steps": 20}
_SHORT: dict[str, Any] = {"seed": 3, "num_inference_steps": 4}
_LATEST = 16


@pytest.fixture
def add(suite: Suite, tmp_path: Path) -> Callable[..., None]:
    def add(name: str, **parts: Any) -> None:
        suite.client.add_lora(name, _lora(tmp_path / f"{name}.safetensors", **parts), base="miniature")

    return add


@pytest.fixture(scope="module")
def draw(client: Client) -> Callable[..., Picture]:
    return lambda *loras, **options: client.generate(_PROMPT, lora=loras, **{**_DRAW, **options})


def _lora(path: Path, *, seed: int, rank: int = 12, endings: tuple[str, ...] = ("to_q", "to_k", "to_v")) -> Path:
    """Of the UNet alone: the prompt waits for nothing. Takes .9 s, about ten steps; with rank 16 in all modules 5 s."""
    parts = {("unet", name): Part(rank=rank, alpha=2.0) for name in base_shapes("unet") if name.endswith(endings)}
    return save(kohya(parts, seed=seed)[0], path)


def _figures(service: Service) -> Mapping[str, float]:
    """Its metrics, summed over their labels."""
    with urllib.request.urlopen(f"http://{service.metrics}/metrics", timeout=5) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    found: dict[str, float] = {}
    for sample in (sample for family in families for sample in family.samples):
        found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def test_a_lora_that_is_late_goes_in_at_a_step_that_is_told_and_pinned_there_draws_the_same(
    add: Callable[..., None], draw: Callable[..., Picture]
) -> None:
    add("late", seed=1)
    drawn = draw(Lora("late", max_step=_LATEST), bounded_lora_loading=True)
    (use,) = drawn.provenance.loras
    assert 0 < use.from_step <= _LATEST
    assert use.load_s > 0.5
    assert not drawn.provenance.exact
    assert drawn.provenance.parameters.lora[0].from_step == use.from_step
    pinned = draw(Lora("late", from_step=use.from_step, digest=use.digest))
    assert pinned.provenance.loras[0].from_step == use.from_step
    assert pinned.pil().tobytes() == drawn.pil().tobytes()
    exact = draw(Lora("late"))
    assert exact.provenance.exact
    assert exact.pil().tobytes() != drawn.pil().tobytes(), "else the step is of no matter here"


def test_an_exact_request_waits_and_its_time_is_told_beside_the_steps(
    suite: Suite, add: Callable[..., None], draw: Callable[..., Picture]
) -> None:
    add("awaited", seed=2)
    before = _figures(suite.worker)
    drawn = draw(Lora("awaited"))
    (use,) = drawn.provenance.loras
    assert use.from_step == 0
    assert use.wait_s > 0.3
    times = {time.stage: time.seconds for time in drawn.provenance.times}
    assert times["loras"] == pytest.approx(use.wait_s + use.patch_s)
    figures = _figures(suite.worker)
    waited_s = figures["bottega_worker_lora_wait_seconds_sum"] - before["bottega_worker_lora_wait_seconds_sum"]
    assert waited_s == pytest.approx(use.wait_s)
    assert figures["bottega_worker_lora_load_seconds_count"] > before["bottega_worker_lora_load_seconds_count"]
    assert "bottega_worker_lora_swaps_total" in figures
    assert _figures(suite.store)["bottega_lora_fetches_total"] >= 1


@pytest.mark.slow  # tests/service/client/test_lora_profile.py has it with a scripted worker
def test_a_profile_is_measured_with_real_pictures_and_remembered(client: Client, add: Callable[..., None]) -> None:
    add("measured", seed=5, rank=4)
    prompts = [f"a small {colour} ring on a black background" for colour in ("red", "green", "blue", "white")]
    measured = client.profile_lora("measured", prompts, num_inference_steps=10)
    assert 0 <= measured.max_step == min(measured.prompts) < 10
    (bound,) = client.lora("measured").bounds
    assert (bound.num_inference_steps, bound.max_step) == (10, measured.max_step)


def test_a_store_that_dies_in_mid_fetch_fails_who_waits_for_it_and_nobody_else(
    suite: Suite, add: Callable[..., None], draw: Callable[..., Picture]
) -> None:
    add("large", seed=7, rank=16, endings=("",))
    plain = draw(**_SHORT).data
    fetches = _figures(suite.store)["bottega_lora_fetches_total"]
    began_s = time.monotonic()
    waiting = suite.client.submit(_PROMPT, lora=["large"], **_DRAW)
    wait_until(lambda: _figures(suite.store)["bottega_lora_fetches_total"] > fetches, "the fetch to begin")
    time.sleep(0.5)
    suite.store.kill()
    assert draw(**_SHORT).data == plain
    assert not waiting.status().ended
    with pytest.raises(NoLora, match="large"):
        waiting.result(timeout_s=LORA_TIMEOUT_S + 10.0)
    assert time.monotonic() - began_s < LORA_TIMEOUT_S + LORA_SILENCE_S + 2.0
    assert draw(**_SHORT).data == plain, "nothing of it is in the weights"
    suite.restart_store()
