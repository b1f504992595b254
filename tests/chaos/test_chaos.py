"""Some of everything that `make chaos` does. By default only what no test of one service shows with less."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos.cancels import flood_cancels
from tests.chaos.controlnets import kill_controlnets
from tests.chaos.floods import flood_connections, flood_streams
from tests.chaos.gateways import fill_disks, kill_gateways
from tests.chaos.loras import kill_lora_stores
from tests.chaos.restarts import roll
from tests.chaos.scene import Scene
from tests.chaos.strangers import join_strangers
from tests.chaos.tally import Tally
from tests.chaos.workers import freeze_engines, freeze_fronts, freeze_workers, kill_workers

# Two workers and more draw on all cores, and losses are to be noticed in time.
pytestmark = pytest.mark.alone

RNG = random.Random(7)
# What may be done to the same two workers one after the other.
TO_TWO_WORKERS: list[Callable[..., None]] = [
    kill_workers,
    freeze_workers,
    freeze_engines,
    freeze_fronts,
    kill_lora_stores,
    join_strangers,
    fill_disks,
    flood_connections,
    flood_streams,
]


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with Scene(tmp_path_factory.mktemp("chaos"), ("a", "b")) as scene:
        yield scene


def _expect_well(scene: Scene) -> None:
    scene.count_ends()
    assert scene.tally.well, (scene.tally.zeros, scene.tally.faults)


@pytest.mark.slow
@pytest.mark.parametrize("play", TO_TWO_WORKERS)
def test_whatever_is_done_nothing_is_lost_and_every_picture_is_the_same(
    two_workers: Scene, play: Callable[..., None]
) -> None:
    two_workers.tally = Tally()
    play(two_workers, times=1, rng=RNG)
    _expect_well(two_workers)


@pytest.mark.slow
def test_a_flood_of_cancelled_jobs_takes_nobodys_picture(two_workers: Scene) -> None:
    two_workers.tally = Tally()
    flood_cancels(two_workers, jobs=2500, rng=RNG)
    _expect_well(two_workers)


@pytest.mark.slow
def test_a_controlnet_server_killed_in_a_session_leaves_the_same_picture(tmp_path: Path) -> None:
    with Scene(tmp_path, ("a",)) as scene:
        kill_controlnets(scene, times=2, servers=("x", "y"), rng=RNG)
        _expect_well(scene)


def test_a_gateway_killed_around_acknowledgement_loses_nothing(tmp_path: Path) -> None:
    with Scene(tmp_path, ("a",)) as scene:
        kill_gateways(scene, times=2, rng=RNG, ready_s=10.0)
        _expect_well(scene)


@pytest.mark.slow
def test_clients_notice_no_rolling_restart(tmp_path: Path) -> None:
    with Scene(tmp_path, ("a", "b")) as scene:
        roll(scene, cycles=1, workers=("a", "b"), servers=("x", "y"), clients=2)
        _expect_well(scene)
