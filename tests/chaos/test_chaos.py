"""Of what `make chaos` does one of each kind, in one suite.

In the default run a worker is killed. The others are slow: each is also shown by tests of one service, with real
processes of it and the others scripted.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.chaos.edits import EDITS, kill_editing_workers
from tests.chaos.gateways import LONG_STEPS, SEEDS, kill_gateways
from tests.chaos.scene import Drawing, Scene
from tests.chaos.workers import freeze_workers, kill_workers
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with Scene(tmp_path_factory.mktemp("chaos"), ("a", "b")) as scene:
        yield scene


def _expect_well(scene: Scene) -> None:
    assert scene.tally.well, (scene.tally.zeros, scene.tally.faults)


def _begin(scene: Scene) -> tuple[Drawing, str]:
    """A picture that is being drawn, and the worker that draws it."""
    scene.undisturbed(SEEDS[0], LONG_STEPS)
    drawing = scene.draw(seed=SEEDS[0], steps=LONG_STEPS)
    status = drawing.wait_for_step(10)
    assert status is not None
    wait_until(lambda: scene.who_draws(status.job_id) != "", "a worker to say that it draws")
    return drawing, scene.who_draws(status.job_id)


@pytest.mark.slow  # as tests/service/gateway/jobs/test_killed.py and test_restart.py
def test_a_gateway_killed_around_acknowledgement_loses_nothing(scene: Scene) -> None:
    kill_gateways(scene, times=2, rng=random.Random(7), ready_s=10.0)
    _expect_well(scene)


@pytest.mark.slow  # as tests/service/gateway/dispatch/test_losses.py and tests/service/worker/test_front_losses.py
@pytest.mark.alone  # it has to be noticed within two seconds
def test_a_worker_that_hangs_is_noticed_within_two_seconds_and_comes_back(scene: Scene) -> None:
    freeze_workers(scene, times=1, rng=random.Random(3))
    _expect_well(scene)


def test_a_worker_killed_in_mid_request_leaves_the_same_picture(scene: Scene) -> None:
    kill_workers(scene, times=1, rng=random.Random(3))
    _expect_well(scene)


@pytest.mark.slow
def test_a_worker_killed_in_mid_edit_leaves_the_same_picture(scene: Scene) -> None:
    kill_editing_workers(scene, times=1, rng=random.Random(5))
    _expect_well(scene)


@pytest.mark.slow
@pytest.mark.parametrize("seed", EDITS)
def test_a_worker_killed_in_mid_edit_of_each_kind_leaves_the_same_picture(scene: Scene, seed: int) -> None:
    scene.additions |= EDITS
    kill_workers(scene, times=1, rng=random.Random(seed), seeds=(seed,))
    _expect_well(scene)


@pytest.mark.slow  # as tests/service/worker/test_front_losses.py and tests/service/gateway/dispatch/test_losses.py
def test_a_worker_that_is_told_to_stop_loses_no_picture(scene: Scene) -> None:
    scene.wait_for_workers(2)
    drawing, name = _begin(scene)
    assert scene.worker(name).stop() == 0
    assert scene.check(drawing) is not None
    _expect_well(scene)


@pytest.mark.slow  # as tests/service/gateway/dispatch/test_losses.py
def test_a_gateway_that_is_told_to_stop_finishes_what_runs(scene: Scene) -> None:
    """The last one: nothing is left to draw with."""
    drawing, name = _begin(scene)
    assert scene.gateway.stop() == 0
    picture = scene.check(drawing)
    assert picture is not None
    assert picture.provenance.attempts == 1
    assert scene.worker(name).stop() == 0
    scene.count_ends()
    _expect_well(scene)
