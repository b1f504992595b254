"""The warm-up runs what is quick at the model's own size, and derives the rest from a small picture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from torch import Tensor

from bottega.engine import warm_up
from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.spec import ResolvedSpec
from bottega.model.model import Model
from tests.support.engines import make_engine
from tests.support.manual_engine import ManualEngine

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

    hooks = [part.register_forward_pre_hook(note) for part in (model.backbone.unet.conv_in, model.vae.decoder.conv_in)]
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
    quick = make_engine(large, EngineLimits(max_rows=2))
    quick.warm_up()
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
    # Both are measurements on a machine that others use, too.
    assert quick.fixed_s / 10 < engine.fixed_s < quick.fixed_s * 10
    spec = ResolvedSpec(prompt="a red star", num_inference_steps=1, width=OWN_SIDE, height=OWN_SIDE)
    drawn = ManualEngine(engine).draw(EngineOrder(key=1, spec=spec))
    assert drawn.pixels[0].shape == (OWN_SIDE, OWN_SIDE, 3)


def test_a_model_of_small_pictures_is_measured_at_its_own_size_alone(model: Model) -> None:
    engine = make_engine(model, EngineLimits(max_rows=2))
    with sides_run(model) as sides:
        engine.warm_up()
    assert sides == {model.defaults.width // model.latent_scale}
