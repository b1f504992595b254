"""What benches of edits and of a day have an engine try when it starts: on a CPU it tries nothing that is not named."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from bottega.client import Client

if TYPE_CHECKING:
    from bottega.diffusion.engine.engine import Engine

ACCELERATIONS = ("channels_last.unet", "channels_last.vae")
_DEADLINE_S = 120.0


def accelerate(engine: Engine) -> None:
    """As a worker whose configuration names them. Before `warm_up`; once for a model, whose layout it changes."""
    from bottega.diffusion.acceleration.registry import candidates  # not for a process that has no engine

    engine.check_accelerations(candidates(ACCELERATIONS, engine.model), deadline_s=_DEADLINE_S)
    for each in engine.accelerations:
        _say(each.name, kept=each.kept, speedup=each.speedup)


def say_of_workers(client: Client) -> None:
    """What those of the fleet have kept: by chance it may be another one from run to run."""
    for member in client.fleet().members:
        for each in member.load.accelerations:
            _say(each.name, kept=each.kept, speedup=each.speedup)


def _say(name: str, *, kept: bool, speedup: float) -> None:
    # Not to stdout, which some sides answer by.
    print(f"{name}: {speedup:.2f} times as fast, {'kept' if kept else 'not kept'}", file=sys.stderr, flush=True)
