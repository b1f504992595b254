"""What most tests of the engine draw with: a small model, and stock Diffusers with it."""

from __future__ import annotations

import pytest

from tests.samples.small_model import small_model
from tests.support.model_fixture import model  # noqa: F401 - for every test here
from tests.support.preview_fits import preview_fitted_once  # noqa: F401 - for every test here
from tests.support.stock import Stock


@pytest.fixture(scope="module")
def stock() -> Stock:
    return Stock(small_model())
