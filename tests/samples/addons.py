"""The add-ons of a gateway whose fleet is empty."""

from __future__ import annotations

from typing import NoReturn

from prometheus_client import CollectorRegistry

from bottega.addons.cache.gateway import CacheAddOn
from bottega.addons.controlnets.gateway.addon import ControlNetAddOn
from bottega.addons.edits.gateway import ActivationsAddOn
from bottega.addons.interface.gateway_addon import AddOn, AddOnMetrics
from bottega.addons.loras.gateway.addon import LoraAddOn
from bottega.clocks import Clock
from bottega.gateway.fleet.registry import Fleet
from bottega.rpc.channel import Target
from tests.samples.controlnet_hosts import bounds


def sample_addons() -> tuple[AddOn, ...]:
    clock = Clock()
    fleet = Fleet(lease_s=1, model_grace_s=1, bounds=bounds(1), clock=clock)
    metrics = AddOnMetrics(CollectorRegistry())
    return (
        LoraAddOn(fleet, metrics),
        CacheAddOn(fleet, metrics),
        ControlNetAddOn(
            fleet=fleet,
            connect=_nowhere,
            connect_to_copy=_nowhere,
            connect_to_evict=_nowhere,
            metrics=metrics,
            clock=clock,
        ),
        ActivationsAddOn(fleet, metrics, clock),
    )


def _nowhere(target: Target) -> NoReturn:
    raise AssertionError(f"no service has joined, at {target.address} or elsewhere")
