"""The LoRA store's entry in the manifest."""

from __future__ import annotations

from bottega.manifest import ServiceSpec, SuiteSettings, UnitSettings


def _configure(suite: SuiteSettings, name: str) -> dict[str, object]:
    """Return the configuration of a store for the LoRAs in the folders of the models that the suite's workers serve."""
    from bottega.model_files.own_files import files_of_models, own_loras  # imported here to keep the manifest light

    own_of = {model.name: own_loras(model.folder) for model in suite.models}
    own = files_of_models(own_of)
    bases = {path: name for name, files in own_of.items() for path in files.hosted.values()}
    return {
        "name": name,
        "gateway": suite.fleet_address,
        "server": suite.server,
        "folder": str(suite.state / "loras"),
        "bases": {model.name: str(model.folder) for model in suite.models},
        "loras": {lora: {"path": path, "base": bases[path]} for lora, path in own.hosted.items()},
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
