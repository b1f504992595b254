"""keep_for_editing: a picture's latents are kept, and the first edit of it puts them back and finds it recorded."""

from __future__ import annotations

import math
from dataclasses import replace

import PIL.Image
import pytest
import torch
from torch import Tensor

from bottega import kinds
from bottega.addons.edits.engine.kept import (
    VERSION,
    KeptLatents,
    KeptLatentsMismatch,
    are_too_large,
    read_kept,
    template_of,
    write_kept,
)
from bottega.engine.events import JobCheckpointed, JobFinished, JobKept
from bottega.engine.job import EngineOrder
from bottega.engine.spec import ResolvedSpec
from bottega.model.model import Model
from bottega.model.schedulers import SamplerKind
from bottega.v1.activations_pb2 import ActivationsOrder
from tests.samples.edits import edit_order
from tests.samples.family_models import family_model
from tests.samples.masked_edits import LEFT, SPEC, EditDesk, masked_order, outside
from tests.support.delayed_device import DelayedDevice
from tests.support.manual_engine import Drawing, load
from tests.support.torch_threads import torch_threads

GENERATED = replace(SPEC, strength=None, keep_for_editing=True, num_images=2)
SHAPE = (4, 16, 16)
Picture = tuple[Drawing, list[JobKept]]


def generated(desk: EditDesk, spec: ResolvedSpec = GENERATED) -> Picture:
    drawing = desk.draw(EngineOrder(key="generation", spec=spec))
    return drawing, drawing.all(JobKept)


@pytest.fixture(scope="module")
def picture(model: Model) -> Picture:
    """Drawn by an engine that is gone."""
    return generated(EditDesk(model))


def edit_of(drawing: Drawing, kept: JobKept, spec: ResolvedSpec = SPEC, *, key: str = "edit") -> EngineOrder:
    """Of one of its pictures, all of whose steps run."""
    image = PIL.Image.fromarray(drawing.pixels[kept.index])
    return masked_order(replace(spec, strength=1.0, seed=77), image=image, key=key, kept=kept.by_kind)


def drawn_with_samples(desk: EditDesk, order: EngineOrder) -> tuple[Drawing, list[Tensor]]:
    """What the model is given before each step but the first one, [1, channels, height, width], too."""
    drawing, given = desk.submit(order), []
    while not drawing.all(JobFinished):
        desk.turn()
        if drawing.job is not None and not drawing.job.requests[0].done:
            given.append(drawing.job.requests[0].rows()[0].sample[None])
    return drawing, given


def random_latents(steps: int) -> KeptLatents:
    latents = torch.randn(steps + 1, *SHAPE, generator=torch.Generator().manual_seed(3))
    noise_levels = tuple(float(step) for step in range(steps, 0, -1))
    return KeptLatents(latents=latents, noise_levels=noise_levels, seed=3, template="ab" * 16)


def test_the_latents_of_each_picture_are_kept_and_change_nothing(model: Model, picture: Picture) -> None:
    plain = EditDesk(model).draw(EngineOrder(key="plain", spec=replace(GENERATED, keep_for_editing=False)))
    drawing, kept = picture
    assert [each.index for each in kept] == [0, 1]
    for latent, other, each in zip(drawing.latents, plain.latents, kept, strict=True):
        torch.testing.assert_close(latent, other, atol=1e-4, rtol=0)
        read = read_kept(each.by_kind[kinds.ACTIVATIONS], model, SHAPE)
        assert len(read.noise_levels) == 4
        assert read.seed == SPEC.seed + each.index
        assert torch.equal(read.image_latent, latent)


def test_latents_are_kept_as_they_were_though_their_copies_come_late(model: Model) -> None:
    device = DelayedDevice()
    spec = replace(GENERATED, num_images=1)
    with torch_threads(1):
        _, (here,) = generated(EditDesk(model), spec)
        with device.running(0.005):
            _, (late,) = generated(EditDesk(replace(model, runtime=device)), spec)
    ours, theirs = (read_kept(each.by_kind[kinds.ACTIVATIONS], model, SHAPE).latents for each in (late, here))
    assert torch.equal(ours, theirs)


def test_the_first_edit_of_a_kept_picture_reuses_blocks_and_puts_its_latents_back(model: Model) -> None:
    desk = EditDesk(model)
    drawing, kept = generated(desk)
    assert len(desk.source.recordings) == 2
    order = edit_of(drawing, kept[1])
    edit = desk.draw(order)
    assert 0 < edit.record.provenance.blocks_reused == edit.record.provenance.blocks_total
    assert edit.record.provenance.mask.kept_latents
    assert torch.equal(outside(edit.latents[0], order), outside(drawing.latents[1], order))
    assert not edit.record.exact


