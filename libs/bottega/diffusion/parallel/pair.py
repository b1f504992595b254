"""Latent parallelism: one forward of a group, with some of its rows computed by the other worker of the pair.

The leader decides, and keeps latents, samplers and generators. Rows that do not come back are computed here in the same
turn, so that the follower's death costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor

from bottega.diffusion.engine.forward import Prediction
from bottega.diffusion.engine.times import KnownTimes
from bottega.diffusion.heartbeat import Heartbeat
from bottega.diffusion.parallel.offload import OffloadedRow, OffloadResult, OffloadTarget, RemoteJob
from bottega.diffusion.rows import Row
from bottega.planning import RowFractions, Shape, StepTimes, rows_to_offload

# How long the leader waits for rows when its own are done: so many times what they should take, and this at least.
# A follower that is dead is noticed sooner; this is for one that is stopped, or slowed down by others on its cores.
_PATIENCE = 4.0
_LEAST_PATIENCE_S = 1.0
# Between two signs of life while it waits.
_LOOK_S = 0.1
# Turns without the follower after which it is tried again in so many, whatever was measured: others on the cores may
# have gone, and what fewer rows take here is only measured while they are shared. Doubled each time in vain.
_LEAST_PAUSE_TURNS = 2
_MOST_PAUSE_TURNS = 32
_TRIES = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Offloadable:
    """A request whose rows may be offloaded. image: its place in its job. active: of a row, see OffloadedRow."""

    remote_job: RemoteJob
    image: int
    active: Callable[[Row], tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairPrediction(Prediction):
    """What a turn of a pair made, see Prediction; its seconds are all but the waiting for residuals.

    offloaded: owners of rows that the follower computed. taken_back: of rows that were offloaded and did not come back.
    peer_wait_s: for them, when everything else was done.
    """

    offloaded: frozenset[Hashable] = frozenset()
    taken_back: frozenset[Hashable] = frozenset()
    peer_wait_s: float = 0.0


class Pair:
    """predict: a forward here. times: of those, and fractions: what rows cost of which a part is computed, both kept by
    their runner. heartbeat: beats while it waits.

    backlog: requests that wait elsewhere for a worker.
    """

    def __init__(
        self,
        predict: Callable[[Sequence[Row]], Prediction],
        target: OffloadTarget,
        times: StepTimes,
        fractions: RowFractions,
        heartbeat: Heartbeat,
    ) -> None:
        self.backlog = 0
        self._here = predict
        self._target = target
        self._heartbeat = heartbeat
        self._times = times
        self._fractions = fractions
        self._theirs = StepTimes()
        self._unused_turns = 0
        self._pause_turns = _LEAST_PAUSE_TURNS
        self._tries = 0

    @property
    def name(self) -> str:
        """Of the follower's worker."""
        return self._target.name

    def forget(self, remote_job: RemoteJob) -> None:
        """A job has ended."""
        self._target.forget(remote_job)

    def predict(self, rows: Sequence[Row], offloadable: Mapping[Hashable, Offloadable]) -> Prediction:
        """One turn's noise. offloadable: by owner, those whose rows the follower may compute.

        Raises as `predict` does.
        """
        offloaded = self._offload(rows, offloadable)
        if not offloaded:
            return self._here(rows)
        began_s = perf_counter()
        own = self._here([row for row in rows if row not in offloaded])
        own.times.wait()  # nothing goes on before both are done, and how long the other may take follows from it
        waiting_s = perf_counter()
        returned = self._wait(_shape(rows[0]), len(offloaded), own.waited_s)
        if returned is not None:
            self._judge(_shape(rows[0]), len(rows), max(own.seconds, returned.seconds))
        peer_wait_s = perf_counter() - waiting_s
        rest = self._here(offloaded) if returned is None else None
        theirs = rest.noise if rest is not None else returned.noise if returned is not None else {}
        waited_s = own.waited_s + (rest.waited_s if rest is not None else 0.0)
        owners = frozenset(row.owner for row in offloaded)
        return PairPrediction(
            noise=_whole(rows, {**own.noise, **theirs}),
            times=KnownTimes(seconds=perf_counter() - began_s - waited_s, waited_s=waited_s, encoder_s=own.encoder_s),
            blocks_reused=own.blocks_reused,
            load_waits_s=own.load_waits_s,
            offloaded=owners if rest is None else frozenset(),
            taken_back=owners if rest is not None else frozenset(),
            peer_wait_s=peer_wait_s,
        )

    def _offload(self, rows: Sequence[Row], offloadable: Mapping[Hashable, Offloadable]) -> list[Row]:
        """Sends away what the other should compute; those rows."""
        free = self._target.free
        able = [
            OffloadedRow(row=row, remote_job=known.remote_job, image=known.image, active=known.active(row))
            for row in rows
            # What it takes from a recording, and what it gives to one, is here.
            if free
            and row.activations is None
            and (known := offloadable.get(row.owner))
            and self._target.accepts(known.remote_job)
        ]
        count = self._count(rows, len(able)) if able else 0
        offloaded = able[len(able) - count :]
        if not offloaded or not self._target.offload(offloaded):
            return []
        return [each.row for each in offloaded]

    def _count(self, rows: Sequence[Row], able: int) -> int:
        trying, shape = self._tries > 0, _shape(rows[0])
        count = rows_to_offload(
            len(rows),
            able,
            own=lambda count: None if trying else self._times.seconds(shape, count),
            theirs=lambda count: None if trying else self._theirs.seconds(shape, count),
            backlog=self.backlog,
            saved=self._saved(rows),
        )
        self._tries -= bool(trying and count)
        self._unused_turns = 0 if count or self.backlog else self._unused_turns + 1
        if self._unused_turns >= self._pause_turns:
            self._theirs, self._unused_turns, self._tries = StepTimes(), 0, _TRIES
            self._pause_turns = min(2 * self._pause_turns, _MOST_PAUSE_TURNS)
        return count

    def _saved(self, rows: Sequence[Row]) -> float:
        """What masked rows, which stay here, cost less than plain ones, in rows."""
        shares = (row.activations.share for row in rows if row.activations is not None and row.activations.recorded)
        return sum(1.0 - self._fractions.fraction(_shape(rows[0]), share) for share in shares)

    def _wait(self, shape: Shape, rows: int, residuals_s: float) -> OffloadResult | None:
        """What was offloaded; None when it does not come. residuals_s: that this engine has waited for residuals."""
        expected_s = self._theirs.seconds(shape, rows) or self._times.seconds(shape, rows) or 0.0
        until_s = perf_counter() + max(_LEAST_PATIENCE_S, _PATIENCE * (expected_s + residuals_s))
        while (left_s := until_s - perf_counter()) > 0:
            owed = self._target.awaits_result  # asked first: what comes in between is still taken
            returned = self._target.result(min(left_s, _LOOK_S))
            if returned is not None:
                self._learn(shape, rows, returned.seconds)
                return returned
            if not owed:
                return None
            self._heartbeat.beat()
        self._learn(shape, rows, _PATIENCE * expected_s)
        return None

    def _judge(self, shape: Shape, rows: int, seconds: float) -> None:
        """A turn of so many rows was shared. Whether that paid decides how soon one that is given up is tried again."""
        alone_s = self._times.seconds(shape, rows)
        if alone_s is None or seconds < alone_s:
            self._pause_turns = _LEAST_PAUSE_TURNS

    def _learn(self, shape: Shape, rows: int, seconds: float) -> None:
        """Takes in an answer. Before the first one of a shape it is taken to be as quick as this worker.

        So a slow first answer, which most are, counts as at most twice that, and does not end the pair by itself.
        """
        own_s = self._times.seconds(shape, rows)
        if own_s is not None and all(known != shape for known, _, _ in self._theirs.entries()):
            self._theirs.observe(shape, rows, own_s)
        self._theirs.observe(shape, rows, seconds)


def _whole(rows: Sequence[Row], noise: Mapping[Row, Tensor]) -> dict[Row, Tensor]:
    """Of owners that miss no row: one whose residuals were late here or there repeats its step."""
    late = {row.owner for row in rows if row not in noise}
    return {row: noise[row] for row in rows if row.owner not in late}


def _shape(row: Row) -> Shape:
    _, height, width = row.sample.shape
    return height, width
