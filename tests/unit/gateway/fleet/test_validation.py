"""What a service may say of itself and of its load, where the fuzz corpus of Join does not say it already.

The corpus has every field at its limit and one past (tests/fuzz/joining.py and what it reads).
"""

from __future__ import annotations

from typing import Any

import pytest

from bottega import kinds
from bottega.gateway.fleet.validation import check_load, check_registration
from bottega.v1.fleet_pb2 import Load, Registration, SwitchTime
from bottega.v1.hosted_pb2 import Hosted
from tests.samples.hosted_loras import applied, at_hand


def _of_registration(**facts: Any) -> list[str]:
    whole = {"kind": kinds.WORKER, "name": "w", "address": "a:1", "instance": "x" * 32, **facts}
    return [violation.field for violation in check_registration(Registration(**whole))]


def _of_load(**facts: Any) -> list[str]:
    return [violation.field for violation in check_load(Load(**facts))]


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("kind", ["a", "my-own", "x" * 32], ["-a"]),
        ("name", ["x" * 128], ["x" * 129]),
        ("address", ["x" * 254 + ":1", "[::1]:65535"], ["a:0", "x" * 255 + ":1"]),
    ],
)
def test_a_newcomer_at_a_bound_is_taken_and_past_it_refused(name: str, good: list[str], bad: list[str]) -> None:
    for value in good:
        assert _of_registration(**{name: value}) == []
    for value in bad:
        assert _of_registration(**{name: value}) == [f"registration.{name}"]


def test_a_kind_that_is_switched_to_is_said_once_and_sixteen_at_most() -> None:
    times = [SwitchTime(kind=f"k{number}") for number in range(17)]
    assert _of_load(switch_times=times[:16]) == []
    assert _of_load(switch_times=times) == ["load.switch_times"]
    assert _of_load(switch_times=times[:1] * 2) == ["load.switch_times"]


def test_what_is_hosted_is_bounded_kind_by_kind() -> None:
    nets = [Hosted(kind=kinds.CONTROLNET, name=f"n{number}") for number in range(1024)]
    loras = at_hand(*(f"{number:064x}" for number in range(1016)))
    assert _of_load(hosted=[*nets, *loras, *[applied("a" * 64)] * 8]) == []
    assert _of_load(hosted=[Hosted(kind="no kind", name="n")]) == ["load.hosted"]
