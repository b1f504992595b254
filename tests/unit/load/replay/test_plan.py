"""A plan has the shares and shapes of its mix, and is the same each time."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from bottega.errors import ConfigError
from load.replay.mix import MIXES, AdapterShape, DrawShape, Mix, load_mix
from load.replay.plan import plan
from load.replay.requests import PlannedRequest
from load.replay.trace_shape import CONTROLNETS_B, LORAS_A, PRODUCTION

LONG = Mix(minutes=100.0, rate_per_s=1.0)
NETS = tuple(f"net{rank}" for rank in range(8))


def of_kind(requests: list[PlannedRequest], kind: str) -> list[PlannedRequest]:
    return [request for request in requests if request.kind == kind]


def test_the_same_mix_and_seed_make_the_same_requests() -> None:
    first = plan(LONG, 1)
    assert len(first) == 6000
    assert first == plan(LONG, 1)
    others = plan(LONG, 2)
    for figure in ("at_s", "kind", "prompt", "seed", "template", "mask_ratio"):
        assert [getattr(each, figure) for each in first] != [getattr(each, figure) for each in others], figure


def test_seven_in_ten_are_edits_of_popular_templates_with_masks_as_large_as_in_production() -> None:
    requests = plan(LONG, 1)
    edits = of_kind(requests, "edit")
    assert len(edits) / len(requests) == pytest.approx(0.7, abs=0.02)
    ratios = [request.mask_ratio for request in edits if request.mask_ratio is not None]
    assert len(ratios) == len(edits)
    assert sum(ratios) / len(ratios) == pytest.approx(PRODUCTION.mean, rel=0.05)
    templates = Counter(request.template for request in edits)
    assert sum(templates[rank] for rank in range(10)) / len(edits) == pytest.approx(0.39, abs=0.04)
    drawn = of_kind(requests, "draw")
    assert {(request.template, request.mask_ratio) for request in drawn} == {(None, None)}


def test_a_share_of_the_draws_is_asked_for_twice() -> None:
    share = 0.2
    drawn = of_kind(plan(replace(LONG, draws=DrawShape(identical=share)), 1), "draw")
    different = len({replace(request, at_s=0.0) for request in drawn})
    assert 1 - different / len(drawn) == pytest.approx(share, abs=0.03)


def test_draws_use_controlnets_and_loras_as_the_trace_does_and_edits_none() -> None:
    nets = AdapterShape(service="B", names=NETS)
    loras = AdapterShape(service="A", names=tuple(f"lora{rank}" for rank in range(100)))
    requests = plan(replace(LONG, controlnets=nets, loras=loras), 1)
    drawn = of_kind(requests, "draw")
    nets_used = Counter(len(request.controlnets) for request in drawn)
    assert nets_used[2] / len(drawn) == pytest.approx(CONTROLNETS_B.per_request[2], abs=0.03)
    assert nets_used[0] / len(drawn) == pytest.approx(CONTROLNETS_B.per_request[0], abs=0.01)
    assert Counter(len(request.loras) for request in drawn)[2] / len(drawn) == pytest.approx(
        LORAS_A.per_request[2], abs=0.03
    )
    calls = Counter(name for request in drawn for name in request.controlnets)
    assert calls.most_common(1)[0][0] == "net0"
    assert calls["net7"] < 0.5 * calls["net0"], "of the trace, 22 and 7 % of the calls"
    assert all(len(set(request.controlnets)) == len(request.controlnets) for request in drawn)
    assert {(request.controlnets, request.loras) for request in of_kind(requests, "edit")} == {((), ())}


@pytest.mark.parametrize("path", sorted(MIXES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_mix_can_be_planned(path: Path) -> None:
    assert plan(load_mix(path.stem), 1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hours = 1", "hours: unknown key; known at the top level: minutes"),
        ("[edits]\nshare = 1.5", "edits.share: Input should be less than or equal to 1"),
        ("[draws]\nsteps = { 20 = 0 }", "draws.steps: Value error, one of the weights must be above 0"),
        ("[loras]\nnames = ['a', 'a']", "loras.names: Value error, a name may be there once"),
    ],
)
def test_a_mix_that_cannot_be_used_names_the_key(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(says)):
        load_mix(str(path))
