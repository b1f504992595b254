"""One denoising step: `Stepper.step` is a turn of the engine, from choosing a group to its new latents.

The engine's loop adds and removes jobs, and reports what a step returns.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from bottega.diffusion.device.device import Device
from bottega.diffusion.device.span import Span
from bottega.diffusion.engine.addon import EngineAddOn
from bottega.diffusion.engine.batcher import Batcher
from bottega.diffusion.engine.forward import Prediction
from bottega.diffusion.engine.job import EngineJob
from bottega.diffusion.engine.measured import MeasuredForward
from bottega.diffusion.engine.request import Request
from bottega.diffusion.parallel.pair import Offloadable, Pair, PairPrediction
from bottega.diffusion.rows import Half, Row

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepOutcome:
    """What a turn did. jobs: that made a step. failed: those that cannot go on, and why."""

    jobs: Sequence[EngineJob] = ()
    failed: Mapping[EngineJob, Exception] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _EnqueuedTurn:
    """One that was enqueued. jobs: with the steps that they make. sampler: guidance and samplers. whole: from the
    choice of its group.
    """

    jobs: Mapping[EngineJob, str]
    prediction: Prediction
    sampler: Span
    whole: Span

    @property
    def ready(self) -> bool:
        """Whether its times are known."""
        return self.whole.ready and self.prediction.times.ready


class Stepper:
    """jobs: by request, as they come and go. pair: shares rows with another worker, where there is one.

    turns: that ran a group, so far. steps: of requests, which these have made.
    """

    def __init__(
        self,
        forward: MeasuredForward,
        batcher: Batcher[Request],
        jobs: Mapping[Request, EngineJob],
        addons: Sequence[EngineAddOn],
        pair: Pair | None,
        *,
        device: Device,
    ) -> None:
        self._forward = forward
        self._batcher = batcher
        self._jobs = jobs
        self._addons = addons
        self._pair = pair
        self._device = device
        self._unread: deque[_EnqueuedTurn] = deque()
        self.turns = 0
        self.steps = 0

    def step(self) -> StepOutcome | None:
        """One denoising step of the next group; None where no request is ready for one."""
        self._prepare_weights()
        began = self._device.record()
        group = self._batcher.next_group()
        if not group:
            return None
        self.turns += 1
        jobs = self._steps_of(group)
        try:
            rows = [row for request in group for row in request.rows()]
            prediction = self._predict(rows, list(jobs))
        except Exception as error:  # noqa: BLE001 - the boundary of a turn: the next one may go well
            return self._forward_failed(group, error)
        predicted = self._device.record()
        failed = self._advance(group, prediction.noise)
        sampler = Span(begin=predicted, end=self._device.record())
        self._ask_ahead([request for request in group if self._jobs[request] not in failed])
        whole = Span(begin=began, end=self._device.record())
        self._unread.append(_EnqueuedTurn(jobs=jobs, prediction=prediction, sampler=sampler, whole=whole))
        self.note_times()
        return StepOutcome(jobs=[job for job in jobs if job not in failed], failed=failed)

    def note_times(self) -> None:
        """Tells jobs what their turns took, of those turns that the device has finished."""
        while self._unread and self._unread[0].ready:
            turn = self._unread.popleft()
            for job, steps in turn.jobs.items():
                job.note_turn(turn.prediction, sampler_s=turn.sampler.seconds, turn=turn.whole, steps=steps)

    def _steps_of(self, group: Sequence[Request]) -> dict[EngineJob, str]:
        """The jobs of a group, with the steps that they make next."""
        steps: dict[EngineJob, list[Request]] = {}
        for request in group:
            steps.setdefault(self._jobs[request], []).append(request)
        return {job: _said_steps(job, requests) for job, requests in steps.items()}

    def _prepare_weights(self) -> None:
        """Between two turns add-ons may change weights, as the requests under way need them."""
        requests = list(self._batcher.requests)
        if not requests:
            return  # what is in the weights stays: the next job may want the same
        height, width = requests[0].key.shape[1:]
        rows = sum(request.row_count * self._forward.cost(request) for request in requests)
        step_s = self._forward.step_times.seconds((height, width), rows)
        regrouped = [addon.before_group(requests, step_s or 0.0) for addon in self._addons]
        if any(regrouped):
            self._batcher.regroup()

    def _predict(self, rows: list[Row], jobs: Sequence[EngineJob]) -> Prediction:
        """The noise of these rows, some of it by the other worker of a pair where that pays."""
        if self._pair is None:
            return self._forward.predict(rows)
        offloadable: dict[Hashable, Offloadable] = {
            request: Offloadable(remote_job=job.remote_job, image=request.index, active=job.active_parts)
            for job in jobs
            if job.remote_job is not None
            for request in job.requests
        }
        prediction = self._pair.predict(rows, offloadable)
        if isinstance(prediction, PairPrediction):
            for job in jobs:
                job.note_offload(prediction, self._pair.name)
        return prediction

    def _advance(self, group: Sequence[Request], noise: Mapping[Row, Tensor]) -> dict[EngineJob, Exception]:
        """Guidance and sampler: the step of those requests whose predictions are here. Returns whose failed."""
        halves: dict[Hashable, dict[Half, Tensor]] = {}
        for row, predicted in noise.items():
            halves.setdefault(row.owner, {})[row.half] = predicted
        stepped = [request for request in group if request in halves]
        failed: dict[EngineJob, Exception] = {}
        for request in stepped:
            job = self._jobs[request]
            try:
                request.advance(halves[request])
                self.steps += 1
                job.note_step(request, group_requests=len(stepped))
            except Exception as error:  # noqa: BLE001 - the boundary of a job: its failure is not the others'
                failed[job] = error
            if request.done:
                self._batcher.remove(request)
        return failed

    def _ask_ahead(self, requests: Sequence[Request]) -> None:
        """Has the ControlNets of these begin their next steps, before anything else is done.

        Not in a pair: only at their turn is it decided which worker computes which rows, and asks for them.
        """
        if self._pair is None:
            self._forward.ask_ahead([row for request in requests if not request.done for row in request.rows()])

    def _forward_failed(self, group: Sequence[Request], error: Exception) -> StepOutcome:
        """A request that was alone fails its job; of several, each runs alone from now on, to find which one it is."""
        if len(group) == 1:
            return StepOutcome(failed={self._jobs[group[0]]: error})
        _log.warning("a turn failed; its requests are retried one by one", extra={"why": type(error).__name__})
        for request in group:
            self._batcher.make_exclusive(request)
        return StepOutcome()


def _said_steps(job: EngineJob, requests: Sequence[Request]) -> str:
    """What images of one job make together."""
    if len(job.requests) == 1:
        return f"step {requests[0].step}"
    return ", ".join(f"step {request.step} of image {request.index}" for request in requests)
