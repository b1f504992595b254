"""The engine's turns: what happens in one, what is said about it and when, and what fixed groups promise."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from bottega.device.heartbeat import Heartbeat
from bottega.engine import warm_up
from bottega.engine.acceleration.torch_options import ChannelsLast
from bottega.engine.events import ImageDrawn, JobAdvanced, JobStarted
from bottega.engine.job import STAGES, EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.spec import ResolvedSpec
from bottega.model.model import Model
from bottega.model.schedulers import SamplerKind
from tests.fakes.fake_time import FakeTime
from tests.samples.small_model import SIZE, small_model
from tests.support.engines import make_engine
from tests.support.manual_engine import Drawing, ManualEngine, load
from tests.support.stock import Pixels, Stock, assert_same_image
from tests.support.torch_threads import torch_threads

SPEC = ResolvedSpec(
    prompt="a big red star on the left on a blue background", num_inference_steps=6, width=SIZE, height=SIZE, seed=15
)
# All that are there share every turn.
TOGETHER = EngineLimits(max_wait_turns=0)


@pytest.fixture(scope="module", autouse=True)
def two_threads() -> Iterator[None]:
    """Shared evenly, or not: what fixed rows promise depends on it."""
    with torch_threads(2):
        yield


@pytest.fixture(scope="module")
def miniature() -> Model:
    return load()


def unlike_orders() -> list[EngineOrder]:
    """Jobs that differ in all that may differ within a group."""
    source = torch.arange(SIZE * SIZE * 3).reshape(SIZE, SIZE, 3).remainder(251).to(torch.uint8)
    few = replace(SPEC, num_inference_steps=3)
    specs = [
        few,
        replace(few, guidance_scale=1.0, num_inference_steps=5, sampler=SamplerKind.DPMPP_2M, prompt="a star"),
        replace(few, sampler=SamplerKind.EULER_ANCESTRAL, guidance_rescale=0.5, negative_prompt="a circle"),
        replace(few, sampler=SamplerKind.DDIM, seed=3, prompt="a green circle"),
        replace(few, num_images=2, use_karras_sigmas=True),
    ]
    orders = [EngineOrder(key=key, spec=spec) for key, spec in enumerate(specs)]
    return [*orders, EngineOrder(key="picture", spec=replace(few, num_inference_steps=5, strength=0.7), image=source)]


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels last"])
def test_with_fixed_rows_images_are_equal_byte_for_byte_alone_and_in_a_busy_batch(channels_last: bool) -> None:
    model, limits = load(small_model()), EngineLimits(fixed_rows=8)
    if channels_last:
        ChannelsLast("unet").enable(model)
    lonely = ManualEngine(make_engine(model, limits))
    alone = {order.key: lonely.draw(order) for order in unlike_orders()}
    chance = random.Random(1)
    turns = chance.sample(range(8), len(alone))
    busy = ManualEngine(make_engine(model, limits)).run(
        {turn: [order] for turn, order in zip(turns, unlike_orders(), strict=True)}
    )
    assert max(drawing.record.provenance.mean_group_requests for drawing in busy.values()) > 1.5
    for key, drawing in busy.items():
        for ours, theirs in zip(drawing.pixels, alone[key].pixels, strict=True):
            assert (ours == theirs).all()
    assert_same_image(alone[0].pixels[0], Stock(small_model()).reference(unlike_orders()[0].spec).pixels)


def test_a_fixed_number_of_rows_that_the_threads_cannot_share_evenly_is_refused(model: Model) -> None:
    """A picture's last bits would depend on its place in the group. One row has no room for a guided request."""
    assert torch.get_num_threads() == 2
    with pytest.raises(ValueError, match="fixed_rows is 1"):
        make_engine(model, EngineLimits(fixed_rows=1))
    with pytest.raises(ValueError, match="fixed_rows is 6; with 2 threads it must be a multiple of 4"):
        make_engine(model, EngineLimits(fixed_rows=6))


def test_progress_is_told_at_most_once_in_an_interval_and_at_the_end(model: Model) -> None:
    clock = FakeTime()
    easel = ManualEngine(make_engine(model, replace(TOGETHER, progress_interval_s=0.1), clock=clock.monotonic))
    steps = {"long": 20, "short": 13}
    for key, count in steps.items():
        easel.submit(EngineOrder(key=key, spec=replace(SPEC, num_inference_steps=count, guidance_scale=1.0)))
    told: dict[object, list[tuple[float, int]]] = {key: [] for key in steps}
    while easel.engine.busy:
        clock.now += 0.03
        for event in easel.turn():
            if isinstance(event, JobAdvanced):
                told[event.key].append((clock.now, event.steps_done))
    for key, count in steps.items():
        # With the first turn, every fourth after it, and with the last.
        assert [done for _, done in told[key]] == [*range(1, count, 4), count]
        pauses_s = [after - before for (before, _), (after, _) in itertools.pairwise(told[key][:-1])]
        assert min(pauses_s) >= 0.1


