"""What is done to activation stores: killed while edits load from them, and while they record what edits put out."""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray

from bottega.v1 import activations_pb2 as pb
from tests.chaos.recorded_edits import (
    UNPADDED_ENGINE,
    call_store,
    compare,
    edit,
    finished_edit,
    is_stored,
    let_go,
    pixels_of,
    record_template,
    wait_for_links,
)
from tests.chaos.scene import Drawing, Scene

STEPS = 40
WORKER = "editor"
# To a worker, where its sections are sent: an edit of a second takes them in as it goes. 0 shares the memory.
_RATES = (0, 4 << 20)


def kill_loading_stores(scene: Scene, *, times: int, rng: random.Random) -> None:
    """kill -9 of the store in mid-edit: the picture comes, with what was loaded and what was computed instead.

    The worker has nothing of the template itself, and the store has all of it again when it is back.
    """
    recorded = _set_up(scene)
    for _ in scene.tally.tries("kills", times):
        let_go(scene, WORKER)
        drawing = edit(scene, STEPS)
        landed = _kill_at(scene, drawing, rng)
        picture = drawing.picture(scene.tally)
        _start_again(scene, rng)
        if picture is None:
            return
        if compare(scene, picture, recorded):
            scene.tally.count("edits_that_reused_blocks")
        if not is_stored(scene):
            scene.tally.faults.append("a template that was complete is gone")
            return
        if landed:
            scene.tally.count("kills")
    _take_again(scene, recorded)
    scene.tally.reached("edits_that_reused_blocks", 1 + times // 2)


def kill_recording_stores(scene: Scene, *, times: int, rng: random.Random) -> None:
    """kill -9 of the store while a template is recorded: the picture is the same, byte for byte, and what the store has
    afterwards is the whole template or nothing of it.
    """
    recorded = _set_up(scene)
    for _ in scene.tally.tries("kills", times):
        let_go(scene, WORKER)
        call_store(scene, "DropStoredTemplate", pb.DropStoredTemplateRequest())
        drawing = edit(scene, STEPS)
        landed = _kill_at(scene, drawing, rng)
        picture = drawing.picture(scene.tally)
        _start_again(scene, rng)
        if picture is None:
            return
        scene.tally.different_images += pixels_of(picture).tobytes() != recorded.tobytes()
        scene.tally.count("whole_templates" if is_stored(scene) else "no_templates")
        _take_again(scene, recorded)
        if landed:
            scene.tally.count("kills")


def _set_up(scene: Scene) -> NDArray[np.uint8]:
    """A worker and a store that has recorded the template; the picture of the edit that did."""
    if WORKER not in scene.joined():
        scene.start_activations()
        scene.start_worker(WORKER, UNPADDED_ENGINE)
    recorded = record_template(scene, STEPS, WORKER)
    _take_again(scene, recorded)
    return recorded


def _take_again(scene: Scene, recorded: NDArray[np.uint8]) -> None:
    """An edit with all that the store has; its picture is as it must be."""
    let_go(scene, WORKER)
    if compare(scene, finished_edit(scene, STEPS), recorded):
        scene.tally.count("edits_that_reused_blocks")


def _start_again(scene: Scene, rng: random.Random) -> None:
    """The store is back, and the worker has a link to it."""
    scene.start_activations(rng.choice(_RATES))
    wait_for_links(scene, 1)


def _kill_at(scene: Scene, drawing: Drawing, rng: random.Random) -> bool:
    """Kills the store at a random step; whether the edit was still under way."""
    drawing.wait_for_step(rng.randrange(STEPS - 2))
    landed = not drawing.over
    scene.worker("activations").kill()
    return landed
