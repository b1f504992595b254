"""The scaler's entry in the manifest of services."""

from __future__ import annotations

from bottega.manifest import ServiceSpec, SuiteSettings, UnitSettings


def _configure(suite: SuiteSettings, name: str) -> dict[str, object]:
    return {"name": name, "gateway": suite.fleet_address, "server": suite.server}


SPEC = ServiceSpec(
    kind="scale",
    title="scaler",
    module="bottega.scale",
    configure=_configure,
    config="bottega.scale.config:ScaleConfig",
    config_check="bottega.scale.config:check_configuration",
    example={
        "name": "scale",
        "pools": [{"model": "miniature", "minimum": 1, "instances": ["miniature"]}],
    },
    in_suite=False,
    unit=UnitSettings(starts_units=True),
)
