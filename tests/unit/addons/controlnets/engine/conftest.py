"""Three random ControlNets of one size, as folders and as caches that load them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from bottega.addons.controlnets.engine import ControlNetCache
from bottega.model.model import Model
from tests.samples.controlnets import shelf_of, sources
from tests.support import model_fixture
from tests.support.controlled_engine import random_folders
from tests.support.preview_fits import preview_fitted_once  # noqa: F401 - for every test here

model = model_fixture.model


@pytest.fixture(scope="module")
def folders(model: Model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return random_folders(model, tmp_path_factory.mktemp("controlnets"))


@pytest.fixture(scope="module")
def size_bytes(model: Model, folders: dict[str, Path]) -> int:
    return sources(model, folders)["edges"].size_bytes


@pytest.fixture
def shelves(model: Model, folders: dict[str, Path]) -> Callable[..., AbstractContextManager[ControlNetCache]]:
    return partial(shelf_of, model, folders)