def test_stable_diffusion_3_keeps_the_latents_of_50_steps_and_edits_put_them_back() -> None:
    flow = load(family_model("SD 3.5"))
    large = replace(GENERATED, width=512, height=512, sampler=SamplerKind.FLOW_MATCH_EULER)
    assert flow.latent_channels * (large.width // flow.latent_scale) ** 2 == 16 * 128 * 128, "as at 1024x1024"
    assert [are_too_large(flow, replace(large, num_inference_steps=steps)) for steps in (50, 52)] == [False, True]
    desk = EditDesk(flow)
    drawing, kept = generated(desk, replace(large, width=64, height=64))
    order = edit_of(drawing, kept[1], replace(SPEC, sampler=SamplerKind.FLOW_MATCH_EULER))
    edit = desk.draw(order)
    assert edit.record.provenance.mask.kept_latents
    assert 0 < edit.record.provenance.blocks_reused == edit.record.provenance.blocks_total
    assert torch.equal(outside(edit.latents[0], order), outside(drawing.latents[1], order))
    assert not torch.equal(edit.latents[0], drawing.latents[1])


def test_a_kept_picture_is_recorded_for_edits_of_its_own_tenant(model: Model) -> None:
    def of(order: EngineOrder, tenant: str) -> EngineOrder:
        return replace(order, addons={kinds.ACTIVATIONS: ActivationsOrder(tenant=tenant).SerializeToString()})

    desk = EditDesk(model)
    drawing = desk.draw(of(EngineOrder(key="generation", spec=replace(GENERATED, num_images=1)), "one"))
    order = edit_of(drawing, drawing.all(JobKept)[0])
    own, other = (desk.draw(of(replace(order, key=tenant), tenant)).record.provenance for tenant in ("one", "two"))
    assert 0 < own.blocks_reused == own.blocks_total
    assert (other.blocks_reused, other.mask.recorded) == (0, True)


def test_where_the_recording_is_gone_the_latents_are_put_back_and_recorded(model: Model, picture: Picture) -> None:
    drawing, kept = picture
    desk, order = EditDesk(model), edit_of(drawing, kept[0])
    first, second = desk.draw(order), desk.draw(replace(order, key="second"))
    assert (first.record.provenance.mask.recorded, first.record.provenance.blocks_reused) == (True, 0)
    assert (first.record.exact, first.record.provenance.mask.recording) == (
        False,
        template_of(kept[0].by_kind[kinds.ACTIVATIONS]),
    )
    assert second.record.provenance.mask.recording == desk.source.recordings[0].id
    assert second.record.provenance.blocks_reused == second.record.provenance.blocks_total
    assert torch.equal(outside(first.latents[0], order), outside(drawing.latents[0], order))


def test_what_one_sampler_has_drawn_another_one_puts_back(model: Model) -> None:
    """The model is given of the picture what it was given when that was drawn, whatever the sampler's own scale."""
    generation = EngineOrder(key="generation", spec=replace(GENERATED, num_images=1, sampler=SamplerKind.DDIM))
    drawing, given = drawn_with_samples(EditDesk(model), generation)
    order = edit_of(drawing, drawing.all(JobKept)[0], replace(SPEC, sampler=SamplerKind.EULER_ANCESTRAL))
    _, given_again = drawn_with_samples(EditDesk(model), order)
    assert len(given_again) == len(given) == 3
    for before, again in zip(given, given_again, strict=True):
        torch.testing.assert_close(outside(again, order), outside(before, order), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("why", "said"),
    [
        ("other steps", "it is the first edit of this image; its kept latents lack some of its steps"),
        ("damaged", "it is the first edit of this image; its kept latents do not fit"),
        ("exact", None),
    ],
)
def test_an_edit_does_without_latents_that_it_cannot_use(
    model: Model, picture: Picture, why: str, said: str | None
) -> None:
    drawing, kept = picture
    order = edit_of(drawing, kept[0])
    if why == "other steps":
        order = replace(order, spec=replace(order.spec, num_inference_steps=7))
    elif why == "damaged":
        order = replace(order, kept={kinds.ACTIVATIONS: order.kept[kinds.ACTIVATIONS][:-9]})
    else:
        image = PIL.Image.fromarray(drawing.pixels[0])
        order = replace(edit_order(replace(SPEC, strength=1.0), image, LEFT), kept=order.kept)
    drawn, without = (EditDesk(model).draw(each) for each in (order, replace(order, kept={})))
    assert torch.equal(drawn.latents[0], without.latents[0])
    assert (
        drawn.record.provenance.mask.computed_all_because if drawn.record.provenance.HasField("mask") else None
    ) == said
    assert not drawn.record.provenance.mask.kept_latents


@pytest.mark.parametrize("mib", [(64, 0), (0, 64)], ids=["first", "second"])
def test_a_resumed_edit_puts_the_same_latents_back(model: Model, picture: Picture, mib: tuple[int, int]) -> None:
    """Whichever of its workers can mask blocks."""
    drawing, kept = picture
    order = edit_of(drawing, kept[0])
    desk = EditDesk(model, mib=mib[0])
    half = desk.submit(order)
    while not half.all(JobCheckpointed):
        desk.turn()
    assert half.job is not None
    decisions = dict(half.job.decided)
    resumed = replace(order, checkpoint=half.all(JobCheckpointed)[0].data, decisions=decisions)
    again, whole = EditDesk(model, mib=mib[1]).draw(resumed), EditDesk(model).draw(order)
    torch.testing.assert_close(again.latents[0], whole.latents[0], atol=1e-4, rtol=0)
    assert again.record.provenance.mask.kept_latents
    assert not again.record.exact


def test_of_a_generation_that_began_elsewhere_nothing_is_kept(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    """The latents of its first steps are not here, so that no edit could use the others."""
    order = EngineOrder(key="generation", spec=replace(GENERATED, num_images=1))
    desk = EditDesk(model)
    half = desk.submit(order)
    while not half.all(JobCheckpointed):
        desk.turn()
    other = EditDesk(model)
    resumed = other.draw(replace(order, checkpoint=half.all(JobCheckpointed)[0].data))
    assert resumed.pixels
    assert not resumed.all(JobKept)
    assert not other.source.recordings, "no edit would find it"
    assert "no latents are kept: the picture did not begin on this worker" in caplog.messages


@pytest.mark.parametrize(("room_bytes", "given_up"), [(-1, 0), (0, 1)], ids=["latents", "what is said of them"])
def test_of_latents_that_are_too_large_nothing_is_kept_or_recorded(
    model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, room_bytes: int, given_up: int
) -> None:
    """room_bytes: beside the latents of four steps and the finished one, in float16."""
    size_bytes = 5 * math.prod(SHAPE) * 2
    monkeypatch.setattr("bottega.addons.edits.engine.kept._MAX_BYTES", size_bytes + room_bytes)
    desk = EditDesk(model)
    drawing, kept = generated(desk, replace(GENERATED, num_images=1))
    assert drawing.pixels
    assert not kept
    assert not desk.source.recordings
    assert desk.source.counts["given_up"] == given_up
    assert caplog.messages.count("no latents are kept: those of the picture are too large") == 1


def test_a_generation_that_is_cancelled_leaves_no_recording(model: Model) -> None:
    desk = EditDesk(model)
    desk.submit(EngineOrder(key="generation", spec=GENERATED))
    desk.turn()
    desk.engine.cancel("generation")
    assert not desk.source.recordings


# As bytes.


def test_kept_latents_are_read_as_they_were_written(model: Model) -> None:
    kept = random_latents(5)
    data = write_kept(model, kept)
    assert data is not None
    read = read_kept(data, model, SHAPE)
    assert torch.equal(read.latents, kept.latents)
    assert (read.noise_levels, read.seed, read.template) == (kept.noise_levels, kept.seed, kept.template)
    trajectory = read.trajectory([5.0, 4.0, 2.0], begin=1)
    assert trajectory is not None
    assert sorted(trajectory) == [1, 2, 3]
    assert torch.equal(trajectory[3], kept.latents[3][None])
    assert read.trajectory([5.000005, 4.0], begin=0) is not None, "another order of operations"
    assert read.trajectory([5.005, 4.0], begin=0) is None


def test_what_is_too_much_is_kept_in_half_precision_or_not(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = random_latents(5)
    whole = write_kept(model, kept)
    assert whole is not None
    monkeypatch.setattr("bottega.addons.edits.engine.kept._MAX_BYTES", len(whole) - 1)
    half = write_kept(model, kept)
    assert half is not None
    assert len(half) < 0.6 * len(whole)
    read: Tensor = read_kept(half, model, SHAPE).latents
    torch.testing.assert_close(read, kept.latents, atol=2e-3, rtol=1e-3)
    monkeypatch.setattr("bottega.addons.edits.engine.kept._MAX_BYTES", len(half) - 1)
    assert write_kept(model, kept) is None


def test_latents_that_do_not_fit_are_not_read(model: Model) -> None:
    data = write_kept(model, random_latents(5))
    assert data is not None
    for wrong, shape in ((data[:-1], SHAPE), (b"", SHAPE), (b"\xff" * 99, SHAPE), (data, (4, 8, 16))):
        with pytest.raises(KeptLatentsMismatch):
            read_kept(wrong, model, shape)
    earlier = data.replace(f'\\"version\\": {VERSION}'.encode(), b'\\"version\\": 2')
    assert earlier != data
    with pytest.raises(KeptLatentsMismatch, match="their version is 2, not 3"):
        read_kept(earlier, model, SHAPE)
    other = write_kept(replace(model, digest="00"), random_latents(5))
    assert other is not None
    with pytest.raises(KeptLatentsMismatch, match="model_hash"):
        read_kept(other, model, SHAPE)
