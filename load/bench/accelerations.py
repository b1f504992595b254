"""What benches of edits and of a day have an engine try when it starts: on a CPU it tries nothing that is not named."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bottega.diffusion.engine.engine import Engine

ACCELERATIONS = ("channels_last.unet", "channels_last.vae")
_DEADLINE_S = 120.0


def accelerate(engine: Engine) -> None:
    """As a worker whose configuration names them. Before `warm_up`; once for a model, whose layout it changes."""
    from bottega.diffusion.acceleration.registry import candidates  # not for a process that has no engine

    engine.check_accelerations(candidates(ACCELERATIONS, engine.model), deadline_s=_DEADLINE_S)
