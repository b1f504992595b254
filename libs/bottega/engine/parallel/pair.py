"""Latent parallelism: the other worker of a pair, the follower, computes some rows of a batch's forward pass.

The leader decides which, and has the latents, samplers and generators. It computes rows itself that do not come back in
the same turn, so that the death of the follower costs only time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor

from bottega.device.heartbeat import Heartbeat
from bottega.engine.forward import Prediction
from bottega.engine.parallel.remote_rows import OffloadedRow, OffloadResult, OffloadTarget, RemoteJob
from bottega.engine.times import KnownTimes
from bottega.model.rows import Row
from bottega.planning import RowFractions, Shape, StepTimes, rows_to_offload

# How long the leader waits for rows after finishing its own, as a multiple of the expected time, and at least. A dead
# follower is noticed sooner; this is for one that is stopped, or slowed down by other processes.
_PATIENCE = 4.0
_LEAST_PATIENCE_S = 1.0
# Seconds between two heartbeats while waiting.
_LOOK_S = 0.1
# Number of turns without the follower before it is tried again, whatever was measured: other processes may end, and
# the time of fewer rows here is measured only while rows are shared. Doubled after each failed attempt.
_LEAST_PAUSE_TURNS = 2
_MOST_PAUSE_TURNS = 32
_TRIES = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Offloadable:
    """A request whose rows may be offloaded."""

    remote_job: RemoteJob
    image: int
    """Index of the image in the job."""
    active: Callable[[Row], tuple[int, ...]]
    """Returns `OffloadedRow.active` for a row."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairPrediction(Prediction):
    """The result of a forward pass that both workers computed. Its seconds exclude waiting for residuals."""

    offloaded: frozenset[Hashable] = frozenset()
    """Owners of rows that the follower computed."""
    taken_back: frozenset[Hashable] = frozenset()
    """Owners of offloaded rows that the follower did not return in time."""
    peer_wait_s: float = 0.0
    """Seconds of waiting for offloaded rows after everything else was done."""


class Pair:
    """Computes forward passes together with the other worker of the pair.

    Args:
        predict: Runs a forward pass on this worker.
        target: The other worker.
        times: Measured seconds of such passes, which `predict` updates.
        fractions: Measured cost of partly computed rows, which `predict` updates.
        heartbeat: Called often while this engine waits.
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
        """Number of requests that wait elsewhere for a worker."""
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
        """Name of the other worker."""
        return self._target.name

    def forget(self, remote_job: RemoteJob) -> None:
        """Tell the other worker that a job has ended."""
        self._target.forget(remote_job)

    def predict(self, rows: Sequence[Row], offloadable: Mapping[Hashable, Offloadable]) -> Prediction:
        """Return the predicted noise of a batch. The follower may compute rows of the owners in `offloadable`.

        Raise the errors of `predict`.
        """
        offloaded = self._offload(rows, offloadable)
        if not offloaded:
            return self._here(rows)
        began_s = perf_counter()
        own = self._here([row for row in rows if row not in offloaded])
        own.times.wait()  # Both must finish, and the wait for the other depends on this time.
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
            shared=own.shared | owners,
            reused=own.reused,
            blocks=own.blocks,
            load_waits_s=own.load_waits_s,
            offloaded=owners if rest is None else frozenset(),
            taken_back=owners if rest is not None else frozenset(),
            peer_wait_s=peer_wait_s,
        )

    def _offload(self, rows: Sequence[Row], offloadable: Mapping[Hashable, Offloadable]) -> list[Row]:
        free = self._target.free
        able = [
            OffloadedRow(row=row, remote_job=known.remote_job, image=known.image, active=known.active(row))
            for row in rows
            # Rows with data of other steps stay here, because the data are here.
            if free
            and row.activations is None
            and row.step_cache is None
            and (known := offloadable.get(row.owner))
            and self._target.accepts(known.remote_job)
        ]
        count = self._count(rows, len(able)) if able else 0
        offloaded = able[len(able) - count :]
        if not offloaded or not self._target.offload(offloaded):
            return []
        return [sent.row for sent in offloaded]

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
        """Return how much less work masked rows are than plain rows, in plain rows. They are never offloaded."""
        shares = (row.activations.share for row in rows if row.activations is not None and row.activations.reads)
        return sum(1.0 - self._fractions.fraction(_shape(rows[0]), share) for share in shares)

    def _wait(self, shape: Shape, rows: int, residuals_s: float) -> OffloadResult | None:
        """Return the follower's result, or None if it is late. This engine has waited `residuals_s` for residuals."""
        expected_s = self._theirs.seconds(shape, rows) or self._times.seconds(shape, rows) or 0.0
        until_s = perf_counter() + max(_LEAST_PATIENCE_S, _PATIENCE * (expected_s + residuals_s))
        while (left_s := until_s - perf_counter()) > 0:
            owed = self._target.awaits_result  # Read first, so that an answer that comes in between is not lost.
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
        """Reset the pause before the next attempt if this turn was faster than computing it alone."""
        alone_s = self._times.seconds(shape, rows)
        if alone_s is None or seconds < alone_s:
            self._pause_turns = _LEAST_PAUSE_TURNS

    def _learn(self, shape: Shape, rows: int, seconds: float) -> None:
        """Record the follower's time. Before the first one of a shape, it is assumed to be as fast as this worker.

        The first answer is often slow. So it counts as at most twice the assumed time, and does not end sharing by
        itself.
        """
        own_s = self._times.seconds(shape, rows)
        if own_s is not None and all(known != shape for known, _, _ in self._theirs.entries()):
            self._theirs.observe(shape, rows, own_s)
        self._theirs.observe(shape, rows, seconds)


def _whole(rows: Sequence[Row], noise: Mapping[Row, Tensor]) -> dict[Row, Tensor]:
    """Return the noise of owners all of whose rows were computed. An owner with late residuals repeats its step."""
    late = {row.owner for row in rows if row not in noise}
    return {row: noise[row] for row in rows if row.owner not in late}


def _shape(row: Row) -> Shape:
    _, height, width = row.sample.shape
    return height, width
