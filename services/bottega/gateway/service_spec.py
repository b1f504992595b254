"""The gateway's entry in the manifest."""

from __future__ import annotations

from bottega.manifest import ServiceSpec, SuiteSettings, UnitSettings


def _configure(suite: SuiteSettings, name: str) -> dict[str, object]:
    return {
        "name": name,
        "server": {**suite.server, "listen": suite.address, "metrics_listen": suite.metrics_address},
        "fleet": {"listen": suite.fleet_address},
        "state": str(suite.state / "gateway"),
        "codec_idle_s": 300.0,
    }


SPEC = ServiceSpec(
    kind="gateway",
    title="gateway",
    module="bottega.gateway",
    fork_after_importing="bottega.gateway.__main__",
    configure=_configure,
    config="bottega.gateway.config:GatewayConfig",
    config_check="bottega.gateway.config:check_files",
    joins=False,
    install="bottega-services",
    unit=UnitSettings(tenants=True),
)
