"""The small model that most tests of the engine draw with: one for each file, because LoRAs change its weights."""

from __future__ import annotations

import pytest

from bottega.model.model import Model
from tests.samples.small_model import small_model
from tests.support.manual_engine import load


@pytest.fixture(scope="module")
def model() -> Model:
    return load(small_model())
