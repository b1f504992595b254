"""A small model and two random ControlNets, for engines that lead, follow and serve in this process."""

from __future__ import annotations

import pytest
from diffusers import ControlNetModel

from bottega.model.model import Model
from tests.samples.controlnets import random_controlnet
from tests.samples.small_model import small_model
from tests.support.manual_engine import load
from tests.support.preview_fits import preview_fitted_once  # noqa: F401 - for every test here
from tests.support.stock import load_stock


@pytest.fixture(scope="module")
def model() -> Model:
    return load(small_model())


@pytest.fixture(scope="module")
def nets() -> dict[str, ControlNetModel]:
    return {
        name: random_controlnet(load_stock(small_model()).unet, seed) for seed, name in enumerate(("edges", "depth"))
    }
