"""Edits that take from a recording what they do not redraw: the store that has it, and pictures to compare."""

from __future__ import annotations

import io
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
from bottega.v1 import activations_pb2_grpc
from tests.chaos.scene import ENGINE, Drawing, Scene
from tests.samples.edits import box_mask, template
from tests.samples.hostile_images import saved
from tests.support.waiting import wait_until

# Rows are not padded, which masked blocks are not used with; one request is drawn at a time, so that groups are equal.
UNPADDED_ENGINE = {name: value for name, value in ENGINE.items() if name != "fixed_rows"}
# Of a picture whose activations were kept in float16, to the one that was recorded: levels of 255, on average and at
# most. They were .0001 and 1.
MOST_MEAN, MOST_LEVELS = 0.02, 4
CALL_S = 10.0
_SEED = 21
_EDIT: Mapping[str, Any] = {
    "image": saved(template()),
    "mask_image": saved(box_mask((20, 24, 40, 44))),
    "identical_results": False,
    "masked_blocks": True,
}
_TRIES = 20
# All sections of a template are some megabytes.
_SENDING_S = 3.0


def edit(scene: Scene, steps: int) -> Drawing:
    """Begins the edit, the same one each time."""
    return Drawing(scene.client, seed=_SEED, steps=steps, options={**scene.options, **_EDIT})


def finished_edit(scene: Scene, steps: int) -> Picture:
    """The edit, when nothing happens to it."""
    picture = edit(scene, steps).picture(scene.tally)
    assert picture is not None, scene.tally.faults
    return picture


def record_template(scene: Scene, steps: int, worker: str) -> NDArray[np.uint8]:
    """Has the store record the template, by this worker alone; the picture of the edit that did."""
    call_store(scene, "DropStoredTemplate", pb.DropStoredTemplateRequest())
    for _ in range(_TRIES):  # nothing is recorded before the worker has its link
        let_go(scene, worker)
        picture = finished_edit(scene, steps)
        if picture.provenance.mask.recorded and _comes_to_be_stored(scene):
            return pixels_of(picture)
    raise AssertionError(f"none of {_TRIES} edits was recorded in the store")


def compare(scene: Scene, picture: Picture, recorded: NDArray[np.uint8]) -> bool:
    """The edit is the one that was recorded: what it takes from there is what it would compute, but for rounding.

    Whether it has taken anything.
    """
    difference = np.abs(pixels_of(picture).astype(int) - recorded.astype(int))
    scene.tally.most("most_mean_difference", float(difference.mean()))
    scene.tally.most("most_difference", float(difference.max()))
    scene.tally.different_images += bool(difference.mean() > MOST_MEAN or difference.max() > MOST_LEVELS)
    return picture.provenance.blocks_reused > 0


def pixels_of(picture: Picture) -> NDArray[np.uint8]:
    """[height, width, 3]."""
    with PIL.Image.open(io.BytesIO(picture.data)) as image:
        return np.asarray(image.convert("RGB"))


def wait_for_links(scene: Scene, count: int) -> None:
    """Until so many workers have a link to the store."""
    metrics = scene.worker("activations").metrics

    def are_linked() -> bool:
        with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=CALL_S) as answer:
            return f"\nbottega_links {count:.1f}\n" in answer.read().decode()

    wait_until(are_linked, f"{count} links to the store")


def let_go(scene: Scene, worker: str) -> None:
    """The worker forgets the template, and so has to ask the store."""
    with grpc.insecure_channel(scene.worker(worker).address) as channel:
        stub: Any = activations_pb2_grpc.TemplateServiceStub(channel)

        def gone() -> bool:
            stub.DropTemplate(pb.DropTemplateRequest(), timeout=CALL_S)
            return not stub.ListTemplates(pb.ListTemplatesRequest(), timeout=CALL_S).templates

        wait_until(gone, "the worker to let the template go")


def is_stored(scene: Scene) -> bool:
    """Whether the store has the template."""
    return bool(call_store(scene, "ListStoredTemplates", pb.ListStoredTemplatesRequest()).total)


def call_store(scene: Scene, method: str, request: Any) -> Any:
    with grpc.insecure_channel(scene.worker("activations").address) as channel:
        stub: Any = activations_pb2_grpc.ActivationServiceStub(channel)
        return getattr(stub, method)(request, timeout=CALL_S)


def _comes_to_be_stored(scene: Scene) -> bool:
    """Whether the store has what an edit that has ended was sending to it; nobody waits for that."""
    give_up_s = time.monotonic() + _SENDING_S
    while not is_stored(scene):
        if time.monotonic() > give_up_s:
            return False
        time.sleep(0.05)
    return True
