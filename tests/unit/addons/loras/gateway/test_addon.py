"""What workers lack of a job's LoRAs, in seconds: by size, and by what is in their weights."""

from __future__ import annotations

import pytest

from bottega import kinds
from bottega.addons.interface.views import Member, hosted_by_kind
from bottega.addons.loras.gateway.addon import LoraSizes, ResolvedLoras, lora_costs
from bottega.errors import LoraUnusable
from bottega.v1.fleet_pb2 import Load, Registration, SwitchTime
from bottega.v1.generation_pb2 import GenerationSpec, Lora
from bottega.v1.image_pb2 import Model
from bottega.v1.lora_pb2 import StoredLora
from tests.samples.hosted_loras import applied, at_hand

_INK, _WASH = "1" * 64, "2" * 64
_SIZES = LoraSizes()
_SIZES.record([StoredLora(digest=_INK, size_bytes=200_000_000), StoredLora(digest=_WASH, size_bytes=1_000_000)])
_BOTH = frozenset({_INK, _WASH})


def _member(*patched: tuple[str, float], loras: frozenset[str] = _BOTH, switch_s: float = 0.3) -> Member:
    load = Load(
        hosted=[*at_hand(*loras), *(applied(*each) for each in patched)],
        switch_times=[SwitchTime(kind=kinds.LORAS, seconds=switch_s)],
    )
    return Member(registration=Registration(), joined_at=0.0, heard_at=0.0, load=load, hosted=hosted_by_kind(load))


def _cost(member: Member, *loras: tuple[str, float]) -> float:
    return lora_costs(tuple(sorted(loras)), {"w": member}, _SIZES).get("w", 0.0)


def _lora(digest: str, scale: float = 1.0) -> tuple[str, float]:
    return digest, scale


def test_what_is_not_at_hand_costs_by_its_size() -> None:
    bare = _member(loras=frozenset({_WASH}), switch_s=0.0)
    assert _cost(bare, _lora(_INK), _lora(_WASH)) == pytest.approx(0.2)
    assert _cost(bare, _lora(_WASH)) == 0.0
    bare = _member(loras=frozenset(), switch_s=0.0)
    assert _cost(bare, _lora(_INK), _lora(_WASH)) == pytest.approx(0.201)
    assert _cost(bare, _lora(_WASH), _lora(_WASH, 0.5)) == pytest.approx(0.001), "it is fetched once"
    assert _cost(bare, _lora("3" * 64)) == pytest.approx((100 << 20) / 1e9), "as usual where nobody knows"


def test_the_very_set_in_the_weights_costs_nothing_and_every_other_a_swap() -> None:
    patched = _member(_lora(_WASH, 0.5), _lora(_INK))
    assert _cost(patched, _lora(_INK), _lora(_WASH, 0.5)) == 0.0, "in any order"
    for other in ([_lora(_INK)], [_lora(_INK), _lora(_WASH, 0.6)], [_lora(_INK), _lora(_WASH, 0.5), _lora(_WASH, 0.5)]):
        assert _cost(patched, *other) == pytest.approx(0.3), "out and in"
    assert _cost(patched) == pytest.approx(0.1), "out"
    assert _cost(_member(), _lora(_INK)) == pytest.approx(0.2), "in"
    assert _cost(_member()) == 0.0


def test_sizes_of_loras_asked_for_longest_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bottega.addons.loras.gateway.addon._MAX_SIZES", 2)
    sizes = LoraSizes()
    for number in ("1", "2", "1", "3"):
        sizes.record([StoredLora(digest=number, size_bytes=1_000_000)])
    assert [sizes.fetch_s([number]) < 0.01 for number in ("1", "2", "3")] == [True, False, True]


def test_a_lora_without_a_part_for_text_encoders_is_of_the_denoiser_alone() -> None:
    stored = [StoredLora(name="ink"), StoredLora(name="wash", text_bytes=8), StoredLora(name="toy", token="<toy>")]
    full = GenerationSpec(loras=[Lora(name=lora.name, denoiser_only=lora.name != "ink") for lora in stored])
    ResolvedLoras(stored=stored).complete(full, steps=4)
    assert [lora.denoiser_only for lora in full.loras] == [True, False, False], "whatever the request says"


def test_a_lora_of_another_model_than_the_requests_is_refused() -> None:
    with pytest.raises(LoraUnusable) as refused:
        ResolvedLoras(stored=[StoredLora(name="ink", base="sd15")]).check_model(Model(name="sdxl"))
    assert refused.value.message == "ink was made for the base model sd15, but the request is for sdxl"
