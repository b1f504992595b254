"""Kernels run in Triton's interpreter here, but for those tests that have a CUDA device."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def interpreted(request: pytest.FixtureRequest) -> None:
    """A kernel would look for a device otherwise; and on one, nothing would be seen of how it is compiled."""
    wanted = "0" if request.node.get_closest_marker("gpu") else "1"
    assert os.environ.get("TRITON_INTERPRET", "0") == wanted, "tests/conftest.py reads what is run: pytest -m gpu"
