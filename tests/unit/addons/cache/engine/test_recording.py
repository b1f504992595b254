"""What is recorded of a job: what its first picture really was, and nothing that was not computed exactly."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from bottega.addons.cache.engine import JobRecording, LatentReply
from bottega.addons.cache.engine.recorder import LatentRecorder
from bottega.engine.addon import EngineAddOn, JobAddOn
from bottega.engine.encode import encode_prompts
from bottega.engine.events import EngineRecord, JobCheckpointed
from bottega.engine.job import EngineOrder
from bottega.engine.request import Request
from bottega.engine.spec import ResolvedSpec
from bottega.model.model import Model
from bottega.model.schedulers import SamplerKind
from bottega.v1.generation_pb2 import FIDELITY_EXACT
from tests.fakes.scripted_latents import Cached, ScriptedLatents, answer, cached, entry
from tests.samples.controlnets import control_image, control_spec

SPEC = ResolvedSpec(prompt="a small green circle", num_inference_steps=10, width=32, height=32, seed=5)
ANCESTRAL = replace(SPEC, sampler=SamplerKind.EULER_ANCESTRAL)
ORDER = cached(EngineOrder(key="job", spec=SPEC))


def recorded(desk: Cached, order: EngineOrder = ORDER) -> list[JobRecording]:
    """What was sent when the job had ended."""
    drawing = desk.easel.submit(order)
    while not drawing.ended:
        assert desk.source.recordings == []
        desk.easel.turn()
    desk.easel.turn()
    return desk.source.recordings


def wanting(model: Model, *after: EngineAddOn) -> Cached:
    """An engine whose store wants all recordings."""
    return Cached(model, ScriptedLatents([answer(record=True)]), after=after)


@pytest.mark.parametrize(("spec", "steps"), [(SPEC, [2, 3, 4, 5]), (ANCESTRAL, [1, 2, 3, 4, 5])], ids=["euler", "a"])
def test_the_first_pictures_latents_are_recorded_as_they_were(
    model: Model, spec: ResolvedSpec, steps: list[int]
) -> None:
    desk = wanting(model)
    drawing = desk.easel.submit(cached(replace(ORDER, spec=replace(spec, num_images=2)), tenant="t"))
    latents: dict[int, Tensor] = {}
    while not drawing.ended:
        desk.easel.turn()
        if drawing.job is not None:
            request = drawing.job.requests[0]
            latents[request.step] = request.latent[0].clone()
    (made,) = desk.source.recordings
    assert sorted(made.latents) == steps
    assert all(torch.equal(made.latents[step], latents[step]) for step in steps)
    assert torch.equal(made.pixels, torch.from_numpy(drawing.pixels[0]))
    assert torch.equal(made.embedding, encode_prompts(model, spec).summary)
    assert made.key == desk.source.asked[0].header.key == desk.starts.key_of(spec, "t")
    assert (made.model_hash, made.spec.prompt) == (model.digest, SPEC.prompt)
    assert desk.starts.counts["recordings"] == 1


def test_one_for_which_there_is_no_room_is_counted(model: Model) -> None:
    desk = wanting(model)
    desk.source.full = True
    assert recorded(desk) == []
    assert (desk.starts.counts["recordings"], desk.starts.counts["dropped_recordings"]) == (0, 1)


def test_an_exact_job_is_recorded_as_well(model: Model) -> None:
    assert len(recorded(wanting(model), cached(ORDER, fidelity=FIDELITY_EXACT))) == 1


@pytest.mark.parametrize(
    ("said", "order"),
    [
        ([answer()], ORDER),
        ([], ORDER),
        ([answer(record=True)], cached(ORDER, record=False)),
        ([answer((entry(1), 5, torch.ones(4, 8, 8)), record=True)], ORDER),
        (
            [answer((entry(1), 5, torch.ones(4, 8, 8)), record=True)],
            replace(ORDER, spec=replace(SPEC, num_images=2)),
        ),
    ],
    ids=["not wanted", "no answer", "must not be", "began from a latent", "one of two began from a latent"],
)
def test_what_is_not_wanted_or_not_exact_is_not_recorded(
    model: Model, said: list[LatentReply], order: EngineOrder
) -> None:
    assert recorded(Cached(model, ScriptedLatents(said)), order) == []


@dataclass(eq=False)
class Approximates(EngineAddOn):
    """Says of every job that something was approximated, after everybody else has said what happened."""

    kind = "approximates"

    def open(self, order: EngineOrder) -> JobAddOn | None:
        return _Approximated()


class _Approximated(JobAddOn):
    def report(self, record: EngineRecord) -> None:
        record.exact = False


def test_a_job_that_another_add_on_has_approximated_is_not_recorded(model: Model) -> None:
    assert recorded(wanting(model, Approximates())) == []


def test_of_a_resumed_job_only_what_follows_is_recorded(model: Model) -> None:
    drawing = Cached(model).draw(ORDER)
    assert drawing.job is not None
    left = drawing.all(JobCheckpointed)[2]
    assert left.steps_done == 3
    (made,) = recorded(wanting(model), replace(ORDER, checkpoint=left.data))
    assert sorted(made.latents) == [3, 4, 5]


def test_a_job_that_fails_is_not_recorded(model: Model) -> None:
    desk = wanting(model)
    drawing = desk.easel.submit(ORDER)
    desk.easel.turn()
    assert drawing.job is not None
    (request,) = drawing.job.requests
    request.latent = torch.full_like(request.latent, torch.nan)
    desk.easel.run()
    assert drawing.error is not None
    assert desk.source.recordings == []


@pytest.mark.parametrize("step", [0, 3])
def test_what_may_have_had_stale_residuals_before_a_checkpoint_is_not_recorded(model: Model, step: int) -> None:
    spec = replace(SPEC, controlnets=(control_spec("edges", control_image(1)),), stale_residuals=True)
    request = Request(model, SPEC, encode_prompts(model, SPEC))
    request.evaluation = step
    assert LatentRecorder(spec, request).keeps == (step == 0)


def test_a_picture_is_shrunk_to_256_pixels_a_side() -> None:
    made = JobRecording(
        key="",
        model_hash="",
        spec=SPEC,
        embedding=torch.zeros(1),
        pixels=torch.full((512, 1024, 3), 7, dtype=torch.uint8),
        latents={},
    )
    small = made.small_picture()
    assert tuple(small.shape) == (128, 256, 3)
    assert bool((small == 7).all())
    assert made.size_bytes == 512 * 1024 * 3 + 4
