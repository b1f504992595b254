"""One denoising step of a batch: from the choice of the requests to their new latents.

The engine's loop adds and removes jobs, and reports the result of a step.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from bottega.device.device import Device, Span
from bottega.engine.addon import EngineAddOn
from bottega.engine.batch import BatchTurn
from bottega.engine.batcher import Batcher
from bottega.engine.denoiser import Denoiser
from bottega.engine.forward import Prediction
from bottega.engine.job import EngineJob, TurnSeconds
from bottega.engine.parallel.pair import Offloadable, Pair, PairPrediction
from bottega.engine.request import Request
from bottega.model.rows import Half, Row
from bottega.planning import Shape, relative_area

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepOutcome:
    """The result of one step of a batch."""

    jobs: Sequence[EngineJob] = ()
    """Jobs that made a step."""
    failed: Mapping[EngineJob, Exception] = field(default_factory=dict)
    """Jobs that cannot go on, with their errors."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _HalfStep:
    """A request whose rows are predicted in two forward passes, after the first one."""

    rows: Sequence[Row]
    """Rows that are predicted in the second forward pass."""
    noise: Mapping[Row, Tensor]
    """Predictions for the other rows."""


class RequestCost(NamedTuple):
    """The work of one request in a forward pass."""

    rows: float
    """Its rows, each counted as a fraction of a plain row of the batch's first request."""
    waits: bool
    """Whether the request has ControlNets in this step, for which the whole batch waits."""
    patched: bool
    """Whether the request has LoRAs in this step."""
    alone_s: float = 0.0
    """Seconds of a forward pass of its rows alone and without add-ons; 0 if none was measured."""


def seconds_by_request(
    costs: Sequence[RequestCost], *, turn_s: float, waited_s: float, patch_s: float, beside_s: float = 0.0
) -> list[TurnSeconds]:
    """Return the seconds of the device of each request of a batch.

    Args:
        costs: Cost of each request.
        turn_s: Seconds of the forward pass, guidance and samplers.
        waited_s: Part of it in which the device waited for ControlNets or computed them. Requests with ControlNets are
            charged for it.
        patch_s: Seconds before it in which LoRAs were patched into the weights. Requests with LoRAs are charged for
            them.
        beside_s: Seconds by which the forward pass differed from one without LoRAs. All requests are charged for them.
    """
    computed = _shared(turn_s - waited_s, [cost.rows for cost in costs])
    waited = _shared(waited_s, [cost.rows * cost.waits for cost in costs])
    patched_rows = [cost.rows * cost.patched for cost in costs]
    patches, beside = _shared(patch_s, patched_rows), _shared(beside_s, patched_rows)
    return [
        TurnSeconds(
            charged_s=computed[place] + waited[place] + patches[place],
            plain_s=cost.alone_s,
            controlnets_s=waited[place],
            loras_s=patches[place] + beside[place],
        )
        for place, cost in enumerate(costs)
    ]


def _shared(seconds: float, rows: Sequence[float]) -> list[float]:
    whole = sum(rows)
    return [seconds * count / whole if whole else 0.0 for count in rows]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _EnqueuedTurn:
    """A step of a batch that was enqueued on the device."""

    turn: BatchTurn[Request]
    owners: Sequence[EngineJob]
    """The job of each request."""
    costs: Sequence[RequestCost]
    jobs: Mapping[EngineJob, str]
    """Descriptions of the steps that each job makes."""
    prediction: Prediction
    preparation: Span
    """The time in which add-ons changed weights."""
    sampler: Span
    """The time of guidance and samplers."""
    whole: Span
    """The time from the choice of the batch on."""

    @property
    def ready(self) -> bool:
        return self.whole.ready and self.prediction.times.ready


