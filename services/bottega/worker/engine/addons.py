"""What add-ons of a worker's engine are made from. The manifest names them (`ServiceSpec.engine_add_on`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bottega import kinds
from bottega.diffusion.engine.addon import EngineAddOn
from bottega.diffusion.heartbeat import Heartbeat
from bottega.diffusion.model.model import Model
from bottega.errors import ConfigError
from bottega.manifest import load_object, read_services
from bottega.transport import DeviceLinks, LinkCounters, OfferSource
from bottega.worker.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAddOnContext:
    """What an add-on of an engine may use.

    offers: opens links to services. counters: of all links of the process. heartbeat: beats while a turn runs.
    devices: for links that may be between devices.
    """

    config: EngineConfig
    model: Model
    offers: OfferSource
    counters: LinkCounters
    heartbeat: Heartbeat
    devices: DeviceLinks | None = None


def load_addons(context: EngineAddOnContext) -> Iterator[EngineAddOn]:
    """Those of the services in the manifest, in its order; edits stand behind the others, see EngineEdits.

    Raises ConfigError, and what they raise.
    """
    for service in sorted(read_services(), key=lambda service: service.kind == kinds.ACTIVATIONS):
        if not service.engine_add_on:
            continue
        addon = load_object(service.engine_add_on)(context)
        if not isinstance(addon, EngineAddOn) or addon.kind != service.kind:
            raise ConfigError(f"{service.engine_add_on} makes no EngineAddOn of kind {service.kind}")
        yield addon
