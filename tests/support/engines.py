"""Engines with ControlNets and LoRAs, as a worker's process makes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from bottega.addons.controlnets.engine.addon import EngineControlNets
from bottega.addons.controlnets.engine.provider import ControlNetProvider
from bottega.addons.loras.engine import LoraSource, LoraWeights, SwapCosts
from bottega.addons.loras.engine.addon import EngineLoras
from bottega.device.heartbeat import Heartbeat
from bottega.engine.addon import EngineAddOn
from bottega.engine.engine import Engine
from bottega.engine.limits import EngineLimits
from bottega.engine.parallel.remote_rows import OffloadTarget
from bottega.model.model import Model

# How long a job waits for its LoRAs.
LORA_TIMEOUT_S = 10.0
TOGETHER = EngineLimits(max_rows=64, max_wait_turns=0)
"""Limits with which all that fit into a group share every turn, whatever turns cost here and now: nobody may be passed
over."""


def make_engine(
    model: Model,
    limits: EngineLimits,
    *,
    controlnets: ControlNetProvider | None = None,
    loras: LoraSource | None = None,
    addons: Sequence[EngineAddOn] = (),
    peer: OffloadTarget | None = None,
    heartbeat: Heartbeat | None = None,
    clock: Callable[[], float] = time.monotonic,
    merges_half: bool = False,
) -> Engine:
    """Return an engine with ControlNets and LoRAs.

    Args:
        controlnets, loras: Providers of those that jobs name.
        addons: Further add-ons.
        merges_half: See LoraWeights.
    """
    ours = (
        EngineLoras(
            model,
            loras,
            patches=not limits.fixed_rows,
            merges_half=merges_half,
            timeout_s=LORA_TIMEOUT_S,
            clock=clock,
        ),
        EngineControlNets(controlnets, model),
    )
    return Engine(model, limits, addons=(*ours, *addons), peer=peer, heartbeat=heartbeat, clock=clock)


class FixedCosts(SwapCosts):
    """LoRAs always go into the weights, or never do, whatever was measured."""

    def __init__(self, *, pays: bool) -> None:
        super().__init__()
        self._pays = pays

    def pays(self, *_: object, **__: object) -> bool:
        return self._pays


def lora_weights(engine: Engine) -> LoraWeights:
    (loras,) = (addon for addon in engine.addons if isinstance(addon, EngineLoras))
    return loras.weights
