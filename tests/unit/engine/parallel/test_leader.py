"""When the leader of a pair lends rows, by what it has measured: against a follower that answers as it is told to."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch

from bottega.addons.edits.engine.activations import EditActivations
from bottega.device.heartbeat import Heartbeat
from bottega.engine.forward import Prediction
from bottega.engine.parallel import pair as pair_module
from bottega.engine.parallel.pair import Offloadable, Pair, PairPrediction
from bottega.engine.parallel.remote_rows import OffloadedRow, OffloadResult, RemoteJob
from bottega.engine.times import KnownTimes
from bottega.model.rows import Embeds, Half, Row
from bottega.planning import RowFractions, StepTimes
from tests.fakes.fake_time import FakeTime

EMBEDS = Embeds(prompt=torch.zeros(7, 8), added={"text_embeds": torch.zeros(4), "time_ids": torch.zeros(6)})
GUEST = RemoteJob(halves={Half.UNCONDITIONAL: EMBEDS, Half.CONDITIONAL: EMBEDS})
OWN_S = 0.1


class Network:
    """Takes OWN_S for every row, says so at once, and keeps the times as an engine does.

    residuals_s: that it waited for residuals besides.
    """

    def __init__(self, times: StepTimes, residuals_s: float = 0.0) -> None:
        self._times = times
        self._residuals_s = residuals_s

    def __call__(self, rows: Sequence[Row]) -> Prediction:
        self._times.observe((8, 8), len(rows), OWN_S * len(rows))
        waits_s = {row: 0.5 for row in rows if row.activations is not None}
        return Prediction(
            noise={row: row.sample for row in rows},
            times=KnownTimes(seconds=OWN_S * len(rows), waited_s=self._residuals_s),
            load_waits_s=waits_s,
        )


class ScriptedFollower:
    """A Follower. seconds: that its answers take, in turn; the last one for ever after. turns: that were lent."""

    name = "other"
    awaits_result = False

    def __init__(self, *seconds: float) -> None:
        self.free = True
        self.turns = 0
        self._seconds = list(seconds)
        self._rows: Sequence[OffloadedRow] = ()

    def accepts(self, remote_job: RemoteJob) -> bool:
        return True

    def forget(self, remote_job: RemoteJob) -> None:
        pass

    def offload(self, rows: Sequence[OffloadedRow]) -> bool:
        self.turns += 1
        self._rows = rows
        return True

    def result(self, timeout_s: float) -> OffloadResult | None:
        seconds = self._seconds.pop(0) if len(self._seconds) > 1 else self._seconds[0]
        return OffloadResult(noise={each.row: each.row.sample + 1 for each in self._rows}, seconds=seconds)


def rows_of(owner: str) -> list[Row]:
    sample = torch.zeros(4, 8, 8)
    return [
        Row(owner=owner, step=0, half=half, sample=sample, timestep=torch.tensor(1.0), embeds=EMBEDS) for half in Half
    ]


def offloadable(*owners: str) -> Mapping[Hashable, Offloadable]:
    return {owner: Offloadable(remote_job=GUEST, image=0, active=lambda _: ()) for owner in owners}


def pair_with(*seconds: float, one_row_s: float = OWN_S) -> tuple[Pair, ScriptedFollower]:
    """A pair and its follower. one_row_s: what a row took here when it was measured last."""
    follower = ScriptedFollower(*seconds)
    times = StepTimes()
    for _ in range(20):  # settled
        times.observe((8, 8), 2, 2 * OWN_S)
        times.observe((8, 8), 1, one_row_s)
    return Pair(Network(times), follower, times, RowFractions(), Heartbeat()), follower


def shared(pair: Pair, turns: int) -> list[bool]:
    """Of so many turns of one guided request, which were shared."""
    predictions = [pair.predict(rows_of("a"), offloadable("a")) for _ in range(turns)]
    return [isinstance(prediction, PairPrediction) for prediction in predictions]


def test_every_row_has_the_noise_of_whoever_computed_it() -> None:
    pair, _ = pair_with(OWN_S)
    unconditional, conditional = rows = rows_of("a")
    prediction = pair.predict(rows, offloadable("a"))
    assert isinstance(prediction, PairPrediction)
    assert {row: float(noise.mean()) for row, noise in prediction.noise.items()} == {unconditional: 0, conditional: 1}
    assert prediction.offloaded == {"a"}


@pytest.mark.parametrize("seconds", [[100 * OWN_S, OWN_S], [*[OWN_S] * 5, 50 * OWN_S, OWN_S]], ids=["first", "later"])
def test_a_slow_answer_among_quick_ones_does_not_end_the_pair(seconds: list[float]) -> None:
    pair, _ = pair_with(*seconds)
    assert all(shared(pair, 20))


def test_a_follower_that_stays_slow_is_left_alone_and_tried_again_ever_more_rarely() -> None:
    pair, follower = pair_with(5 * OWN_S)
    shared(pair, 100)
    early = follower.turns
    shared(pair, 100)
    assert early < 15
    assert 0 < follower.turns - early < early


def test_a_wrong_measure_of_fewer_rows_here_does_not_keep_the_pair_apart_for_ever() -> None:
    pair, _ = pair_with(OWN_S, one_row_s=3 * OWN_S)  # others were on the cores
    assert not shared(pair, 1)[0]
    shared(pair, 60)
    assert all(shared(pair, 20))


def test_rows_that_read_recordings_or_make_them_are_computed_where_those_are() -> None:
    pair, follower = pair_with(OWN_S)
    edited = [replace(row, activations=EditActivations()) for row in rows_of("edited")]
    prediction = pair.predict([*edited, *rows_of("plain")], offloadable("edited", "plain"))
    assert isinstance(prediction, PairPrediction)
    assert prediction.offloaded == {"plain"}
    assert prediction.load_waits_s == dict.fromkeys(edited, 0.5)
    turns = follower.turns
    pair.predict(edited, offloadable("edited"))
    assert follower.turns == turns


class LateFollower(ScriptedFollower):
    """A follower whose answer comes `after_s` seconds after the leader begins to wait, on the test's clock."""

    awaits_result = True

    def __init__(self, time: FakeTime, after_s: float) -> None:
        super().__init__(OWN_S)
        self._time = time
        self._left_s = after_s

    def result(self, timeout_s: float) -> OffloadResult | None:
        self._time.now += timeout_s
        self._left_s -= timeout_s
        return super().result(timeout_s) if self._left_s <= 0 else None


@pytest.mark.parametrize(("residuals_s", "taken_back"), [(0.0, {"a"}), (1.0, set())])
def test_a_leader_that_waited_for_residuals_waits_longer_for_its_follower(
    residuals_s: float, taken_back: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    time = FakeTime()
    monkeypatch.setattr(pair_module, "perf_counter", time.monotonic)
    times = StepTimes()
    network = Network(times, residuals_s=residuals_s)
    pair = Pair(network, LateFollower(time, 3.0), times, RowFractions(), Heartbeat())
    prediction = pair.predict(rows_of("a"), offloadable("a"))
    assert isinstance(prediction, PairPrediction)
    assert prediction.taken_back == taken_back
