"""A gateway's configuration: what is not said keeps its default, and what does not fit refuses to start."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bottega.config import parse
from bottega.errors import ConfigError
from bottega.gateway.config import DEFAULT_ADDRESS, GatewayConfig, WebhooksConfig, check_files, read_webhook_secrets
from bottega.rpc.security.tenant_file import new_webhook_secret


def test_the_gateway_is_where_everybody_looks_for_it_whatever_else_is_said_of_its_server() -> None:
    said = parse(GatewayConfig, {"server": {"drain_grace_s": 2.0}, "lease_s": 1.0}, source="test")
    assert (said.server.listen, said.server.drain_grace_s, said.lease_s) == (DEFAULT_ADDRESS, 2.0, 1.0)


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


def test_webhooks_without_tenants_need_a_file_with_one_or_two_secrets(tmp_path: Path) -> None:
    file = tmp_path / "secrets"
    first, second = new_webhook_secret(), new_webhook_secret()

    def config(text: str) -> GatewayConfig:
        file.write_text(text)
        file.chmod(0o600)
        return GatewayConfig(webhooks=WebhooksConfig(hosts=("*",), secrets=str(file)))

    assert read_webhook_secrets(config(f"{first}\n{second}\n")).secrets == (first, second)
    check_files(config(first))
    for wrong in ("", f"{first} {second} {first}", "whsec_c2hvcnQ=", first.removeprefix("whsec_")):
        with pytest.raises(ConfigError) as caught:
            check_files(config(wrong))
        assert not wrong or wrong not in str(caught.value), "no secret is shown"
    with pytest.raises(ConfigError, match="bottega webhooks secret"):
        check_files(GatewayConfig(webhooks=WebhooksConfig(hosts=("*",))))
    check_files(GatewayConfig(webhooks=WebhooksConfig(hosts=("*",), secrets="/run/credentials/bottega-gateway/secret")))
    assert read_webhook_secrets(GatewayConfig()).secrets == ()


@pytest.mark.parametrize(
    ("module", "keys"), [("psycopg", {"jobs": "postgresql://db/b"}), ("obstore", {"objects": "s3://b/p"})]
)
def test_a_client_that_is_not_installed_is_found_before_the_start(
    module: str, keys: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_files(GatewayConfig(**keys))
    for name in ("postgresql", "postgresql_errors", "s3"):
        monkeypatch.delitem(sys.modules, f"bottega.storage.{name}", raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"--with 'bottega-libs\[(postgresql|s3)\]'"):
        check_files(GatewayConfig(**keys))