class Stepper:
    """Makes the denoising steps of an engine.

    Attributes:
        turns: Number of batches that have run.
        steps: Number of steps that their requests have made.

    Args:
        denoiser: Predicts noise.
        batcher: Chooses the batches.
        jobs: Jobs by request. The engine changes it.
        addons: The engine's add-ons.
        pair: Computes rows together with another worker; None if there is none.
        device: The engine's device.
        splits: Whether the rows of a request may be predicted in two forward passes, so that other tenants wait for one
            row only.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        batcher: Batcher[Request],
        jobs: Mapping[Request, EngineJob],
        addons: Sequence[EngineAddOn],
        pair: Pair | None,
        *,
        device: Device,
        splits: bool = True,
    ) -> None:
        self._denoiser = denoiser
        self._batcher = batcher
        self._jobs = jobs
        self._addons = addons
        self._pair = pair
        self._device = device
        self._splits = splits and pair is None
        self._halves: dict[Request, _HalfStep] = {}
        self._unread: deque[_EnqueuedTurn] = deque()
        self.turns = 0
        self.steps = 0

    def step(self) -> StepOutcome | None:
        """Make one denoising step of the next batch. Return None if no request is ready."""
        preparing = self._device.record()
        self._prepare_weights()
        began = self._device.record()
        turn = self._batcher.next_turn()
        group = turn.requests
        if not group:
            return None
        self.turns += 1
        jobs, owners = self._steps_of(group), [self._jobs[request] for request in group]
        halves = [self._halves.pop(request, None) for request in group]
        try:
            rows_of = [
                request.rows() if half is None else half.rows for request, half in zip(group, halves, strict=True)
            ]
            splits = turn.splits and self._splits and halves == [None] and len(rows_of[0]) > 1 and not group[0].alone
            if splits:
                rows_of, rest = [rows_of[0][:1]], rows_of[0][1:]
            shape = _shape(group[0])
            costs = [self._cost(request, own, shape) for request, own in zip(group, rows_of, strict=True)]
            prediction = self._predict([row for own in rows_of for row in own], list(jobs))
        except Exception as error:  # noqa: BLE001 - the boundary of a turn: the next one may go well
            return self._forward_failed(group, error)
        predicted = self._device.record()
        failed: dict[EngineJob, Exception] = {}
        if splits:
            if prediction.noise:  # Otherwise its residuals were late.
                self._halves[group[0]] = _HalfStep(rows=rest, noise=prediction.noise)
        else:
            known = {row: noise for half in halves if half is not None for row, noise in half.noise.items()}
            shared = prediction.shared | {row.owner for row in known}
            failed = self._advance(group, {**known, **prediction.noise}, shared)
        sampler = Span(begin=predicted, end=self._device.record())
        if not splits:
            self._ask_ahead([request for request in group if self._jobs[request] not in failed])
        whole = Span(begin=began, end=self._device.record())
        enqueued = _EnqueuedTurn(
            turn=turn,
            owners=owners,
            costs=costs,
            jobs=jobs,
            prediction=prediction,
            preparation=Span(begin=preparing, end=began),
            sampler=sampler,
            whole=whole,
        )
        self._unread.append(enqueued)
        self.note_times()
        return StepOutcome(jobs=[job for job in jobs if job not in failed and not splits], failed=failed)

    def forget(self, request: Request) -> None:
        """Drop the prediction for half a step, if there is one, and what later steps could reuse."""
        request.forget_steps()
        self._halves.pop(request, None)

    def note_times(self) -> None:
        """Report the times of finished batches to their jobs and to the batcher."""
        while self._unread and self._unread[0].ready:
            turn = self._unread.popleft()
            for job, steps in turn.jobs.items():
                job.note_turn(turn.prediction, sampler_s=turn.sampler.seconds, turn=turn.whole, steps=steps)
            turn_s = turn.whole.seconds
            seconds = seconds_by_request(
                turn.costs,
                turn_s=turn_s,
                waited_s=min(turn_s, turn.prediction.times.waited_s),
                patch_s=turn.preparation.seconds,
                beside_s=self._beside_s(turn),
            )
            self._batcher.settle(turn.turn, [took.charged_s for took in seconds])
            for job, took in zip(turn.owners, seconds, strict=True):
                job.note_seconds(took)

    def _beside_s(self, turn: _EnqueuedTurn) -> float:
        """Return the seconds by which a forward pass with LoRAs differed from one without; 0 if it had none."""
        if not any(cost.patched for cost in turn.costs):
            return 0.0
        shape = _shape(turn.turn.requests[0])
        plain_s = self._denoiser.step_times.seconds(shape, sum(cost.rows for cost in turn.costs))
        return 0.0 if plain_s is None else turn.prediction.times.seconds - plain_s

    def _cost(self, request: Request, rows: Sequence[Row], shape: Shape) -> RequestCost:
        """Return the cost of a request in a batch whose first request has this shape."""
        own = _shape(request)
        cost = len(rows) * self._denoiser.cost(request)
        return RequestCost(
            rows=cost * relative_area(own, shape),
            waits=any(row.controls for row in rows),
            patched=request.loras_now is not None,
            alone_s=self._denoiser.step_times.seconds(own, cost) or 0.0,
        )

    def _steps_of(self, group: Sequence[Request]) -> dict[EngineJob, str]:
        steps: dict[EngineJob, list[Request]] = {}
        for request in group:
            steps.setdefault(self._jobs[request], []).append(request)
        return {job: _steps_text(job, requests) for job, requests in steps.items()}

    def _prepare_weights(self) -> None:
        """Let add-ons change weights between two batches, for the requests that are running."""
        requests = list(self._batcher.requests)
        if not requests:
            return  # Leave the weights as they are, because the next job may need the same LoRAs.
        rows = sum(request.row_count * self._denoiser.cost(request) for request in requests)
        step_s = self._denoiser.step_times.seconds(_shape(requests[0]), rows)
        regrouped = [addon.before_group(requests, step_s or 0.0) for addon in self._addons]
        if any(regrouped):
            self._batcher.regroup()

    def _predict(self, rows: list[Row], jobs: Sequence[EngineJob]) -> Prediction:
        """Predict the noise of these rows, some of it on the pair's other worker if that is faster."""
        if self._pair is None:
            return self._denoiser.predict(rows)
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

    def _advance(
        self, group: Sequence[Request], noise: Mapping[Row, Tensor], shared: frozenset[Hashable]
    ) -> dict[EngineJob, Exception]:
        """Apply guidance and samplers to requests whose predictions are complete. Return the jobs that failed.

        Args:
            group: The requests of the batch.
            noise: The prediction for each row.
            shared: Requests whose rows were not computed alone.
        """
        halves: dict[Hashable, dict[Half, Tensor]] = {}
        for row, predicted in noise.items():
            halves.setdefault(row.owner, {})[row.half] = predicted
        stepped = [request for request in group if len(halves.get(request, ())) == request.row_count]
        failed: dict[EngineJob, Exception] = {}
        for request in stepped:
            job = self._jobs[request]
            try:
                request.advance(halves[request])
                self.steps += request.between_steps
                job.note_step(request, group_requests=len(stepped), shared=request in shared)
            except Exception as error:  # noqa: BLE001 - the boundary of a job: its failure is not the others'
                failed[job] = error
            if request.done:
                self._batcher.remove(request)
        return failed

    def _ask_ahead(self, requests: Sequence[Request]) -> None:
        """Start the ControlNets for the next steps of these requests, before the engine does anything else.

        In a pair they do not begin early, because each worker asks for the rows that it computes, and these are chosen
        in the next turn.
        """
        if self._pair is None:
            self._denoiser.ask_ahead([row for request in requests if not request.done for row in request.rows()])

    def _forward_failed(self, group: Sequence[Request], error: Exception) -> StepOutcome:
        """Fail the job if the batch had one request.

        If it had several, run each alone from now on, to find which one fails.
        """
        if len(group) == 1:
            return StepOutcome(failed={self._jobs[group[0]]: error})
        _log.warning("a batch failed; its requests are retried one by one", extra={"why": type(error).__name__})
        for request in group:
            self._batcher.make_exclusive(request)
        return StepOutcome()


def _shape(request: Request) -> Shape:
    _, height, width = request.key.shape
    return height, width


def _steps_text(job: EngineJob, requests: Sequence[Request]) -> str:
    if len(job.requests) == 1:
        return f"step {requests[0].step}"
    return ", ".join(f"step {request.step} of image {request.index}" for request in requests)
