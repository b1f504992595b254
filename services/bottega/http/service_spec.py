"""The manifest's entry of the HTTP API."""

from __future__ import annotations

from bottega.manifest import ServiceSpec, SuiteSettings


def _configure(suite: SuiteSettings, name: str) -> dict[str, object]:
    return {
        "name": name,
        "gateway": suite.address,
        "fleet": suite.fleet_address,
        "server": {**suite.server, "listen": suite.http_address},
    }


SPEC = ServiceSpec(
    kind="http",
    title="HTTP API",
    module="bottega.http",
    fork_after_importing="bottega.http.__main__",
    configure=_configure,
    config="bottega.http.config:HttpConfig",
    config_check="bottega.http.config:check_url_key",
    example={"name": "http"},
    requires=("httpx", "python-multipart", "sse-starlette", "starlette", "uvicorn"),
    optional=True,
    install="bottega-services[http]",
)
