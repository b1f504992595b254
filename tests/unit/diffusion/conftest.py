"""What most tests of the engine draw with: a small model, one for each file, because LoRAs change its weights."""

from __future__ import annotations

import pytest

from bottega.diffusion.model.model import Model
from tests.samples.small_model import small_model
from tests.support.manual_engine import load
from tests.support.preview_fits import preview_fitted_once  # noqa: F401 - for every test here


@pytest.fixture(scope="module")
def model() -> Model:
    return load(small_model())
