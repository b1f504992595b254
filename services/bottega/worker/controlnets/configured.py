"""The ControlNets that a worker runs itself when no server does: found at the start, loaded when they are needed."""

from __future__ import annotations

from pathlib import Path

from bottega import kinds
from bottega.diffusion.controlnets import (
    ControlNetCache,
    LocalControlNets,
    base_layout,
    find_controlnet,
)
from bottega.diffusion.model.model import Model
from bottega.model_files.digest import controlnet_digest
from bottega.v1.hosted_pb2 import HOSTED_STATE_LOADED as LOADED
from bottega.v1.hosted_pb2 import HOSTED_STATE_LOADING as LOADING
from bottega.v1.hosted_pb2 import HOSTED_STATE_ON_DISK as ON_DISK
from bottega.v1.hosted_pb2 import Hosted
from bottega.worker.config import EngineConfig


class ConfiguredControlNets:
    """base: the layout that ControlNets of the model have. controlnets: runs them; None where there are none.

    digests: by name. Raises ControlNetUnusable naming one that cannot be used, TooLarge where there is no room for
    them on the device, OSError.
    """

    def __init__(self, model: Model, config: EngineConfig) -> None:
        self.base = base_layout(model.backbone.unet.config, model.latent_scale)
        folders = {name: Path(folder) for name, folder in config.controlnets.items()}
        self._sources = {
            name: find_controlnet(name, folder, base=self.base, dtype=model.dtype) for name, folder in folders.items()
        }
        self.digests = {name: controlnet_digest(folder) for name, folder in folders.items()}
        self.controlnets: LocalControlNets | None = None
        self._cache: ControlNetCache | None = None
        if folders:
            weights_bytes = sum(source.size_bytes for source in self._sources.values())
            budget_bytes = min(config.controlnet_budget_bytes, weights_bytes)
            model.memory.reserve("ControlNets", budget_bytes)
            self._cache = ControlNetCache(self._sources, budget_bytes=budget_bytes, device=model.device)
            self.controlnets = LocalControlNets(self._cache, digests=self.digests, fixed_rows=config.fixed_rows)

    def report(self) -> list[Hosted]:
        """All of them, by name."""
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
            )
            for name, source in sorted(self._sources.items())
        ]
