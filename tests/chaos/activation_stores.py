"""What is done to activation stores: killed while edits load from them, and while they record what edits put out."""

from __future__ import annotations

import io
import random
import time
import urllib.request
from collections.abc import Mapping
from typing import Any

import grpc
import numpy as np
import PIL.Image
from numpy.typing import NDArray

from bottega.client import Picture
from bottega.v1 import activations_pb2 as pb
from bottega.v1 import activations_pb2_grpc, worker_pb2_grpc
from tests.chaos.scene import ENGINE, Drawing, Scene
from tests.samples.edits import box_mask, template
from tests.samples.hostile_images import saved
from tests.support.waiting import wait_until

STEPS = 40
WORKER = "editor"
_SEED = 21
# Rows are not padded, which masked blocks are not used with; one request is drawn at a time, so that groups are equal.
_ENGINE = {name: value for name, value in ENGINE.items() if name != "fixed_rows"}
_EDIT: Mapping[str, Any] = {
    "image": saved(template()),
    "mask_image": saved(box_mask((20, 24, 40, 44))),
    "identical_results": False,
}
# To a worker, where its sections are sent: an edit of a second takes them in as it goes. 0 shares the memory.
_RATES = (0, 4 << 20)
# Of a picture whose activations were kept in float16, to the one that was recorded: levels of 255, on average and at
# most. They were .0001 and 1.
MOST_MEAN, MOST_LEVELS = 0.02, 4
_CALL_S = 10.0
_TRIES = 20
# All sections of a template are some megabytes.
_SENDING_S = 3.0


def kill_loading_stores(scene: Scene, *, times: int, rng: random.Random) -> None:
    """kill -9 of the store in mid-edit: the picture comes, with what was loaded and what was computed instead.

    The worker has nothing of the template itself, and the store has all of it again when it is back.
    """
    recorded = _set_up(scene)
    for _ in scene.tally.tries("kills", times):
        _let_go(scene)
        drawing = _edit(scene)
        landed = _kill_at(scene, drawing, rng)
        picture = drawing.picture(scene.tally)
        _start_again(scene, rng)
        if picture is None:
            return
        _compare(scene, picture, recorded)
        if not _stored(scene):
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
        _let_go(scene)
        _call(scene, "DropStoredTemplate", pb.DropStoredTemplateRequest())
        drawing = _edit(scene)
        landed = _kill_at(scene, drawing, rng)
        picture = drawing.picture(scene.tally)
        _start_again(scene, rng)
        if picture is None:
            return
        scene.tally.different_images += _pixels(picture).tobytes() != recorded.tobytes()
        scene.tally.count("whole_templates" if _stored(scene) else "no_templates")
        _take_again(scene, recorded)
        if landed:
            scene.tally.count("kills")


def _set_up(scene: Scene) -> NDArray[np.uint8]:
    """A worker and a store that has recorded the template; the picture of the edit that did."""
    if WORKER not in scene.joined():
        scene.start_activations()
        scene.start_worker(WORKER, _ENGINE)
    _call(scene, "DropStoredTemplate", pb.DropStoredTemplateRequest())
    for _ in range(_TRIES):  # nothing is recorded before the worker has its link
        _let_go(scene)
        picture = _finished(scene)
        if picture.provenance.mask.recorded and _comes_to_be_stored(scene):
            break
    else:
        raise AssertionError(f"none of {_TRIES} edits was recorded in the store")
    _take_again(scene, _pixels(picture))
    return _pixels(picture)


def _take_again(scene: Scene, recorded: NDArray[np.uint8]) -> None:
    """An edit with all that the store has; its picture is as it must be."""
    _let_go(scene)
    picture = _finished(scene)
    _compare(scene, picture, recorded)


def _start_again(scene: Scene, rng: random.Random) -> None:
    """The store is back, and the worker has a link to it."""
    metrics = scene.start_activations(rng.choice(_RATES)).metrics

    def is_linked() -> bool:
        with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=_CALL_S) as answer:
            return "\nbottega_links 1.0\n" in answer.read().decode()

    wait_until(is_linked, "the worker to be linked to the store")


def _compare(scene: Scene, picture: Picture, recorded: NDArray[np.uint8]) -> None:
    """The edit is the one that was recorded: what it takes from there is what it would compute, but for rounding."""
    if picture.provenance.blocks_reused:
        scene.tally.count("edits_that_reused_blocks")
    difference = np.abs(_pixels(picture).astype(int) - recorded.astype(int))
    scene.tally.most("most_mean_difference", float(difference.mean()))
    scene.tally.most("most_difference", float(difference.max()))
    scene.tally.different_images += bool(difference.mean() > MOST_MEAN or difference.max() > MOST_LEVELS)


def _kill_at(scene: Scene, drawing: Drawing, rng: random.Random) -> bool:
    """Kills the store at a random step; whether the edit was still under way."""
    drawing.wait_for_step(rng.randrange(STEPS - 2))
    landed = not drawing.over
    scene.worker("activations").kill()
    return landed


def _edit(scene: Scene) -> Drawing:
    options = {**scene.options, **_EDIT, "masked_blocks": True}
    return Drawing(scene.client, seed=_SEED, steps=STEPS, options=options)


def _finished(scene: Scene) -> Picture:
    picture = _edit(scene).picture(scene.tally)
    assert picture is not None, scene.tally.faults
    return picture


def _pixels(picture: Picture) -> NDArray[np.uint8]:
    with PIL.Image.open(io.BytesIO(picture.data)) as image:
        return np.asarray(image.convert("RGB"))


def _let_go(scene: Scene) -> None:
    """The worker forgets the template, and so has to ask the store."""
    with grpc.insecure_channel(scene.worker(WORKER).address) as channel:
        stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)

        def gone() -> bool:
            stub.DropTemplate(pb.DropTemplateRequest(), timeout=_CALL_S)
            return not stub.ListTemplates(pb.ListTemplatesRequest(), timeout=_CALL_S).templates

        wait_until(gone, "the worker to let the template go")


def _stored(scene: Scene) -> bool:
    """Whether the store has the template."""
    return bool(_call(scene, "ListStoredTemplates", pb.ListStoredTemplatesRequest()).total)


def _comes_to_be_stored(scene: Scene) -> bool:
    """Whether the store has what an edit that has ended was sending to it; nobody waits for that."""
    give_up_s = time.monotonic() + _SENDING_S
    while not _stored(scene):
        if time.monotonic() > give_up_s:
            return False
        time.sleep(0.05)
    return True


def _call(scene: Scene, method: str, request: Any) -> Any:
    with grpc.insecure_channel(scene.worker("activations").address) as channel:
        stub: Any = activations_pb2_grpc.ActivationServiceStub(channel)
        return getattr(stub, method)(request, timeout=_CALL_S)
