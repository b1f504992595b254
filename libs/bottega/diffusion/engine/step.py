"""One step of one group: with which weights, and whether on this worker alone or shared with the other of a pair.

Knows requests, rows and the jobs that they are of; knows no events and no order in which jobs come and go.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter

import torch
from torch import Tensor

from bottega.diffusion.engine.batcher import Batcher
from bottega.diffusion.engine.forward import Denoiser, Prediction
from bottega.diffusion.engine.job import EngineJob
from bottega.diffusion.engine.request import Request
from bottega.diffusion.loras import LoraWeights
from bottega.diffusion.parallel.offload import OffloadTarget
from bottega.diffusion.parallel.pair import Offloadable, Pair, PairPrediction
from bottega.diffusion.rows import Half, Row
from bottega.planning import StepTimes

# The warm-up measures wider turns until one takes so long: the rest is learnt from real ones.
_WARM_UP_TURN_S = 1.0


class Stepper:
    """Makes steps. owners: the job of every request, as they come and go. pair: where there is a follower."""

    def __init__(
        self,
        denoiser: Denoiser,
        weights: LoraWeights,
        batcher: Batcher[Request],
        owners: Mapping[Request, EngineJob],
        step_times: StepTimes,
        *,
        follower: OffloadTarget | None,
    ) -> None:
        self.pair = Pair(self.predict, follower, step_times) if follower is not None else None
        self._denoiser = denoiser
        self._weights = weights
        self._batcher = batcher
        self._owners = owners
        self._step_times = step_times

    def warm_up(self, row: Row, *, with_loras: bool) -> None:
        """Measures turns of 1, 2, 4, ... rows like this one until one takes a second, and what LoRAs cost."""
        count = 1
        while count <= self._batcher.max_rows:
            rows = [replace(row) for _ in range(count)]
            self._denoiser.predict(rows)  # the first of its size pays for what is made once
            if max(self.predict(rows).seconds for _ in range(3)) > _WARM_UP_TURN_S:
                break
            count *= 2
        if with_loras:
            self._measure_loras(row)

    def choose_weights(self) -> None:
        """Between two turns: LoRAs go into the weights, or out of them, as those under way need them."""
        requests = list(self._batcher.requests)
        if not any(request.loras_now or request.key.weights for request in requests) and not self._weights.patched:
            return
        if not requests:
            return  # what is in the weights stays: the next job may want the same
        height, width = requests[0].key.shape[1:]
        step_s = self._step_times.seconds((height, width), sum(request.row_count for request in requests))
        seconds = self._weights.choose(
            [request.loras_now for request in requests],
            steps=max(request.steps_left for request in requests),
            step_s=step_s or 0.0,
        )
        moved = [request for request in requests if request.share_weights(self._weights.patched_key)]
        if moved:
            self._batcher.regroup()
        patched = self._weights.patched
        # Of those whose set went in, each had to wait so long. A set that is only taken out is nobody's.
        for job in {self._owners[request] for request in requests if request.loras_now is not None}:
            job.loras.patch_s += seconds if job.loras.loras is patched else 0.0

    def predict_shared(self, rows: list[Row], jobs: list[EngineJob]) -> Prediction:
        """One turn's noise, some of it by the other worker where there is one and it pays."""
        if self.pair is None:
            return self.predict(rows)
        lendable: dict[Hashable, Offloadable] = {
            request: Offloadable(guest=job.guest, image=request.index)
            for job in jobs
            if job.guest is not None
            for request in job.requests
        }
        prediction = self.pair.predict(rows, lendable)
        if isinstance(prediction, PairPrediction):
            for job in jobs:
                job.lent(prediction, self.pair.name)
        return prediction

    def predict(self, rows: Sequence[Row]) -> Prediction:
        """One turn of these rows on this worker, and what is learnt of its time."""
        prediction = self._denoiser.predict(rows)
        if len(prediction.noise) == len(rows):  # else some of them ran only half of it
            _, height, width = rows[0].sample.shape
            plain_s = self._step_times.seconds((height, width), len(rows))
            if self._weights.saw_step([row.loras for row in rows], prediction.seconds, plain_s) or plain_s is None:
                self._step_times.observe((height, width), len(rows), prediction.seconds)
        return prediction

    def advance(self, group: list[Request], noise: dict[Row, Tensor]) -> tuple[dict[EngineJob, Exception], float]:
        """Makes the step of those whose predictions are here. Returns whose failed, and the seconds it took."""
        halves: dict[Hashable, dict[Half, Tensor]] = {}
        for row, predicted in noise.items():
            halves.setdefault(row.owner, {})[row.half] = predicted
        stepped = [request for request in group if request in halves]
        failed: dict[EngineJob, Exception] = {}
        began_s = perf_counter()
        for request in stepped:
            job = self._owners[request]
            try:
                request.advance(halves[request])
                job.meter.saw(request)
            except Exception as error:  # noqa: BLE001 - the boundary of a job: its failure is not the others'
                failed[job] = error
            job.shared(len(stepped))
            if request.done:
                self._batcher.remove(request)
        return failed, perf_counter() - began_s

    def ask_ahead(self, group: Sequence[Request]) -> None:
        """Has the ControlNets of these begin their next steps, before anything else is done.

        Not in a pair: only at their turn is it decided which worker computes which rows, and asks for them.
        """
        if self.pair is None:
            self._denoiser.ask_ahead([row for request in group if not request.done for row in request.rows()])

    def _measure_loras(self, row: Row) -> None:
        """What LoRAs cost beside the weights and inside them, by one that changes nothing."""
        probe = self._weights.probe()
        for _ in range(3):
            self.predict([replace(row, loras=probe)])
        self._weights.measure_swap(probe)


def check_fixed_rows(fixed_rows: int, device: torch.device) -> None:
    """Raises ValueError where so many rows would not make pictures equal byte for byte."""
    if fixed_rows == 1:
        raise ValueError("fixed_rows is 1, but a guided request has two rows; 0 switches it off")
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    if threads > 1 and fixed_rows % (2 * threads):
        # Measured: with 2 threads and 5, 6, 7 or 10 rows the last bit of a row depends on its place; with 4, 8, 12
        # and 16 it does not. A thread's share must be whole and even.
        raise ValueError(
            f"fixed_rows is {fixed_rows}; with {threads} threads it must be a multiple of {2 * threads}, else the last "
            "bits of a picture depend on its place in the group; or set threads to 1"
        )
