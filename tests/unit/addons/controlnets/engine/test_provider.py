"""Where the ControlNets of a job are, as the gateway says it: taken over, or refused with all that is wrong."""

from __future__ import annotations

import math

import pytest

from bottega.addons.controlnets.engine.provider import HOSTS_FIELD, ControlHosts, ControlServer, read_hosts
from bottega.errors import InvalidRequest
from bottega.v1.controlnet_pb2 import ControlNetHosts, ControlNetServer
from tests.support.addon_messages import placed

NEAR = ControlNetServer(name="near", address="127.0.0.1:1")


def test_hosts_come_as_they_were_sent() -> None:
    sent = ControlHosts(digest="ab", servers=(ControlServer(name="near", address="h:1"),), similarity=0.5)
    assert read_hosts(placed([sent, ControlHosts()])["controlnet"]) == (sent, ControlHosts())
    assert read_hosts(b"") == ()


@pytest.mark.parametrize(
    ("hosts", "field"),
    [
        (ControlNetHosts(digest="d" * 129), "digest"),
        (ControlNetHosts(servers=[NEAR] * 65), "servers"),
        *(
            (ControlNetHosts(servers=[ControlNetServer(name=name, address=address)]), "servers")
            for name, address in (("", "h:1"), ("s", ""), ("s" * 129, "h:1"), ("s", "h" * 301))
        ),
        *(
            (ControlNetHosts(similarity=number), "similarity")
            for number in (math.nan, math.inf, -math.inf, 1.001, -1.001)
        ),
    ],
)
def test_hosts_that_break_a_rule_are_refused(hosts: ControlNetHosts, field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        read_hosts(placed([ControlNetHosts(), hosts])["controlnet"])
    assert [violation.field for violation in refusal.value.violations] == [f"{HOSTS_FIELD}[1].{field}"]


def test_noise_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no ControlNetPlacements"):
        read_hosts(b"\xff" * 9)
