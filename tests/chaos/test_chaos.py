"""Some of everything that `make chaos` does. By default only what no test of one service shows with less."""

from __future__ import annotations

import random
from collections.abc import Iterator
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


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with Scene(tmp_path_factory.mktemp("chaos"), ("a", "b")) as scene:
        yield scene


@pytest.fixture
def scene(shared: Scene) -> Scene:
    shared.tally = Tally()
    return shared


def _well(scene: Scene) -> None:
    scene.count_ends()
    assert scene.tally.well, (scene.tally.zeros, scene.tally.faults)


@pytest.mark.slow
def test_a_worker_killed_at_a_random_step_leaves_the_same_picture(scene: Scene) -> None:
    kill_workers(scene, times=1, rng=RNG)
    _well(scene)


@pytest.mark.slow
def test_a_frozen_worker_is_out_in_time_and_leaves_the_same_picture(scene: Scene) -> None:
    freeze_workers(scene, times=1, rng=RNG)
    _well(scene)


@pytest.mark.slow
def test_a_frozen_engine_is_replaced_in_time_and_leaves_the_same_picture(scene: Scene) -> None:
    freeze_engines(scene, times=1, rng=RNG)
    _well(scene)


@pytest.mark.slow
def test_a_frozen_front_kills_no_engine_and_leaves_the_same_picture(scene: Scene) -> None:
    freeze_fronts(scene, times=1, rng=RNG)
    _well(scene)


@pytest.mark.slow
def test_a_flood_of_cancelled_jobs_takes_nobodys_picture(scene: Scene) -> None:
    flood_cancels(scene, jobs=2500, rng=RNG)
    _well(scene)


@pytest.mark.slow
def test_a_controlnet_server_killed_in_a_session_leaves_the_same_picture(tmp_path: Path) -> None:
    with Scene(tmp_path, ("a",)) as scene:
        kill_controlnets(scene, times=2, servers=("x", "y"), rng=RNG)
        _well(scene)


@pytest.mark.slow
def test_a_lora_store_killed_while_a_lora_is_loaded_leaves_the_same_picture(scene: Scene) -> None:
    kill_lora_stores(scene, times=1, rng=RNG)
    _well(scene)


def test_a_gateway_killed_around_acknowledgement_loses_nothing(tmp_path: Path) -> None:
    with Scene(tmp_path, ("a",)) as scene:
        kill_gateways(scene, times=2, rng=RNG, ready_s=10.0)
        _well(scene)


@pytest.mark.slow
def test_strangers_that_join_cost_no_picture_and_keep_no_worker_out(scene: Scene) -> None:
    join_strangers(scene, times=1, rng=RNG)
    _well(scene)


@pytest.mark.slow
def test_a_full_disk_loses_nothing_and_heals(scene: Scene) -> None:
    fill_disks(scene, times=1, rng=RNG)
    _well(scene)


@pytest.mark.slow
def test_idle_connections_by_the_thousand_cost_others_nothing(scene: Scene) -> None:
    flood_connections(scene, times=1, rng=RNG)
    _well(scene)


@pytest.mark.slow
def test_streams_by_the_thousand_cost_others_nothing(scene: Scene) -> None:
    flood_streams(scene, times=1, rng=RNG)
    _well(scene)


@pytest.mark.slow
def test_clients_notice_no_rolling_restart(tmp_path: Path) -> None:
    with Scene(tmp_path, ("a", "b")) as scene:
        roll(scene, cycles=1, workers=("a", "b"), servers=("x", "y"), clients=2)
        _well(scene)
