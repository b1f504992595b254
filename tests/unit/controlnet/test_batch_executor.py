"""Which rows share a ControlNet server's forwards, whose answer comes when, and what a failure costs whom."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from bottega.controlnet.batch_executor import BatchExecutor, Residuals, StepRequest
from bottega.diffusion.controlnets import ControlNetCache, ControlRow, ControlSession
from bottega.diffusion.controlnets.provider import ControlInput
from bottega.diffusion.model.model import Model
from bottega.diffusion.rows import Embeds, Half
from bottega.errors import BottegaError, InternalError
from tests.samples.controlnets import control_image, random_controlnet, save, shelf_of
from tests.support.manual_engine import load

LOAD_S = 20.0


@pytest.fixture(scope="module")
def model() -> Model:
    return load()


@pytest.fixture(scope="module")
def cache(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlNetCache]:
    nets = {name: random_controlnet(model.backbone.unet, seed) for seed, name in enumerate(("edges", "depth"))}
    folders: dict[str, Path] = save(nets, tmp_path_factory.mktemp("nets"))
    with shelf_of(model, folders) as cache:
        yield cache


class Outcomes:
    """What came of the works that were put."""

    def __init__(self, executor: BatchExecutor) -> None:
        self.executor = executor
        self.ended: dict[str, Sequence[Residuals] | BottegaError] = {}

    def submit(self, name: str, rows: Sequence[ControlRow], owner: object = "worker") -> None:
        self.executor.submit(
            StepRequest(owner=owner, rows=rows, done=lambda outcome: self.ended.update({name: outcome}))
        )


def session(cache: ControlNetCache, net: str = "edges", side: int = 64, scale: float = 1.0) -> ControlSession:
    embeds = Embeds(prompt=torch.randn(77, 128), pooled=torch.randn(64), time_ids=torch.zeros(6))
    halves = dict.fromkeys(Half, embeds)
    control = ControlInput(name=net, image=control_image(1), height=side, width=side, halves=halves, scale=scale)
    (loaded,) = cache.borrow([net]).values.result(LOAD_S)
    return ControlSession(loaded, control)


def rows(*sessions: ControlSession, side: int = 16) -> list[ControlRow]:
    """Both halves of each."""
    return [
        ControlRow(session=each, half=half, sample=torch.randn(4, side, side), timestep=torch.tensor(500.0))
        for each in sessions
        for half in Half
    ]


def test_steps_of_several_workers_share_a_forward_and_each_gets_its_own_rows(cache: ControlNetCache) -> None:
    outcomes = Outcomes(BatchExecutor(max_rows=16))
    asked = {name: rows(session(cache)) for name in ("one", "two", "three")}
    for name, mine in asked.items():
        outcomes.submit(name, mine, owner=name)
    outcomes.executor.run_batch(0.0)
    assert (outcomes.executor.batches, outcomes.executor.rows) == (1, 6)
    for name, mine in asked.items():
        alone = Outcomes(BatchExecutor(max_rows=16))
        alone.submit(name, mine)
        alone.executor.run_batch(0.0)
        for together, apart in zip(residuals(outcomes, name), residuals(alone, name), strict=True):
            for one, other in zip(together.by_point, apart.by_point, strict=True):
                torch.testing.assert_close(one[together.place], other[apart.place], atol=1e-4, rtol=1e-4)


def test_another_controlnet_and_another_size_take_forwards_of_their_own_and_the_oldest_is_first(
    cache: ControlNetCache,
) -> None:
    outcomes = Outcomes(BatchExecutor(max_rows=16))
    outcomes.submit("edges", rows(session(cache)))
    outcomes.submit("depth", rows(session(cache, "depth")))
    outcomes.submit("large", rows(session(cache, side=128), side=32))
    outcomes.submit("edges too", rows(session(cache)))
    order: list[set[str]] = []
    for _ in range(3):
        outcomes.executor.run_batch(0.0)
        order.append(set(outcomes.ended) - set().union(*order))
    assert order == [{"edges", "edges too"}, {"depth"}, {"large"}]
    assert not outcomes.executor.busy


def test_a_step_with_two_controlnets_is_answered_when_both_are_done(cache: ControlNetCache) -> None:
    outcomes = Outcomes(BatchExecutor(max_rows=16))
    outcomes.submit("both", rows(session(cache), session(cache, "depth")))
    outcomes.executor.run_batch(0.0)
    assert not outcomes.ended
    outcomes.executor.run_batch(0.0)
    assert len(residuals(outcomes, "both")) == 4


def test_a_forward_has_no_more_rows_than_it_may(cache: ControlNetCache) -> None:
    outcomes = Outcomes(BatchExecutor(max_rows=3))
    outcomes.submit("one", rows(session(cache)))
    outcomes.submit("two", rows(session(cache)))
    outcomes.executor.run_batch(0.0)
    assert set(outcomes.ended) == {"one"}
    outcomes.executor.run_batch(0.0)
    assert outcomes.executor.rows == 4
    assert set(outcomes.ended) == {"one", "two"}


def test_a_forward_that_fails_costs_only_the_step_that_makes_it_fail(cache: ControlNetCache) -> None:
    outcomes = Outcomes(BatchExecutor(max_rows=16))
    bad = rows(session(cache))
    bad[0].session.halves[Half.UNCONDITIONAL] = Embeds(
        prompt=torch.randn(77, 128), pooled=torch.randn(7), time_ids=torch.zeros(6)
    )
    outcomes.submit("bad", bad)
    outcomes.submit("good", rows(session(cache)))
    for _ in range(3):
        outcomes.executor.run_batch(0.0)
    assert isinstance(outcomes.ended["bad"], InternalError)
    assert len(residuals(outcomes, "good")) == 2


def test_what_waits_of_a_worker_that_has_gone_is_forgotten(cache: ControlNetCache) -> None:
    outcomes = Outcomes(BatchExecutor(max_rows=16))
    outcomes.submit("gone", rows(session(cache)), owner="gone")
    outcomes.submit("here", rows(session(cache)), owner="here")
    outcomes.executor.drop_owner("gone")
    outcomes.executor.run_batch(0.0)
    assert set(outcomes.ended) == {"here"}
    assert outcomes.executor.rows == 2


def residuals(outcomes: Outcomes, name: str) -> Sequence[Residuals]:
    outcome = outcomes.ended[name]
    assert not isinstance(outcome, BottegaError)
    return outcome
