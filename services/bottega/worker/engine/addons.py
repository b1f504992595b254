"""Creates the add-ons of a worker's engine that the manifest names (`ServiceSpec.engine_add_on`)."""

from __future__ import annotations

from collections.abc import Iterator

from bottega import kinds
from bottega.addons.interface.engine_context import EngineAddOnContext
from bottega.engine.addon import EngineAddOn
from bottega.errors import ConfigError
from bottega.manifest import load_object, read_services


def load_addons(context: EngineAddOnContext) -> Iterator[EngineAddOn]:
    """Yield the add-ons of the manifest's services in order, but edits last; see EngineEdits.

    Raises:
        ConfigError: The manifest names something that is not an add-on, or an add-on raises it.
    """
    for service in sorted(read_services(), key=lambda service: service.kind == kinds.ACTIVATIONS):
        if not service.engine_add_on:
            continue
        addon = load_object(service.engine_add_on)(context)
        if not isinstance(addon, EngineAddOn) or addon.kind != service.kind:
            raise ConfigError(f"{service.engine_add_on} does not make an EngineAddOn of kind {service.kind}")
        yield addon
