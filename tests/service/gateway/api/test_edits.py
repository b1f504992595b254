"""Edits at the real gateway: which masks are taken, what reaches a worker, and what was kept of a picture for them."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from PIL import Image

from bottega import errors, kinds, rules
from bottega.gateway.dispatch import dispatcher
from bottega.gateway.jobs.storage import Storage
from bottega.v1 import generation_pb2, image_pb2, worker_pb2
from bottega.v1.generation_pb2 import Techniques
from tests.fakes.scripted_worker import MODEL, ScriptedWorker
from tests.samples.hostile_images import saved
from tests.support.running_gateway import Running, refusal, running_gateway
from tests.support.waiting import eventually

# One gateway for most tests here: its codec process takes a second to start.
pytestmark = pytest.mark.asyncio(loop_scope="module")

BALANCED, EXACT = generation_pb2.FIDELITY_BALANCED, generation_pb2.FIDELITY_EXACT


def box(
    width: int = 64, height: int = 64, *, mode: str = "L", at: tuple[int, int, int, int] = (16, 8, 48, 40)
) -> bytes:
    """A mask: white in a box."""
    mask = Image.new(mode, (width, height))
    mask.paste("white", at)
    return saved(mask)


PICTURE = saved(Image.new("RGB", (96, 80), "red"))
MASK = box()


def edit(**said: Any) -> dict[str, Any]:
    return {"prompt": "a star", "image": PICTURE, "mask_image": MASK, **said}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house() -> AsyncIterator[Running]:
    async with running_gateway(codec_processes=1) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def worker(house: Running) -> ScriptedWorker:
    """The only one; what tests before this one told it is forgotten."""
    worker = house.workers[0] if house.workers else await house.worker()
    worker.requests.clear()
    worker.script = type(worker.script)(picture=lambda index: b"picture %d" % index)
    return worker


def opaque() -> bytes:
    return saved(Image.new("RGBA", (64, 64), (255, 255, 255, 255)))


BLACK = saved(Image.new("L", (64, 64)))
NOT_WHITE = {"mask_image": "redraws nothing: no part of it is white (.5 and above) at 64x64"}
NOT_TRANSPARENT = {"mask_image": "redraws nothing: no part of it is transparent (less than half opaque) at 64x64"}
TOO_SMALL = {
    "mask_image": "redraws nothing: nothing is left of it in the latent, of which an element is 4x4 pixels: "
    "make it larger"
}
NO_STRENGTH = {"strength": "must be above 0 and at most 1"}
NO_IMAGE = "the bytes are not a PNG, JPEG or WebP image"


async def test_what_is_wrong_with_an_edit_is_said_at_once(house: Running, worker: ScriptedWorker) -> None:
    without_mask = {"padding_mask_crop": "needs mask_image", "mask_feather": "needs mask_image"}
    exact = {"techniques.masked_blocks": "must not be true with fidelity EXACT, which computes all"}
    cases: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({"mask_image": BLACK}, NOT_WHITE),
        ({"mask_image": saved(Image.new("L", (64, 64), 127))}, NOT_WHITE),
        ({"mask_image": BLACK, "padding_mask_crop": 8}, NOT_WHITE),
        ({"mask_image": b""}, {"mask_image": "is empty; send a PNG, JPEG or WebP"}),
        ({"mask_image": None, "padding_mask_crop": 8, "mask_feather": 4}, without_mask),
        ({"strength": 0.0}, NO_STRENGTH),
        ({"fidelity": EXACT, "techniques": Techniques(masked_blocks=True)}, exact),
        ({"mask_image": opaque(), "mask_alpha": True}, NOT_TRANSPARENT),
        ({"mask_image": box(at=(5, 5, 7, 7))}, TOO_SMALL),
        ({"mask_image": b"no picture", "image": b"nor this"}, {"image": NO_IMAGE, "mask_image": NO_IMAGE}),
        ({"image": None}, {"mask_image": "needs image, of which it selects the part to redraw"}),
        ({"strength": 1.5, "mask_image": BLACK}, {**NO_STRENGTH, **NOT_WHITE}),
    ]
    for said, texts in cases:
        error = await refusal(functools.partial(house.generate, **edit(**said)), errors.InvalidRequest)
        found = {violation.field.removeprefix("spec."): violation.description for violation in error.violations}
        assert found == texts
    assert worker.requests == []


async def test_an_edit_by_a_model_that_edits_no_pictures_is_refused_before_it_waits() -> None:
    model, reason = image_pb2.Model(), "model miniature edits no pictures, because of its VAE; use another"
    model.CopyFrom(MODEL)
    model.edits_refused_because = reason
    async with running_gateway(codec_processes=1) as house:
        worker = await house.worker(model=model)
        error = await refusal(lambda: house.generate(**edit()), errors.FieldNotServed)
        assert (error.message, error.metadata["field"]) == (reason, "mask_image")
        await refusal(lambda: house.generate(**edit(strength=2.0)), errors.InvalidRequest)
        assert not worker.requests
        assert [event async for event in house.generate(prompt="a star", image=PICTURE)]


@pytest.mark.parametrize(
    ("said", "steps"),
    [
        ({}, 29),  # of 30, by Diffusers' .9999
        ({"mask_image": box(17, 40, mode="RGB", at=(4, 4, 12, 30)), "strength": 0.5}, 15),
        ({"mask_image": saved(Image.new("RGBA", (64, 64))), "mask_alpha": True}, 29),
        ({"keep_unmasked": False}, 29),
    ],
    ids=["as it is", "of another size, in colours", "transparent", "as Diffusers"],
)
async def test_an_edit_reaches_a_worker_with_its_mask_and_all_that_it_leaves_open(
    house: Running, worker: ScriptedWorker, said: dict[str, Any], steps: int
) -> None:
    job = await house.submit(**edit(**said))
    ended = await house.ended(job.job_id)
    (request,) = worker.requests
    sent = edit(**said)
    assert (request.spec.image, request.spec.mask_image) == (PICTURE, sent["mask_image"])
    assert request.spec.strength == sent.get("strength", 0.9999)
    assert request.spec.keep_unmasked == sent.get("keep_unmasked", True)
    assert request.spec.HasField("mask_feather") == request.spec.keep_unmasked
    assert job.steps_total == steps, "what the scheduler counts with"
    assert ended.provenance.mask.digest == hashlib.sha256(sent["mask_image"]).hexdigest()
    for shown in (ended.spec, ended.provenance.parameters):
        assert not shown.HasField("image")
        assert not shown.HasField("mask_image")
        assert shown.keep_unmasked == request.spec.keep_unmasked


@pytest.mark.parametrize(("said", "size"), [({}, (64, 64)), ({"padding_mask_crop": 4}, (96, 80))])
async def test_a_picture_that_is_put_back_into_its_image_has_that_ones_size(
    house: Running, worker: ScriptedWorker, said: dict[str, Any], size: tuple[int, int]
) -> None:
    for identical in ("", "answered"):
        (image,) = (await house.draw(**edit(seed=4, **said))).images
        assert (image.width, image.height) == size, identical
    assert len(worker.requests) == 1


async def test_an_edit_with_its_seed_is_answered_by_the_result_of_an_identical_one(
    house: Running, worker: ScriptedWorker
) -> None:
    assert (await house.draw(**edit(seed=7))).provenance.identical_job == ""
    answered = await house.draw(**edit(seed=7, strength=0.9999, keep_unmasked=True, mask_feather=8))
    assert answered.provenance.identical_job
    assert answered.provenance.mask.digest == hashlib.sha256(MASK).hexdigest()
    others: tuple[dict[str, Any], ...] = (
        {"mask_image": box(at=(0, 0, 64, 63))},
        {"mask_image": None},
        {"mask_alpha": True, "mask_image": saved(Image.new("RGBA", (64, 64)))},
        {"mask_feather": 9},
        {"keep_unmasked": False},
        {"padding_mask_crop": 0},
        {"techniques": Techniques(masked_blocks=True)},
    )
    for other in others:
        drawn = await house.draw(**edit(**{"seed": 7, **other}))
        assert drawn.provenance.identical_job == "", other
    assert len(worker.requests) == 1 + len(others)


async def test_an_edit_never_has_to_do_with_the_cache(house: Running, worker: ScriptedWorker) -> None:
    long_enough = {"prompt": "a big red star"}  # the cache is asked about such a prompt alone
    await house.draw(**long_enough, fidelity=BALANCED)
    for fidelity in (BALANCED, generation_pb2.FIDELITY_FAST):
        both = Techniques(approximate_cache=True, masked_blocks=True)
        await house.draw(**edit(**long_enough, fidelity=fidelity))
        await house.draw(**edit(**long_enough, fidelity=fidelity, techniques=both))
    assert [kinds.CACHE in request.addons for request in worker.requests] == [True] + [False] * 4


# What is kept of pictures.


async def kept_picture(house: Running, worker: ScriptedWorker, colour: str, **said: Any) -> bytes:
    """Draws one to be kept, another one for each colour."""
    picture = saved(Image.new("RGB", (64, 64), colour))
    worker.script.picture = lambda index: picture if index == 0 else b"another one"
    worker.script.latents = lambda index: b"latents of %s %d" % (colour.encode(), index)
    drawn = await house.draw(prompt="a star", keep_for_editing=True, **said)
    assert [image.digest for image in drawn.images][:1] == [hashlib.sha256(picture).hexdigest()]
    worker.requests.clear()
    return picture


async def sent(house: Running, worker: ScriptedWorker, **said: Any) -> worker_pb2.RunAttemptRequest:
    """What a worker gets for an edit."""
    await house.draw(**edit(**said))
    return worker.requests[-1]


async def test_an_edit_of_a_picture_that_was_kept_brings_its_latents_along(
    house: Running, worker: ScriptedWorker
) -> None:
    picture = await kept_picture(house, worker, "green", num_images=2)
    for said in ({}, {"seed": 3, "techniques": Techniques(masked_blocks=True)}, {"fidelity": BALANCED}):
        assert (await sent(house, worker, image=picture, **said)).kept == b"latents of green 0"
    assert (await sent(house, worker)).kept == b"", "nobody has drawn that"


async def test_where_they_have_no_use_they_stay_where_they_are(house: Running, worker: ScriptedWorker) -> None:
    picture = await kept_picture(house, worker, "green")
    for said in (
        {"seed": 3},
        {"fidelity": EXACT},
        {"techniques": Techniques(masked_blocks=False)},
        {"mask_image": None, "strength": 0.5},
        {"padding_mask_crop": 8},
        {"num_inference_steps": 20},
        {"num_inference_steps": 60},
        {"width": 128},
    ):
        order = {"image": picture, "num_inference_steps": 30, **said}
        assert (await sent(house, worker, **order)).kept == b"", said
    assert (await sent(house, worker, image=picture, num_inference_steps=15)).kept == b"latents of green 0"


async def test_of_pictures_that_are_not_to_be_kept_nothing_is(house: Running, worker: ScriptedWorker) -> None:
    picture = saved(Image.new("RGB", (64, 64), "olive"))
    worker.script.picture = lambda index: picture
    await house.draw(prompt="a star")
    assert (await sent(house, worker, image=picture)).kept == b""


@pytest.mark.parametrize(
    ("room", "checkpoint", "kept"),
    [
        ("for all", b"10", b"latents of maroon 0"),
        ("for one of both", b"", b"latents of maroon 0"),
        ("for a checkpoint", b"10", b""),
        ("for all, and they are gone", b"", b""),
    ],
)
async def test_an_attempt_goes_on_from_a_checkpoint_only_with_the_latents_that_the_one_before_had(
    house: Running,
    worker: ScriptedWorker,
    monkeypatch: pytest.MonkeyPatch,
    room: str,
    checkpoint: bytes,
    kept: bytes,
) -> None:
    picture = await kept_picture(house, worker, "maroon")
    worker.arrived.clear()
    worker.script.hold_at, worker.script.failure = 20, errors.WorkerLost("its engine was lost")
    job = await house.submit(**edit(image=picture))
    await worker.arrived.wait()
    first = worker.requests[0]
    await house.until_checkpoint(worker, job.job_id, steps=10)
    bare = worker_pb2.RunAttemptRequest()
    bare.CopyFrom(first)
    bare.kept = b""
    if room == "for one of both":
        monkeypatch.setattr(dispatcher, "_MAX_REQUEST_BYTES", bare.ByteSize() + len(kept) + 1)
    elif room == "for a checkpoint":
        monkeypatch.setattr(dispatcher, "_MAX_REQUEST_BYTES", bare.ByteSize() + len(b"10"))
    elif room == "for all, and they are gone":
        monkeypatch.setattr(Storage, "read_kept", _nothing)
    worker.script.release.set()
    await eventually(lambda: len(worker.requests) >= 2)
    worker.script.failure = None
    assert (await house.ended(job.job_id)).state == image_pb2.JOB_STATE_COMPLETED
    again = worker.requests[1]
    assert (again.checkpoint, again.kept) == (checkpoint, kept)


async def _nothing(storage: Storage, name: str) -> bytes:
    return b""


async def test_latents_beyond_the_bound_are_not_kept_and_the_picture_is(
    house: Running, worker: ScriptedWorker, caplog: pytest.LogCaptureFixture
) -> None:
    worker.script.latents = lambda index: bytes(rules.MAX_KEPT_BYTES + (index == 0))
    pictures = [saved(Image.new("RGB", (64, 64), color)) for color in ("navy", "gold")]
    worker.script.picture = lambda index: pictures[index]
    drawn = await house.draw(prompt="a star", keep_for_editing=True, num_images=2)
    assert len(drawn.images) == 2
    assert [record.message for record in caplog.records].count(
        "the data to keep for an image is too large; it is dropped"
    ) == 1
    found = [(await sent(house, worker, image=picture)).kept for picture in pictures]
    assert [len(kept) for kept in found] == [0, rules.MAX_KEPT_BYTES], "the largest reach the worker of an edit"


async def test_a_request_that_keeps_is_answered_only_by_a_job_that_has_kept(
    house: Running, worker: ScriptedWorker
) -> None:
    star: dict[str, Any] = {"prompt": "a star", "seed": 11}
    worker.script.picture = lambda index: b"picture of request %d" % len(worker.requests)
    await house.draw(**star)
    worker.script.latents = lambda index: b""
    for _ in range(2):
        assert (await house.draw(**star, keep_for_editing=True)).provenance.identical_job == "", "nothing was kept"
    worker.script.latents = lambda index: b"latents"
    drawn = await house.draw(**star, keep_for_editing=True)
    answered = await house.draw(**star, keep_for_editing=True)
    assert (drawn.provenance.identical_job, bool(answered.provenance.identical_job)) == ("", True)
    assert list(answered.images) == list(drawn.images)


def damage(folder: Path, content: bytes) -> None:
    """Changes the file that has it."""
    (file,) = [file for file in folder.rglob("*") if file.is_file() and file.read_bytes() == content]
    file.write_bytes(content[::-1])


async def test_what_is_kept_outlives_the_gateway_and_ends_with_the_results(tmp_path: Path) -> None:
    state = str(tmp_path)
    async with running_gateway(codec_processes=1, state=state) as house:
        picture = await kept_picture(house, await house.worker(), "teal")
    async with running_gateway(codec_processes=1, state=state) as house:
        worker = await house.worker()
        assert (await sent(house, worker, image=picture)).kept == b"latents of teal 0"
        damage(tmp_path, b"latents of teal 0")
        assert (await sent(house, worker, image=picture)).kept == b"", "never others than were kept"
    async with running_gateway(
        codec_processes=1, state=state, results_bytes=1 << 10, max_result_bytes=1 << 10
    ) as house:
        worker = await house.worker()
        worker.script.picture = lambda index: bytes(1000)
        await house.draw(prompt="another star")
        assert (await sent(house, worker, image=picture)).kept == b"", "it counts as results do"
