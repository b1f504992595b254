"""What is done to workers whose edits take from a recording: killed at a random step, and another one goes on."""

from __future__ import annotations

import random

from tests.chaos.activation_stores import WORKER
from tests.chaos.recorded_edits import UNPADDED_ENGINE, compare, edit, record_template, wait_for_links
from tests.chaos.scene import Drawing, Scene
from tests.chaos.workers import MOST_REPEATED, STEPS

WORKERS = (WORKER, "editor-b")


def kill_reusing_workers(scene: Scene, *, times: int, rng: random.Random) -> None:
    """kill -9 at a random step of an edit that computes its mask alone: the other worker goes on from the checkpoint,
    with the recording that the first one used, from the store or from its own memory.

    The picture is the same within the rounding of what was kept in float16: groups are not padded, and how many blocks
    come in time differs.
    """
    if WORKER in scene.joined():  # and a store, which may send slowly
        scene.worker("activations").kill()
        scene.start_activations()
        wait_for_links(scene, 1)
    else:
        scene.start_activations()
        scene.start_worker(WORKER, UNPADDED_ENGINE)
    recorded = record_template(scene, STEPS, WORKER)
    missing = WORKERS[1]
    for _ in scene.tally.tries("kills", times):
        if missing:
            scene.start_worker(missing, UNPADDED_ENGINE)
        wait_for_links(scene, len(WORKERS))
        drawing = edit(scene, STEPS)
        missing = _drawn_by(scene, drawing, rng.randint(1, STEPS - 15))
        if missing:
            scene.worker(missing).kill()
        picture = drawing.picture(scene.tally)
        if picture is None:
            return
        reused = compare(scene, picture, recorded)
        if picture.provenance.attempts < 2:
            continue
        scene.tally.count("kills")
        scene.tally.most("most_repeated_steps", picture.provenance.repeated_steps)
        scene.tally.check("steps that ran again", picture.provenance.repeated_steps, MOST_REPEATED)
        if reused:
            scene.tally.count("resumed_edits_that_reused_blocks")
    # A worker may be asked for the edit in the moment in which it has no link.
    scene.tally.reached("resumed_edits_that_reused_blocks", 1 + times // 2)


def _drawn_by(scene: Scene, drawing: Drawing, step: int) -> str:
    """The worker that draws it after so many steps; empty where it is over, or nobody says so."""
    status = drawing.wait_for_step(step)
    return scene.who_draws(status.job_id) if status is not None else ""
