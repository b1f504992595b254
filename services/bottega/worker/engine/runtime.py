"""All that draws in a worker's engine process: the model on its device, warm, and what ControlNets, LoRAs and a peer
need.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from bottega.diffusion.engine.engine import Engine, EngineLimits
from bottega.diffusion.heartbeat import Heartbeat
from bottega.diffusion.model.model import DTYPES, load_model, pick_device
from bottega.miniature import WEIGHTS
from bottega.rpc.link_service import link_endpoints
from bottega.worker.config import EngineConfig
from bottega.worker.controlnets import ControlLinkSettings, RemoteControlNets
from bottega.worker.controlnets.configured import ConfiguredControlNets
from bottega.worker.link_requests import LinkRequests
from bottega.worker.loras import LoraCache, LoraLinkSettings
from bottega.worker.peer import Follower, Leader, PeerLinkSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """All that draws. local_controlnets: the ControlNets of this process; controlnets: those, and those on servers.

    loras: those of stores. heartbeat: of the engine's turns. peer: the other worker of a pair, as this engine leads it.
    """

    config: EngineConfig
    engine: Engine
    controlnets: RemoteControlNets
    local_controlnets: ConfiguredControlNets
    loras: LoraCache
    heartbeat: Heartbeat
    peer: Leader | None = None

    def follow(self, post: Callable[[Callable[[], None]], None]) -> Follower | None:
        """What it does for the other worker of a pair. post: see Follower. Raises ConfigError."""
        if self.peer is None:
            return None
        config = self.config
        endpoints = link_endpoints(config.links_listen, config.links_socket)
        return Follower(endpoints, remote_jobs=self.engine.remote_jobs, counters=self.controlnets.counters, post=post)


def load_runtime(config: EngineConfig, link_requests: LinkRequests) -> Runtime:
    """Loads the model and warms it up.

    Raises OSError, ValueError or BottegaError with the reason when model, device or a ControlNet cannot be used.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    folder = WEIGHTS if config.model == "miniature" else Path(config.model)
    name = config.model_name or ("miniature" if config.model == "miniature" else folder.name)
    model = load_model(folder, name=name, device=pick_device(config.device), dtype=DTYPES[config.dtype])
    limits = EngineLimits(
        max_rows=config.max_rows,
        fixed_rows=config.fixed_rows,
        max_wait_turns=config.max_wait_turns,
        max_pixels=config.max_pixels,
        checkpoint_interval_s=config.checkpoint_interval_s,
        progress_interval_s=config.progress_interval_s,
        lora_timeout_s=config.lora_timeout_s,
        pristine_on_host=config.lora_pristine == "host",
    )
    heartbeat = Heartbeat()
    local_controlnets = ConfiguredControlNets(model, config)
    controlnets = RemoteControlNets(
        base=local_controlnets.base,
        dtype=model.dtype,
        device=model.device,
        offers=link_requests,
        local=local_controlnets.controlnets,
        settings=ControlLinkSettings(silence_s=config.controlnet_silence_s),
        heartbeat=heartbeat,
    )
    peer = None
    if config.peer:
        settings = PeerLinkSettings(silence_s=config.peer_silence_s)
        terms = {"model_hash": model.digest, "dtype": model.dtype_name}
        peer = Leader(config.peer, terms=terms, offers=link_requests, counters=controlnets.counters, settings=settings)
    loras = LoraCache(
        offers=link_requests,
        device=model.device,
        dtype=model.dtype,
        budget_bytes=config.lora_budget_bytes,
        settings=LoraLinkSettings(silence_s=config.lora_silence_s),
        counters=controlnets.counters,
    )
    engine = Engine(model, limits, controlnets=controlnets, loras=loras, peer=peer, heartbeat=heartbeat)
    engine.warm_up()
    return Runtime(
        config=config,
        engine=engine,
        controlnets=controlnets,
        local_controlnets=local_controlnets,
        loras=loras,
        heartbeat=heartbeat,
        peer=peer,
    )
