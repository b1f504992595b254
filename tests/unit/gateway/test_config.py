"""A gateway's configuration: what is not said keeps its default, and what does not fit refuses to start."""

from __future__ import annotations

from typing import Any

import pytest

from bottega.config import parse
from bottega.errors import ConfigError
from bottega.gateway.config import DEFAULT_ADDRESS, DEFAULT_FLEET_ADDRESS, GatewayConfig


def test_the_gateway_is_where_everybody_looks_for_it_whatever_else_is_said_of_its_server() -> None:
    assert parse(GatewayConfig, {}, source="test").server.listen == DEFAULT_ADDRESS
    said = parse(GatewayConfig, {"server": {"drain_grace_s": 2.0}, "lease_s": 1.0}, source="test")
    assert (said.server.listen, said.server.drain_grace_s, said.lease_s) == (DEFAULT_ADDRESS, 2.0, 1.0)


def test_the_fleets_listener_has_its_own_place_on_loopback() -> None:
    assert parse(GatewayConfig, {}, source="test").fleet.listen == DEFAULT_FLEET_ADDRESS == "127.0.0.1:8472"


@pytest.mark.parametrize(
    ("wrong", "told", "right"),
    [
        ({"max_members": 500}, "fleet.max_calls is 1024; it must be at least 1048", {"fleet": {"max_calls": 1048}}),
        ({"results_bytes": 1000, "max_result_bytes": 1001}, "max_result_bytes is 1001", {"max_result_bytes": 1000}),
        ({"server": {"max_message_mib": 200}}, "max_requests_mib is 128", {"server": {}}),
        ({"max_attempts": 4096}, "4095", {"max_attempts": 4095}),
    ],
    ids=[
        "no room for every member",
        "a job of more bytes than are kept",
        "a message that is too large for all of them together",
        "more attempts than numbers",
    ],
)
def test_numbers_that_do_not_fit_each_other_refuse_to_start(
    wrong: dict[str, Any], told: str, right: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(GatewayConfig, wrong, source="test")
    assert told in caught.value.message
    parse(GatewayConfig, wrong | right, source="test")
