"""What most tests of the engine draw with: a small model."""

from __future__ import annotations

from tests.support.model_fixture import model  # noqa: F401 - for every test here
from tests.support.preview_fits import preview_fitted_once  # noqa: F401 - for every test here
