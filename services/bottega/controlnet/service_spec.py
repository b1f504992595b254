"""The ControlNet server, as the manifest lists it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bottega import rules
from bottega.manifest import ServiceOption, ServiceSpec, SuiteSettings, UnitSettings

_COUNT = ServiceOption(name="controlnet_servers", help="ControlNet server processes.", default=1)


def _configure(suite: SuiteSettings, name: str) -> dict[str, object]:
    """It hosts the ControlNets in the model's own folder, if it has some, and those that are added."""
    # All servers together have the cores of one more worker.
    threads = suite.threads_of(suite.options[_COUNT.name], beside=suite.options["workers"])
    return {
        "name": name,
        "gateway": suite.fleet_address,
        "server": suite.server,
        "engine": {"device": suite.device, "dtype": suite.dtype, "threads": threads},
        "controlnets": dict(_own_controlnets(suite.model_folder)),
        "root": str(suite.state / "controlnets"),
        "catalogue": str(suite.state / "controlnet" / f"{name}.db"),
    }


def _own_controlnets(model: Path) -> Iterator[tuple[str, str]]:
    """Name and folder of those that lie in a model's folder."""
    for config in sorted((model / "controlnets").glob("*/config.json")):
        if rules.is_adapter_name(config.parent.name):
            yield config.parent.name, str(config.parent)


SPEC = ServiceSpec(
    kind="controlnet",
    title="ControlNet server",
    module="bottega.controlnet",
    configure=_configure,
    config="bottega.controlnet.config:ControlNetConfig",
    example={
        "name": "controlnet-miniature",
        "controlnets": {"edges": "miniature/edges", "layout": "miniature/layout"},
    },
    count=_COUNT,
    add_on="bottega.gateway.addons.controlnets.addon:create",
    engine_add_on="bottega.worker.controlnets.addon:create",
    folders=("controlnets",),
    requires=("accelerate", "diffusers", "safetensors", "torch", "transformers"),
    install="bottega-services[controlnet]",
    unit=UnitSettings(
        on_device=True,
        links=True,
        reads_models=True,
        start_s=660,  # a folder of many ControlNets on a slow disk takes its time to load
    ),
)
