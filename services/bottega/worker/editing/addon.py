"""Masked blocks as an add-on of a worker's engine: their recordings are in its memory."""

from __future__ import annotations

from bottega.diffusion.editing.addon import EngineEdits
from bottega.diffusion.editing.recordings.memory import MemoryActivations
from bottega.worker.engine.addons import EngineAddOnContext


def create(context: EngineAddOnContext) -> EngineEdits:
    """The add-on of a worker."""
    config = context.config
    return EngineEdits(
        context.model,
        MemoryActivations(config.activations_mib << 20),
        margin=config.mask_margin,
        fixed_rows=config.fixed_rows > 0,
    )
