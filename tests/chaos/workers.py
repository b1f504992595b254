"""What is done to workers, inside a request at a random step: killed, frozen, and their engines or fronts frozen."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable, Sequence

import psutil

from tests.chaos.scene import ASKING_S, HANG_S, NOTICED_S, Drawing, Scene
from tests.support.waiting import wait_until

STEPS = 120
SEEDS = (1, 2, 3)
# A checkpoint is made every tenth of the steps.
CHECKPOINTS = 10
MOST_REPEATED = STEPS // CHECKPOINTS + 1
FROZEN_FRONT_S = 2 * HANG_S


def kill_workers(
    scene: Scene, *, times: int, rng: random.Random, seeds: Sequence[int] = SEEDS, steps: int = STEPS
) -> None:
    """kill -9 at a random step, until so many kills have landed inside a request. Needs two workers, better three.

    seeds: of the pictures, which have so many steps.
    """
    name = ""
    for _ in scene.tally.tries("kills", times):
        if name:
            scene.boot(name)
        scene.wait_for_workers(2)
        drawing, name = _caught(scene, rng, seeds, steps)
        scene.worker(name).kill()
        picture = scene.check(drawing)
        if picture is None:
            return
        if picture.provenance.attempts < 2:
            continue
        scene.tally.count("kills")
        if picture.provenance.parameters.keep_for_editing:
            continue  # it is drawn from its beginning again
        scene.tally.most("most_repeated_steps", picture.provenance.repeated_steps)
        scene.tally.check("steps that ran again", picture.provenance.repeated_steps, steps // CHECKPOINTS + 1)


def freeze_workers(scene: Scene, *, times: int, rng: random.Random) -> None:
    """SIGSTOP: noticed within the lease, and drawn elsewhere."""

    def front(name: str) -> psutil.Process:
        return psutil.Process(scene.worker(name).process.pid)

    _freeze(scene, "frozen_worker", front, times=times, rng=rng, within_s=NOTICED_S + ASKING_S)


def freeze_engines(scene: Scene, *, times: int, rng: random.Random) -> None:
    """SIGSTOP of the engine process: noticed by its front, which has another one then."""
    _freeze(scene, "frozen_engine", scene.engine_of, times=times, rng=rng, within_s=HANG_S + NOTICED_S)


def _freeze(
    scene: Scene,
    figure: str,
    process_of: Callable[[str], psutil.Process],
    *,
    times: int,
    rng: random.Random,
    within_s: float,
) -> None:
    """within_s: until the worker is out of the fleet."""
    for _ in scene.tally.tries(f"{figure}s", times):
        scene.wait_for_workers(2)
        drawing, name = _caught(scene, rng)
        frozen = process_of(name)
        began = time.monotonic()
        frozen.suspend()
        try:
            wait_until(lambda name=name: name not in scene.joined(), "the silence to be noticed")  # type: ignore[misc]
            noticed_s = time.monotonic() - began
            picture = scene.check(drawing)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):  # an engine's front has ended it
                frozen.resume()
        wait_until(lambda name=name: name in scene.joined(), f"{name} to come back")  # type: ignore[misc]
        if picture is None:
            return
        if picture.provenance.attempts >= 2:
            scene.tally.count(f"{figure}s")
            scene.tally.most(f"{figure}_noticed_s", noticed_s)
            scene.tally.check(f"seconds until a {figure.replace('_', ' ')} was out", noticed_s, within_s)


def freeze_fronts(scene: Scene, *, times: int, rng: random.Random) -> None:
    """SIGSTOP of the front alone, for longer than an engine may be silent: the picture is drawn elsewhere, and when the
    front goes on, its engine lives and the worker draws again."""
    for _ in scene.tally.tries("frozen_fronts", times):
        scene.wait_for_workers(2)
        drawing, name = _caught(scene, rng)
        process, engine = scene.worker(name).process, scene.engine_of(name)
        began = time.monotonic()
        process.send_signal(signal.SIGSTOP)
        try:
            picture = scene.check(drawing)
            time.sleep(max(0.0, FROZEN_FRONT_S - (time.monotonic() - began)))
        finally:
            process.send_signal(signal.SIGCONT)
        wait_until(lambda name=name: name in scene.joined(), f"{name} to come back")  # type: ignore[misc]
        time.sleep(HANG_S)  # what it could still hold against its engine, it would by then
        if not engine.is_running() or scene.engine_of(name) != engine:
            scene.tally.faults.append(f"{name} has killed its engine, which was well")
        if picture is None:
            return
        if picture.provenance.attempts >= 2:
            scene.tally.count("frozen_fronts")


def _caught(scene: Scene, rng: random.Random, seeds: Sequence[int] = SEEDS, steps: int = STEPS) -> tuple[Drawing, str]:
    """A picture that is being drawn, at a random step, and the worker that draws it."""
    while True:
        seed = rng.choice(seeds)
        scene.undisturbed(seed, steps)
        drawing = scene.draw(seed=seed, steps=steps)
        status = drawing.wait_for_step(rng.randint(1, steps - 15))
        name = scene.who_draws(status.job_id) if status is not None else ""
        if name:
            return drawing, name
        scene.check(drawing)
