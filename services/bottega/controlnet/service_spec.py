"""The manifest's entry of the ControlNet server."""

from __future__ import annotations

from bottega.manifest import ServiceOption, ServiceSpec, SuiteSettings, UnitSettings

_COUNT = ServiceOption(name="controlnet_servers", help="ControlNet server processes.", default=1)


def _configure(suite: SuiteSettings, name: str) -> dict[str, object]:
    """Return the configuration of a server for the ControlNets in the models' folders and those that are added."""
    # Imported here because the manifest does not need it.
    from bottega.model_files.own_files import controlnets_share, files_of_models, own_controlnets

    own = files_of_models({model.name: own_controlnets(model.folder) for model in suite.models})
    # All ControlNet servers together get as many cores as a worker.
    servers = suite.options[_COUNT.name]
    threads = suite.threads_of(servers, beside=suite.options["workers"])
    memory_share = controlnets_share([model.folder for model in suite.models], servers) / servers
    return {
        "name": name,
        "gateway": suite.fleet_address,
        "server": suite.server,
        "engine_on_demand": True,
        "engine": {
            "device": suite.device,
            "dtype": suite.dtype,
            "threads": threads,
            "device_memory_share": memory_share or 1.0,
        },
        "controlnets": own.hosted,
        "left_out": own.left_out,
        "root": str(suite.state / "controlnets"),
        "catalogue": str(suite.state / "controlnet" / f"{name}.db"),
    }


SPEC = ServiceSpec(
    kind="controlnet",
    title="ControlNet server",
    module="bottega.controlnet",
    fork_after_importing="bottega.controlnet.__main__",
    configure=_configure,
    config="bottega.controlnet.config:ControlNetConfig",
    example={
        "name": "controlnet-miniature",
        "controlnets": {"edges": "miniature/edges", "layout": "miniature/layout"},
    },
    count=_COUNT,
    add_on="bottega.addons.controlnets.gateway.addon:create",
    engine_add_on="bottega.addons.controlnets.worker.addon:create",
    folders=("controlnets",),
    requires=("accelerate", "diffusers", "safetensors", "torch", "transformers"),
    install="bottega-services[controlnet]",
    unit=UnitSettings(
        on_device=True,
        links=True,
        reads_models=True,
        start_s=180,  # more than start_stall_s of 120 s; then the service asks for more time with each ControlNet
    ),
)
