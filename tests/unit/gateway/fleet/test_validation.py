"""What a service may say of itself and of its load, where the fuzz corpus of Join does not say it already.

The corpus has every field at its limit and one past (tests/fuzz/joining.py and what it reads).
"""

from __future__ import annotations

import time
from typing import Any

from bottega import kinds, rules
from bottega.addons.interface.views import hosted_by_kind
from bottega.gateway.fleet.validation import MAX_USED_KINDS, check_load, check_registration
from bottega.v1.fleet_pb2 import (
    Load,
    Registration,
    SwitchTime,
)
from bottega.v1.hosted_pb2 import HOSTED_STATE_LOADED, Hosted
from tests.samples.hosted_loras import applied, at_hand
from tests.support.processor_speed import on_this_machine


def _of_registration(**facts: Any) -> list[str]:
    whole = {"kind": kinds.WORKER, "name": "w", "address": "a:1", "instance": "x" * 32, **facts}
    return [violation.field for violation in check_registration(Registration(**whole))]


def _of_load(**facts: Any) -> list[str]:
    return [violation.field for violation in check_load(Load(**facts))]


def test_a_newcomer_at_a_bound_is_taken_and_past_it_refused() -> None:
    bounds = {
        "kind": (["a", "my-own", "x" * 32], ["-a"]),
        "name": (["x" * 128], ["x" * 129]),
        "address": (["x" * 254 + ":1", "[::1]:65535"], ["a:0", "x" * 255 + ":1"]),
    }
    for name, (good, bad) in bounds.items():
        assert [_of_registration(**{name: value}) for value in good] == [[]] * len(good)
        assert [_of_registration(**{name: value}) for value in bad] == [[f"registration.{name}"]] * len(bad)


def test_a_kind_that_is_switched_to_is_said_once_and_sixteen_at_most() -> None:
    times = [SwitchTime(kind=f"k{number}") for number in range(17)]
    assert _of_load(switch_times=times[:16]) == []
    assert _of_load(switch_times=times) == ["load.switch_times"]
    assert _of_load(switch_times=times[:1] * 2) == ["load.switch_times"]


def test_a_report_of_what_is_left_out_keeps_within_the_bounds() -> None:
    report = rules.report_left_out(kinds.LORAS, {f"{number:03} {'n' * 300}": "r" * 600 for number in range(80)})
    assert _of_load(left_out=report) == []
    assert (len(report), report[-1].reason[:8]) == (64, "17 more ")


def _hosted(kind: str, name: str = "", digest: str = "") -> Hosted:
    return Hosted(kind=kind, name=name, digest=digest, state=HOSTED_STATE_LOADED)


def _violated(*items: Hosted) -> set[str]:
    return set(_of_load(hosted=items))


def test_a_lora_may_have_its_digest_alone_and_a_controlnet_has_a_name() -> None:
    assert _violated(_hosted(kinds.LORAS, digest="ab" * 32), _hosted(kinds.CONTROLNET, name="edges")) == set()
    assert _violated(_hosted(kinds.CONTROLNET, digest="ab" * 32)) == {"load.hosted"}


def test_kinds_are_bounded_and_each_has_its_own_bound_on_items() -> None:
    items = [_hosted("k" + letter, name="one") for letter in "abcdefghijklmnopqrstuvwxyz"[: MAX_USED_KINDS + 1]]
    assert _violated(*items[:-1]) == set()
    assert _violated(*items) == {"load.hosted"}
    nets = [Hosted(kind=kinds.CONTROLNET, name=f"n{number}") for number in range(1024)]
    loras = at_hand(*(f"{number:064x}" for number in range(1016)))
    assert _violated(*nets, *loras, *[applied("a" * 64)] * 8) == set()
    began_s = time.process_time()
    assert _violated(*[_hosted(f"k{index}", name="one") for index in range(30_000)]) == {"load.hosted"}
    assert time.process_time() - began_s < on_this_machine(0.6)
    assert _violated(Hosted(kind="no kind", name="n")) == {"load.hosted"}


def test_each_kind_has_its_own_items_and_what_it_takes_to_switch() -> None:
    load = Load(hosted=[_hosted(kinds.LORAS, digest="ab" * 32), _hosted(kinds.CONTROLNET, name="edges")])
    load.switch_times.add(kind=kinds.LORAS, seconds=0.5)
    load.switch_times.add(kind="other", seconds=0.25)
    found = hosted_by_kind(load)
    assert {kind: (len(each.items), each.switch_s) for kind, each in found.items()} == {
        kinds.LORAS: (1, 0.5),
        kinds.CONTROLNET: (1, 0.0),
        "other": (0, 0.25),
    }
