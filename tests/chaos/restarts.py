"""A rolling restart of every service while clients of the SDK draw: none of them may notice more than a pause."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from tests.chaos.scene import Scene
from tests.running import STOP_TIMEOUT_S

# With a checkpoint every sixth: a picture that is cut off has some to run again.
STEPS = 60
SEEDS = (11, 12, 13, 14)


def roll(scene: Scene, *, cycles: int, workers: Sequence[str], clients: int = 3) -> None:
    """SIGTERM, wait, start again: one worker after the other and then the gateway, so many times.

    Who is told to stop finishes what it draws: no step runs again.
    """
    for seed in SEEDS:
        scene.undisturbed(seed, STEPS)
    done = threading.Event()
    drawing = [threading.Thread(target=_draw_on, args=(scene, done, place), daemon=True) for place in range(clients)]
    for thread in drawing:
        thread.start()
    try:
        for _ in range(cycles):
            for name in workers:
                _expect_clean(scene, name, scene.worker(name).stop())
                scene.start_worker(name)
            _expect_clean(scene, "the gateway", scene.gateway.stop())
            scene.start_gateway()
            scene.wait_for_workers(len(workers))
            scene.tally.count("cycles")
    finally:
        done.set()
        for thread in drawing:
            thread.join(4 * STOP_TIMEOUT_S)
    scene.tally.reached("pictures", cycles)


def _draw_on(scene: Scene, done: threading.Event, place: int) -> None:
    number = place
    while not done.is_set():
        number += 1
        picture = scene.check(scene.draw(seed=SEEDS[number % len(SEEDS)], steps=STEPS))
        if picture is not None:
            scene.tally.count("pictures")
            scene.tally.check("steps that ran again in a restart", picture.provenance.repeated_steps, 0)


def _expect_clean(scene: Scene, who: str, exit_code: int) -> None:
    if exit_code != 0:
        scene.tally.faults.append(f"{who} ended with {exit_code} when it was told to stop")
