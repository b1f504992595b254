"""Three random ControlNets of one size, as folders and as caches that load them, and an engine that draws with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from bottega.addons.controlnets.engine import ControlNetCache, LocalControlNets
from bottega.model.model import Model
from tests.samples.controlnets import shelf_of, sources
from tests.support import model_fixture
from tests.support.controlled_engine import random_folders
from tests.support.engines import TOGETHER, make_engine
from tests.support.manual_engine import ManualEngine
from tests.support.preview_fits import preview_fitted_once  # noqa: F401 - for every test here

model = model_fixture.model


@pytest.fixture(scope="module")
def folders(model: Model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return random_folders(model, tmp_path_factory.mktemp("controlnets"))


@pytest.fixture(scope="module")
def size_bytes(model: Model, folders: dict[str, Path]) -> int:
    return sources(model, folders)["edges"].size_bytes


@pytest.fixture(scope="module")
def shelf(model: Model, folders: Mapping[str, Path]) -> Iterator[ControlNetCache]:
    with shelf_of(model, folders) as shelf:
        yield shelf


@pytest.fixture(scope="module")
def easel(model: Model, shelf: ControlNetCache) -> ManualEngine:
    """An engine that is idle between the tests."""
    return ManualEngine(make_engine(model, TOGETHER, controlnets=LocalControlNets(shelf)))


@pytest.fixture
def shelves(model: Model, folders: dict[str, Path]) -> Callable[..., AbstractContextManager[ControlNetCache]]:
    return partial(shelf_of, model, folders)
