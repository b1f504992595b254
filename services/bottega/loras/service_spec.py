"""The LoRA store's entry in the manifest."""

from __future__ import annotations

from bottega.manifest import ServiceSpec, SuiteSettings, UnitSettings


def _configure(suite: SuiteSettings, name: str) -> dict[str, object]:
    """Return the configuration of a store for the LoRAs in the folder of the model that the suite's workers serve."""
    from bottega.model_files.own_files import own_loras  # imported here to keep the manifest light

    base, own = suite.model_name, own_loras(suite.model_folder)
    return {
        "name": name,
        "gateway": suite.fleet_address,
        "server": suite.server,
        "folder": str(suite.state / "loras"),
        "bases": {base: str(suite.model_folder)},
        "loras": {lora: {"path": path, "base": base} for lora, path in own.hosted.items()},
        "left_out": own.left_out,
    }


SPEC = ServiceSpec(
    kind="loras",
    title="LoRA store",
    module="bottega.loras",
    fork_after_importing="bottega.loras.__main__",
    configure=_configure,
    config="bottega.loras.config:LoraConfig",
    config_check="bottega.loras.config:check_configured",
    example={
        "name": "loras",
        "loras": {name: {"path": f"miniature/{name}"} for name in ("striped", "checked", "dusk")},
    },
    add_on="bottega.addons.loras.gateway.addon:create",
    engine_add_on="bottega.addons.loras.worker.addon:create",
    front_add_on="bottega.addons.loras.front:LorasFront",
    requires=("numpy",),
    install="bottega-services[loras]",
    unit=UnitSettings(links=True, reads_models=True),
)
