"""A rolling restart of every service while clients of the SDK draw: none of them may notice more than a pause."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Mapping
from pathlib import Path

from bottega.client import Picture
from tests.chaos.controlnets import SERVERS, control, host
from tests.chaos.loras import BYTES_PER_S, LORA, keep
from tests.chaos.scene import Scene
from tests.support.services import STOP_TIMEOUT_S
from tests.support.waiting import wait_until

# With a checkpoint every sixth: a picture that is cut off has some to run again.
STEPS = 60
_CLIENTS = 3
# By what they are drawn with.
PLAIN, CONTROLLED, STYLED, BOTH = SEEDS = (11, 12, 13, 14)


def roll(scene: Scene, *, times: int, rng: random.Random) -> None:
    """SIGTERM, wait, start again, so many times: each worker, each ControlNet server, the LoRA store and the gateway.

    Who is told to stop finishes what it has begun: no step runs again, and no ControlNet goes on elsewhere. Of the
    pictures some have a ControlNet, some a LoRA, some both. Needs two workers.
    """
    nets = host(scene, SERVERS[:2])
    keep(scene)
    controlled, styled = {"controlnets": [control()]}, {"lora": [LORA]}
    scene.additions = {CONTROLLED: controlled, STYLED: styled, BOTH: {**controlled, **styled}}
    scene.look_first(SEEDS, STEPS)
    done = threading.Event()
    places = rng.sample(range(len(SEEDS)), _CLIENTS)
    drawing = [threading.Thread(target=_draw_on, args=(scene, done, place), daemon=True) for place in places]
    for thread in drawing:
        thread.start()
    try:
        for _ in range(times):
            _restart_all(scene, nets)
            scene.tally.count("cycles")
    finally:
        done.set()
        for thread in drawing:
            thread.join(4 * STOP_TIMEOUT_S)
    for figure in ("pictures", "pictures_with_controlnets", "pictures_with_loras", "controlnets_stopped_in_use"):
        scene.tally.reached(figure, times)


def _restart_all(scene: Scene, nets: Mapping[str, Path]) -> None:
    for name in scene.workers:
        _stop(scene, name)
        scene.start_worker(name)
    for name in SERVERS[:2]:
        _wait_for_session(scene, name)
        _stop(scene, name)
        scene.start_controlnets(name, nets)
    _stop(scene, "loras")
    scene.start_loras(BYTES_PER_S)
    _expect_clean(scene, "the gateway", scene.gateway.stop())
    scene.start_gateway()
    scene.wait_for_workers(len(scene.workers))


def _wait_for_session(scene: Scene, name: str) -> None:
    """So that there is something to drain, where the gateway still sends anybody there: one loaded server may do."""
    with contextlib.suppress(AssertionError):
        wait_until(lambda: scene.hosting().get(name, 0) > 0, f"a session at {name}")
        scene.tally.count("controlnets_stopped_in_use")


def _draw_on(scene: Scene, done: threading.Event, place: int) -> None:
    number = place
    while not done.is_set():
        number += 1
        picture = scene.check(scene.draw(seed=SEEDS[number % len(SEEDS)], steps=STEPS))
        if picture is not None:
            _count(scene, picture)


def _count(scene: Scene, picture: Picture) -> None:
    used = picture.provenance
    scene.tally.count("pictures")
    scene.tally.check("steps that ran again in a restart", used.repeated_steps, 0)
    for net in used.controlnets:
        scene.tally.count("pictures_with_controlnets")
        scene.tally.check("servers of a ControlNet in a restart", len(net.servers), 1)
    for _ in used.loras:
        scene.tally.count("pictures_with_loras")


def _stop(scene: Scene, name: str) -> None:
    _expect_clean(scene, name, scene.worker(name).stop())


def _expect_clean(scene: Scene, who: str, exit_code: int) -> None:
    if exit_code != 0:
        scene.tally.faults.append(f"{who} ended with {exit_code} when it was told to stop")
