"""A gateway's configuration: what is not said keeps its default."""

from __future__ import annotations

import pytest

from bottega.config import parse
from bottega.errors import ConfigError
from bottega.gateway.config import DEFAULT_ADDRESS, DEFAULT_FLEET_ADDRESS, GatewayConfig


def test_the_gateway_is_where_everybody_looks_for_it_whatever_else_is_said_of_its_server() -> None:
    assert parse(GatewayConfig, {}, source="test").server.listen == DEFAULT_ADDRESS
    said = parse(GatewayConfig, {"server": {"drain_grace_s": 2.0}, "lease_s": 1.0}, source="test")
    assert (said.server.listen, said.server.drain_grace_s, said.lease_s) == (DEFAULT_ADDRESS, 2.0, 1.0)


def test_the_fleets_listener_has_its_own_place_on_loopback_and_room_for_every_member() -> None:
    assert parse(GatewayConfig, {}, source="test").fleet.listen == DEFAULT_FLEET_ADDRESS == "127.0.0.1:8472"
    with pytest.raises(ConfigError) as caught:
        parse(GatewayConfig, {"max_members": 500}, source="test")
    assert "fleet.max_calls is 1024; at least" in caught.value.message
    parse(GatewayConfig, {"max_members": 500, "fleet": {"max_calls": 1048}}, source="test")


def test_a_job_that_may_have_more_bytes_than_are_kept_refuses_to_start() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(GatewayConfig, {"results_bytes": 1000, "max_result_bytes": 1001}, source="test")
    assert "max_result_bytes is 1001" in caught.value.message
    parse(GatewayConfig, {"results_bytes": 1000, "max_result_bytes": 1000}, source="test")


def test_a_server_that_could_not_take_in_its_largest_message_refuses_to_start() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(GatewayConfig, {"server": {"max_message_mib": 200}}, source="test")
    assert "max_requests_mib is 128" in caught.value.message


def test_more_attempts_than_there_are_numbers_for_refuse_to_start() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(GatewayConfig, {"max_attempts": 4096}, source="test")
    assert "max_attempts" in caught.value.message
    assert "4095" in caught.value.message
    parse(GatewayConfig, {"max_attempts": 4095}, source="test")
