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
from tests.e2e.conftest import LORA_TIMEOUT_S, Suite
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


def test_a_store_that_dies_in_mid_fetch_fails_who_waits_for_it_and_nobody_else(
    suite: Suite, add: Callable[..., None], draw: Callable[..., Picture]
) -> None:
    add("large", seed=7, rank=16, endings=("",))
    plain = draw(**_SHORT).data
    fetches = _figures(suite.store)["bottega_lora_fetches_total"]
    waiting = suite.client.submit(_PROMPT, lora=["large"], **_DRAW)
    wait_until(lambda: _figures(suite.store)["bottega_lora_fetches_total"] > fetches, "the fetch to begin")
    time.sleep(0.5)
    suite.store.kill()
    assert draw(**_SHORT).data == plain
    assert not waiting.status().ended
    with pytest.raises(NoLora, match=f"large did not arrive within {LORA_TIMEOUT_S:g} s"):
        waiting.result(timeout_s=LORA_TIMEOUT_S + 10.0)
    assert draw(**_SHORT).data == plain, "nothing of it is in the weights"
    suite.restart_store()
