"""The clock of a gateway, which the test turns."""

from __future__ import annotations

import pytest

from tests.fakes.fake_time import FakeTime


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()
