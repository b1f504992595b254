"""What members say that they host is bounded in number, and named so that it can be told apart."""

from __future__ import annotations

import time

import pytest

from bottega import kinds
from bottega.gateway.fleet.members import hosted_by_kind
from bottega.gateway.fleet.validation import MAX_USED_KINDS, check_load
from bottega.v1 import fleet_pb2
from bottega.v1.hosted_pb2 import HOSTED_STATE_LOADED, Hosted


def hosted(kind: str, name: str = "", digest: str = "") -> Hosted:
    return Hosted(kind=kind, name=name, digest=digest, state=HOSTED_STATE_LOADED)


def violated(*items: Hosted) -> set[str]:
    return {violation.field for violation in check_load(fleet_pb2.Load(hosted=items))}


def test_a_lora_may_have_its_digest_alone_and_a_controlnet_has_a_name() -> None:
    assert violated(hosted(kinds.LORAS, digest="ab" * 32), hosted(kinds.CONTROLNET, name="edges")) == set()
    assert violated(hosted(kinds.CONTROLNET, digest="ab" * 32)) == {"load.hosted"}


@pytest.mark.parametrize("number", [MAX_USED_KINDS, MAX_USED_KINDS + 1])
def test_kinds_are_bounded(number: int) -> None:
    items = [hosted("k" + "abcdefghijklmnopqrstuvwxyz"[index], name="one") for index in range(number)]
    assert bool(violated(*items)) == (number > MAX_USED_KINDS)


def test_a_report_of_a_hundred_thousand_kinds_is_refused_at_once() -> None:
    load = fleet_pb2.Load(hosted=[hosted(f"k{index}", name="one") for index in range(100_000)])
    began_s = time.process_time()
    assert {violation.field for violation in check_load(load)} == {"load.hosted"}
    assert time.process_time() - began_s < 2


def test_each_kind_has_its_own_items_and_what_it_takes_to_switch() -> None:
    load = fleet_pb2.Load(hosted=[hosted(kinds.LORAS, digest="ab" * 32), hosted(kinds.CONTROLNET, name="edges")])
    load.switch_times.add(kind=kinds.LORAS, seconds=0.5)
    load.switch_times.add(kind="other", seconds=0.25)
    found = hosted_by_kind(load)
    assert {kind: (len(each.items), each.switch_s) for kind, each in found.items()} == {
        kinds.LORAS: (1, 0.5),
        kinds.CONTROLNET: (1, 0.0),
        "other": (0, 0.25),
    }
