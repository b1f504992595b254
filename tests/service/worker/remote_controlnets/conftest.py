"""A small model, ControlNets for it, and servers that host them: in this process, at the ends of real links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from bottega.addons.controlnets.engine import LocalControlNets
from bottega.model.model import Model
from tests.samples.controlnets import shelf_of
from tests.samples.small_model import small_model
from tests.support.controlled_engine import Desk, random_folders
from tests.support.linked_servers import LinkedServer, linked_server
from tests.support.manual_engine import load
from tests.support.preview_fits import preview_fitted_once  # noqa: F401 - for every test here
from tests.support.torch_threads import torch_threads


@pytest.fixture(scope="module", autouse=True)
def _a_thread_each() -> Iterator[None]:
    """Engine and servers compute at the same time, in one process."""
    with torch_threads(1):
        yield


@pytest.fixture(scope="module")
def model() -> Model:
    return load(small_model())


@pytest.fixture(scope="module")
def folders(model: Model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return random_folders(model, tmp_path_factory.mktemp("controlnets"))


@pytest.fixture(scope="module")
def near(folders: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LinkedServer]:
    with linked_server("near", folders, tmp_path_factory.mktemp("near")) as server:
        yield server


@pytest.fixture(scope="module")
def far(folders: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LinkedServer]:
    with linked_server("far", folders, tmp_path_factory.mktemp("far"), memfd=False) as server:
        yield server


@pytest.fixture(scope="module")
def local(model: Model, folders: Mapping[str, Path]) -> Iterator[LocalControlNets]:
    """The same ControlNets in the engine's own process."""
    with shelf_of(model, folders) as shelf:
        yield LocalControlNets(shelf)


@pytest.fixture(autouse=True)
def _no_links_left() -> Iterator[None]:
    with Desk.closing():
        yield
