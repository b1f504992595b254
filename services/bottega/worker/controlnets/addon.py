"""ControlNets as an add-on of a worker's engine: on servers, and those that the worker runs itself."""

from __future__ import annotations

from collections.abc import Sequence

from bottega.diffusion.controlnets.addon import EngineControlNets
from bottega.v1.hosted_pb2 import Hosted
from bottega.worker.controlnets.configured import ConfiguredControlNets
from bottega.worker.controlnets.provider import RemoteControlNets
from bottega.worker.controlnets.server_link import ControlLinkSettings
from bottega.worker.engine.addons import EngineAddOnContext


def create(context: EngineAddOnContext) -> WorkerControlNets:
    """The add-on that the manifest names."""
    local = ConfiguredControlNets(context.model, context.config)
    remote = RemoteControlNets(
        base=local.base,
        model=context.model,
        offers=context.offers,
        local=local.controlnets,
        settings=ControlLinkSettings(silence_s=context.config.controlnet_silence_s, devices=context.devices),
        counters=context.counters,
        heartbeat=context.heartbeat,
    )
    return WorkerControlNets(remote, local)


class WorkerControlNets(EngineControlNets):
    """remote: runs all of them. local: those of this process."""

    def __init__(self, remote: RemoteControlNets, local: ConfiguredControlNets) -> None:
        super().__init__(remote)
        self._remote = remote
        self._local = local

    def hosted(self) -> Sequence[Hosted]:
        return self._local.report()

    @property
    def open_links(self) -> int:
        return len(self._remote.servers)

    def stop(self) -> None:
        self._remote.stop()
