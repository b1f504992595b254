"""The store of colours, as a manifest lists it."""

from __future__ import annotations

from bottega.manifest import ServiceSpec, SuiteSettings

KIND = "colours"


def _configure(suite: SuiteSettings, name: str) -> dict[str, object]:
    return {"name": name, "gateway": suite.fleet_address, "server": suite.server}


SPEC = ServiceSpec(
    kind=KIND,
    title="store of colours",
    module="tests.added_service",
    configure=_configure,
    add_on="tests.added_service.add_on:create",
    engine_add_on="tests.added_service.engine_add_on:create",
)
