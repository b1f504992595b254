"""The engine's add-on for ControlNets on servers, and in the worker itself where its configuration names folders."""

from __future__ import annotations

from pathlib import Path

from bottega import kinds
from bottega.addons.controlnets.config import ControlNetsConfig
from bottega.addons.controlnets.engine import ControlNetCache, LocalControlNets, base_layout, find_controlnet
from bottega.addons.controlnets.engine.addon import EngineControlNets
from bottega.addons.controlnets.worker.provider import RemoteControlNets
from bottega.addons.controlnets.worker.server_link import ControlLinkSettings
from bottega.engine.addon import EngineAddOnContext
from bottega.model.model import Model
from bottega.model_files.digest import controlnet_digest
from bottega.v1.engine_pb2 import EngineBeat
from bottega.v1.hosted_pb2 import HOSTED_STATE_LOADED as LOADED
from bottega.v1.hosted_pb2 import HOSTED_STATE_LOADING as LOADING
from bottega.v1.hosted_pb2 import HOSTED_STATE_ON_DISK as ON_DISK
from bottega.v1.hosted_pb2 import Hosted


def create(context: EngineAddOnContext) -> WorkerControlNets:
    """Return the add-on for an engine. The manifest names this function."""
    config = context.section(ControlNetsConfig)
    local = ConfiguredControlNets(context.model, config, fixed_rows=context.fixed_rows)
    remote = RemoteControlNets(
        base=local.base,
        model=context.model,
        offers=context.offers,
        local=local.controlnets,
        settings=ControlLinkSettings(silence_s=config.silence_s, devices=context.devices),
        counters=context.counters,
        heartbeat=context.heartbeat,
    )
    return WorkerControlNets(remote, local, context.model)


class WorkerControlNets(EngineControlNets):
    """The add-on for ControlNets.

    Args:
        remote: Runs all ControlNets, on servers or in this process.
        local: The ControlNets of this process.
        model: The base model.
    """

    def __init__(self, remote: RemoteControlNets, local: ConfiguredControlNets, model: Model) -> None:
        super().__init__(remote, model)
        self._remote = remote
        self._local = local

    def fill_beat(self, beat: EngineBeat) -> None:
        """Add the ControlNets of this process, and the servers it is connected to, to the engine's periodic report."""
        beat.hosted.extend(self._local.report())
        beat.links.open += len(self._remote.servers)

    def stop(self) -> None:
        self._remote.stop()


class ConfiguredControlNets:
    """The ControlNets that a worker can run itself. They are checked at its start, and loaded when they are needed.

    Raises:
        ControlNetUnusable: A ControlNet, which the error names, cannot be used.
        TooLarge: The device does not have enough memory for them.
        OSError: A file cannot be read.
    """

    def __init__(self, model: Model, config: ControlNetsConfig, *, fixed_rows: int) -> None:
        self.base = base_layout(model.backbone.network.config, model.latent_scale)
        """The layout that ControlNets must have to fit this model."""
        folders = {name: Path(folder) for name, folder in config.folders.items()}
        self._sources = {
            name: find_controlnet(name, folder, base=self.base, dtype=model.dtype) for name, folder in folders.items()
        }
        self.digests = {name: controlnet_digest(folder) for name, folder in folders.items()}
        self.controlnets: LocalControlNets | None = None
        """The provider that runs the configured ControlNets; None if there are none."""
        self._cache: ControlNetCache | None = None
        if folders:
            weights_bytes = sum(source.size_bytes for source in self._sources.values())
            budget_bytes = min(config.budget_bytes, weights_bytes)
            model.memory.reserve("ControlNets", budget_bytes)
            self._cache = ControlNetCache(self._sources, budget_bytes=budget_bytes, device=model.device)
            self.controlnets = LocalControlNets(
                self._cache, digests=self.digests, fixed_rows=fixed_rows, backbone=model.backbone
            )

    def report(self) -> list[Hosted]:
        """Return the configured ControlNets for the worker's report to the fleet, sorted by name."""
        if self._cache is None:
            return []
        popularity = self._cache.popularity
        states = dict.fromkeys(self._cache.coming, LOADING) | dict.fromkeys(self._cache.loaded, LOADED)
        return [
            Hosted(
                kind=kinds.CONTROLNET,
                name=name,
                digest=self.digests[name],
                base=source.layout.base,
                size_bytes=source.size_bytes,
                state=states.get(name, ON_DISK),
                popularity=popularity.get(name, 0),
                control_modes=source.modes,
            )
            for name, source in sorted(self._sources.items())
        ]
