"""What cached latents are expected to save: the mean of late, by key, of what was measured."""

from __future__ import annotations

import pytest

from bottega.gateway.addons.cache.hit_rates import HitRates, rate_key
from bottega.v1.generation_pb2 import FIDELITY_FAST, ControlNet, GenerationSpec, Lora, Techniques

_KEY = rate_key(GenerationSpec(model="m"), "")


def test_nothing_is_expected_before_enough_was_measured() -> None:
    rates = HitRates()
    for _ in range(7):
        rates.record(_KEY, 15)
        assert rates.skipped_steps(_KEY) == 0
    rates.record(_KEY, 7)
    assert rates.skipped_steps(_KEY) == pytest.approx((7 * 15 + 7) / 8)
    assert rates.skipped_steps(rate_key(GenerationSpec(model="n"), "")) == 0


def test_older_pictures_count_less_and_less() -> None:
    rates = HitRates()
    for _ in range(1000):
        rates.record(_KEY, 12)
    for _ in range(64):
        rates.record(_KEY, 0)
    assert rates.skipped_steps(_KEY) == pytest.approx(12 * (63 / 64) ** 64)
    for _ in range(640):
        rates.record(_KEY, 0)
    assert rates.skipped_steps(_KEY) < 0.01


def test_keys_that_nobody_draws_with_any_more_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bottega.gateway.addons.cache.hit_rates._MOST_KEYS", 2)
    rates = HitRates()
    keys = [rate_key(GenerationSpec(model=name), "") for name in "abc"]
    for key in (keys[0], keys[1], keys[0], keys[2]):
        for _ in range(8):
            rates.record(key, 5)
    assert [rates.skipped_steps(key) for key in keys] == [5, 0, 5]


_COMMON = {"model": "m", "width": 64, "negative_prompt": "", "guidance_scale": 4.0}


def _key(**other: object) -> bytes:
    return rate_key(GenerationSpec(**_COMMON | other), "")  # type: ignore[arg-type]  # fields of a spec


def test_one_tenants_hits_say_nothing_of_anothers() -> None:
    assert len({rate_key(GenerationSpec(model="m"), tenant) for tenant in ("", "a", "b")}) == 3


@pytest.mark.parametrize(
    "other",
    [{"prompt": "a star"}, {"seed": 7}, {"num_images": 8}, {"quality": 9}, {"techniques": Techniques()}],
    ids=lambda other: next(iter(other)),
)
def test_prompt_seed_and_delivery_are_not_in_the_key(other: dict[str, object]) -> None:
    assert _key(**other) == _key()


@pytest.mark.parametrize(
    "other",
    [
        {"model": "n"},
        {"width": 72},
        {"height": 64},
        {"negative_prompt": None},
        {"guidance_scale": 4.5},
        {"num_inference_steps": 9},
        {"use_karras_sigmas": True},
        {"sampler": 1},
        {"fidelity": FIDELITY_FAST},
        {"loras": [Lora(digest="a" * 64, scale=1.0)]},
        {"controlnets": [ControlNet(name="edges")]},
    ],
    ids=lambda other: next(iter(other)),
)
def test_what_is_exact_in_the_store_is_in_the_key(other: dict[str, object]) -> None:
    assert _key(**other) != _key()
