"""The LoRA store, as the manifest lists it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bottega import rules
from bottega.manifest import ServiceSpec, SuiteSettings, UnitSettings


def _configure(suite: SuiteSettings, name: str) -> dict[str, object]:
    """LoRAs are for the model that the workers serve, by its name."""
    base = suite.model_name
    return {
        "name": name,
        "gateway": suite.fleet_address,
        "server": suite.server,
        "folder": str(suite.state / "loras"),
        "bases": {base: str(suite.model_folder)},
        "loras": {lora: {"path": path, "base": base} for lora, path in _own_loras(suite.model_folder)},
    }


def _own_loras(model: Path) -> Iterator[tuple[str, str]]:
    """Name and path of those that lie in a model's folder: files, or folders with one."""
    for path in sorted((model / "loras").glob("*")):
        name = path.name if path.is_dir() else path.stem
        if (path.is_dir() or path.suffix == ".safetensors") and rules.is_adapter_name(name):
            yield name, str(path)


SPEC = ServiceSpec(
    kind="loras",
    title="LoRA store",
    module="bottega.loras",
    configure=_configure,
    config="bottega.loras.config:LoraConfig",
    example={
        "name": "loras",
        "loras": {name: {"path": f"miniature/{name}"} for name in ("striped", "checked", "dusk")},
    },
    add_on="bottega.gateway.addons.loras.addon:create",
    engine_add_on="bottega.worker.loras.addon:create",
    requires=("numpy",),
    install="bottega-services[loras]",
    unit=UnitSettings(links=True, reads_models=True),
)
