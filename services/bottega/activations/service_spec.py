"""The manifest entry of the activation store."""

from __future__ import annotations

from bottega.manifest import ServiceSpec, SuiteSettings, UnitSettings

# For a suite on one machine, which needs its memory and disk for other things as well.
_SUITE_BUDGET_BYTES = 1 << 30
_SUITE_DISK_BYTES = 16 << 30


def _configure(suite: SuiteSettings, name: str) -> dict[str, object]:
    return {
        "name": name,
        "gateway": suite.fleet_address,
        "server": suite.server,
        "folder": str(suite.state / "activations"),
        "budget_bytes": _SUITE_BUDGET_BYTES,
        "disk_bytes": _SUITE_DISK_BYTES,
    }


SPEC = ServiceSpec(
    kind="activations",
    title="activation store",
    module="bottega.activations",
    fork_after_importing="bottega.activations.__main__",
    configure=_configure,
    config="bottega.activations.config:ActivationsConfig",
    example={"name": "activations"},
    add_on="bottega.addons.edits.gateway:create",
    engine_add_on="bottega.addons.edits.worker.addon:create",
    front_add_on="bottega.addons.edits.front:EditsFront",
    install="bottega-services[activations]",
    unit=UnitSettings(links=True),
)
