"""What the tests of chaos share; each file starts a `suite` of its own."""

from __future__ import annotations

import pytest

from tests.chaos.scene import Scene
from tests.chaos.tally import Tally


@pytest.fixture
def scene(suite: Scene) -> Scene:
    """With a tally of the test's own."""
    suite.tally = Tally()
    return suite