def progress_of(model: Model, order: EngineOrder) -> tuple[Drawing, list[JobAdvanced]]:
    """Of a job that tells of every step."""
    drawing = ManualEngine(make_engine(model, replace(TOGETHER, progress_interval_s=1e-9))).draw(order)
    return drawing, drawing.all(JobAdvanced)


def test_previews_asked_for_on_the_way_come_from_then_on(model: Model) -> None:
    easel = ManualEngine(make_engine(model, replace(TOGETHER, progress_interval_s=1e-9)))
    for key in (0, 1):
        easel.submit(EngineOrder(key=key, spec=SPEC))
    easel.engine.enable_previews(1)  # which waits to be encoded
    shown: dict[object, list[bool]] = {0: [], 1: []}
    while easel.engine.busy:
        for event in easel.turn():
            if isinstance(event, JobAdvanced):
                shown[event.key].append(event.preview is not None)
        if len(shown[0]) == 3:
            easel.engine.enable_previews(0)
    easel.engine.enable_previews(0)  # harmless when it is gone
    assert shown == {0: [False] * 3 + [True] * 3, 1: [True] * 6}


# Prompts in whose colours the miniature's latents are about linear. Over 120 held-out scenes of all colours the median
# of the correlation is .68: a property of its VAE.
@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        ("a small blue triangle on the left on a cyan background", SamplerKind.EULER_ANCESTRAL),
        ("a big yellow ring in the center on a blue background", SamplerKind.DPMPP_2M),
    ],
)
def test_the_preview_of_a_nearly_finished_latent_looks_like_the_picture(
    miniature: Model, prompt: str, kind: SamplerKind
) -> None:
    spec = replace(SPEC, prompt=prompt, sampler=kind, num_inference_steps=10)
    drawing, progress = progress_of(miniature, EngineOrder(key=0, spec=spec, preview=True))
    preview = progress[-2].preview
    assert preview is not None
    assert correlation(preview.numpy(), scaled_down(drawing.pixels[0], 4)) > 0.8


