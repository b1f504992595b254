"""What is done to workers with one role: one that encodes or decodes, or its engine, is killed while it is needed."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping

import psutil

from bottega import kinds
from tests.chaos.scene import ENGINE, JOIN_TIMEOUT_S, Drawing, Scene
from tests.chaos.workers import SEEDS
from tests.support.waiting import wait_until

STEPS = 40
# A decoder is frozen so many steps before a picture needs it.
_BEFORE = 8
# Kind of each worker by its name.
_KINDS: Mapping[str, str] = {"denoise": kinds.WORKER, "encode": kinds.ENCODE, "decode": kinds.DECODE}


def kill_stages(scene: Scene, *, times: int, rng: random.Random) -> None:
    """kill -9 of the only worker that encodes or decodes, or of its engine, which a picture waits for.

    It is frozen first, so that it cannot answer before. The picture is the same, whether another engine answers or the
    attempt was given back because nobody had the role.
    """
    for role in _KINDS:
        _start(scene, role)
    for _ in scene.tally.tries("kills", times):
        role, seed = rng.choice((kinds.ENCODE, kinds.DECODE)), rng.choice(SEEDS)
        scene.undisturbed(seed, STEPS)
        wait_until(lambda role=role: _is_there(scene, role), f"the worker with the role {role}")  # type: ignore[misc]
        engine = scene.engine_of(role)
        if role == kinds.ENCODE:
            engine.suspend()
        drawing = scene.draw(seed=seed, steps=STEPS)
        if role == kinds.DECODE:
            drawing.wait_for_step(STEPS - rng.randint(1, _BEFORE))
            engine.suspend()
        landed = _is_waited_for(scene, drawing, role)
        whole = rng.random() < 0.5
        if whole:
            scene.worker(role).kill()
        with contextlib.suppress(psutil.NoSuchProcess):  # its front may have ended it, because it was silent
            engine.kill()
        if whole:
            _start(scene, role)
        picture = scene.check(drawing)
        if picture is None:
            return
        if landed:
            scene.tally.count("kills")
            scene.tally.count(f"{role}_{'workers' if whole else 'engines'}_killed")
        if picture.provenance.attempts > 1:
            scene.tally.count("kills_with_another_attempt")


def _start(scene: Scene, role: str) -> None:
    """Start the worker with this role, which is its name."""
    scene.boot(role, {**ENGINE, "roles": [role]}, _KINDS[role]).result(JOIN_TIMEOUT_S)


def _is_there(scene: Scene, role: str) -> bool:
    """Whether the worker with this role serves its model."""
    return any(member.name == role and member.models for member in scene.members(_KINDS[role]))


def _is_waited_for(scene: Scene, drawing: Drawing, role: str) -> bool:
    """Whether a picture needs the frozen worker with this role now, and so cannot end."""
    if role == kinds.DECODE:
        return drawing.wait_for_step(STEPS) is not None

    def is_drawn() -> bool:
        status = drawing.status()
        return drawing.over or (status is not None and bool(scene.who_draws(status.job_id)))

    wait_until(is_drawn, "the picture to be given to a worker")
    return not drawing.over