def scaled_down(pixels: Pixels, factor: int) -> NDArray[np.float64]:
    """The mean of every `factor` by `factor` pixels."""
    height, width, _ = pixels.shape
    means: NDArray[np.float64] = pixels.reshape(height // factor, factor, width // factor, factor, 3).mean(axis=(1, 3))
    return means


def correlation(ours: Pixels, theirs: NDArray[np.float64]) -> float:
    """Of all values; a picture of one colour has none, which fails."""
    assert ours.std() > 5
    return float(np.corrcoef(ours.ravel(), theirs.ravel())[0, 1])


def test_the_preview_of_several_images_is_of_the_first_that_is_under_way(model: Model) -> None:
    one_by_one = EngineLimits(max_rows=2, max_wait_turns=1000, progress_interval_s=1e-9)
    order = EngineOrder(key=0, spec=replace(SPEC, num_inference_steps=3, num_images=2), preview=True)
    drawing = ManualEngine(make_engine(model, one_by_one)).draw(order)
    assert [event.preview_index for event in drawing.all(JobAdvanced)] == [0, 0, 1, 1, 1, 1]


def test_a_turn_encodes_at_most_one_prompt_and_decodes_at_most_one_latent(model: Model) -> None:
    easel = ManualEngine(make_engine(model, TOGETHER))
    for key in range(3):
        easel.submit(EngineOrder(key=key, spec=replace(SPEC, num_inference_steps=1, num_images=2)))
    turns = []
    while easel.engine.busy:
        turns.append(easel.turn())
    encoded = [[event.key for event in turn if isinstance(event, JobStarted)] for turn in turns]
    decoded = [[(event.key, event.index) for event in turn if isinstance(event, ImageDrawn)] for turn in turns]
    # All have made their step by the third turn; their latents wait, and are decoded in order.
    assert encoded == [[0], [1], [2], [], [], []]
    assert decoded == [[(0, 0)], [(0, 1)], [(1, 0)], [(1, 1)], [(2, 0)], [(2, 1)]]
    assert easel.engine.turns == 3
    assert easel.engine.steps == 6


def test_the_record_says_who_shared_the_turns_and_where_the_time_went(model: Model) -> None:
    easel = ManualEngine(make_engine(model, TOGETHER))
    began_s = time.perf_counter()
    drawings = easel.run(
        {0: [EngineOrder(key=0, spec=replace(SPEC, num_inference_steps=4))], 1: [EngineOrder(key=1, spec=SPEC)]}
    )
    took_s = time.perf_counter() - began_s
    # The first is alone for one step of four, the second for its last three of six.
    assert [drawings[key].record.provenance.mean_group_requests for key in (0, 1)] == [(1 + 3 * 2) / 4, (3 * 2 + 3) / 6]
    for drawing in drawings.values():
        seconds = drawing.record.seconds
        assert tuple(seconds) == STAGES == ("encode", "denoise", "batch", "decode")
        assert all(spent > 0 for spent in seconds.values())
        assert sum(seconds.values()) < took_s


def test_warming_up_measures_turns_of_growing_width_and_the_time_beside_them(model: Model) -> None:
    engine = make_engine(model, EngineLimits(max_rows=16))
    assert engine.fixed_s == 0
    engine.warm_up()
    entries = list(engine.step_times.entries())
    assert [(shape, rows) for shape, rows, _ in entries] == [((8, 8), rows) for rows in (1, 2, 4, 8, 16)]
    assert all(seconds > 0 for _, _, seconds in entries)
    assert engine.fixed_s > 0
    assert not engine.busy


def test_drawing_leaves_the_process_own_random_numbers_alone(model: Model) -> None:
    before = torch.random.get_rng_state()
    ManualEngine(make_engine(model, TOGETHER)).draw(
        EngineOrder(key=0, spec=replace(SPEC, sampler=SamplerKind.EULER_ANCESTRAL))
    )
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_turn_tells_that_it_is_alive_from_within(miniature: Model) -> None:
    """A slow turn must not be taken for a hang."""
    heartbeat = Heartbeat()
    easel = ManualEngine(make_engine(miniature, EngineLimits(), heartbeat=heartbeat))
    beats: list[int] = []
    heartbeat.subscribe(lambda: beats.append(easel.engine.turns))
    easel.submit(EngineOrder(key=1, spec=replace(SPEC, num_inference_steps=1)))
    for _ in easel.turn():
        pass
    assert beats.count(0) >= 6  # while the prompt was encoded: three layers in each of two encoders
    assert beats.count(1) >= 20  # while the step ran, and the picture was decoded


def test_without_a_limit_a_model_draws_up_to_a_few_times_its_own_size(model: Model) -> None:
    assert make_engine(model, EngineLimits()).max_pixels == 512 * 512
    assert make_engine(model, EngineLimits(max_pixels=4096)).max_pixels == 4096


# Four times the side of the small picture, whose latent has 16 x 16 elements.
OWN_SIDE = 256
OWN_LATENT, SMALL_LATENT = 64, 16


@pytest.fixture
def large(model: Model) -> Model:
    """A model that is made for large pictures."""
    return replace(model, defaults=replace(model.defaults, width=OWN_SIDE, height=OWN_SIDE))


@contextmanager
def sides_run(model: Model) -> Iterator[set[int]]:
    """The sides of the latents that its network and its VAE's decoder saw in the block."""
    sides: set[int] = set()

    def note(_: object, inputs: tuple[Tensor, ...]) -> None:
        sides.add(inputs[0].shape[-1])

    parts = (model.backbone.network.conv_in, model.vae.decoder.conv_in)
    hooks = [part.register_forward_pre_hook(note) for part in parts]
    try:
        yield sides
    finally:
        for hook in hooks:
            hook.remove()


def test_what_is_quick_is_measured_at_the_models_own_size(large: Model) -> None:
    engine = make_engine(large, EngineLimits(max_rows=2))
    with sides_run(large) as sides:
        engine.warm_up()
    assert sides == {SMALL_LATENT, OWN_LATENT}
    assert {shape for shape, _, _ in engine.step_times.entries()} == {(OWN_LATENT, OWN_LATENT)}


def test_what_would_take_long_follows_from_a_small_picture(large: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "_LONGEST_S", 0.0)
    engine = make_engine(large, EngineLimits(max_rows=2))
    with sides_run(large) as sides:
        engine.warm_up()
    assert sides == {SMALL_LATENT}
    assert {shape for shape, _, _ in engine.step_times.entries()} == {(SMALL_LATENT, SMALL_LATENT)}
    expected_s = engine.step_times.seconds((OWN_LATENT, OWN_LATENT), 1)
    small_s = engine.step_times.seconds((SMALL_LATENT, SMALL_LATENT), 1)
    assert expected_s is not None
    assert small_s is not None
    assert expected_s == pytest.approx((OWN_LATENT / SMALL_LATENT) ** 2 * small_s)
    assert engine.fixed_s > 0
    spec = ResolvedSpec(prompt="a red star", num_inference_steps=1, width=OWN_SIDE, height=OWN_SIDE)
    drawn = ManualEngine(engine).draw(EngineOrder(key=1, spec=spec))
    assert drawn.pixels[0].shape == (OWN_SIDE, OWN_SIDE, 3)
