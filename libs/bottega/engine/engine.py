"""The engine's loop of turns, between which jobs join and leave.

Each turn encodes at most one prompt, runs one forward pass of a batch, and decodes at most one latent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch

from bottega.device.device import PausableWork
from bottega.device.heartbeat import Heartbeat, call_after_blocks
from bottega.engine.acceleration.acceleration import Acceleration, AccelerationResult
from bottega.engine.acceleration.self_check import SelfCheck, SelfCheckSettings, TrialLog
from bottega.engine.addon import EngineAddOn, close_parts
from bottega.engine.batcher import Batcher
from bottega.engine.denoiser import open_denoiser
from bottega.engine.errors import named_error, to_job_failure
from bottega.engine.events import Event, ImageDrawn, JobFailed, JobFinished, JobKept
from bottega.engine.job import EngineJob, EngineOrder
from bottega.engine.limits import EngineLimits, check_drawable, check_fixed_rows, max_pixels
from bottega.engine.parallel.pair import Pair
from bottega.engine.parallel.remote_rows import OffloadTarget, RemoteJobs
from bottega.engine.request import Request
from bottega.engine.results import Decodings, Reporter, decoded_pixels
from bottega.engine.spans import DeviceClock
from bottega.engine.spec import ResolvedSpec
from bottega.engine.step import Stepper
from bottega.engine.times import TurnClock
from bottega.engine.waiting import ReadinessGate, TenantAccounts, WaitingOrder, WaitingOrders, open_waiting
from bottega.engine.warm_up import all_probes, measure_stages
from bottega.model.model import Model
from bottega.v1.fleet_pb2 import ServiceAddress

# Weight of a new measurement in the average `Engine.fixed_s`.
_FIXED_WEIGHT = 0.2


class Engine:
    """Generates the pictures of jobs on one device. A single thread makes all calls.

    Args:
        addons: Features that extend the plain model, such as ControlNets and LoRAs.
        peer: The other worker of a pair, which may compute rows of batches; None if there is none.
        heartbeat: Called often during a turn, to show that the thread is alive.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        model: Model,
        limits: EngineLimits,
        *,
        addons: Sequence[EngineAddOn] = (),
        peer: OffloadTarget | None = None,
        heartbeat: Heartbeat | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_fixed_rows(limits.fixed_rows, model)
        if heartbeat is not None:  # Before the preview is fitted, which runs the VAE.
            call_after_blocks((model.backbone.network, model.vae, *model.text_encoders), heartbeat.beat)
        self.model = model
        self.fixed_s = 0.0
        """Seconds that a job takes besides its steps: for encoding, and for decoding one image."""
        self.accelerations: Sequence[AccelerationResult] = ()
        self.addons = tuple(addons)
        self._limits = limits
        self._clock = clock
        self._jobs: dict[Hashable, EngineJob] = {}
        self._jobs_by_request: dict[Request, EngineJob] = {}
        self._reporter = Reporter(model, limits)
        self._device_clock = DeviceClock(model.runtime)
        self._skips_step = False
        self._waiting = WaitingOrders(self.addons)
        heartbeat = heartbeat or Heartbeat()
        self.beat = heartbeat.beat
        self._decodings = Decodings(model, self._jobs, self._waiting)
        self._denoiser = open_denoiser(model, limits, self.addons, heartbeat, self._decodings.area_beside)
        self.step_times = self._denoiser.step_times
        self.row_fractions = self._denoiser.row_fractions
        self._batcher: Batcher[Request] = Batcher(
            self.step_times,
            self.row_fractions,
            self._denoiser.packed_times if peer is None else None,
            max_rows=limits.fixed_rows or limits.max_rows,
            max_wait_turns=limits.max_wait_turns,
        )
        self._turn = TurnClock(model.runtime, clock, is_long=self._batcher.is_long)
        self._accounts = TenantAccounts(self._batcher)
        self._readiness = ReadinessGate(self._batcher, self.addons)
        self._pair = None
        if peer is not None:
            self._pair = Pair(self._denoiser.predict, peer, self.step_times, self.row_fractions, heartbeat)
        self._stepper = Stepper(
            self._denoiser,
            self._batcher,
            self._jobs_by_request,
            self.addons,
            self._pair,
            device=model.runtime,
            splits=not limits.fixed_rows,
        )
        self.remote_jobs = RemoteJobs(
            self._denoiser.predict,
            device=model.runtime,
            dtype=model.dtype,
            latent_channels=model.latent_channels,
            addons=self.addons,
            clock=clock,
        )
        """Jobs of the other worker of a pair, for which this engine computes rows."""

    @property
    def jobs(self) -> Mapping[Hashable, EngineJob]:
        """Jobs whose prompts have been encoded, by key, oldest first."""
        return MappingProxyType(self._jobs)

    @property
    def turns(self) -> int:
        """Number of turns that ran a batch."""
        return self._stepper.turns

    @property
    def steps(self) -> int:
        """Number of denoising steps of all requests."""
        return self._stepper.steps

    @property
    def max_pixels(self) -> int:
        """Largest number of pixels of one image; see `limits.max_pixels`."""
        return max_pixels(self._limits, self.model)

    @property
    def busy(self) -> bool:
        """Whether there is work to do."""
        return bool(self._waiting or self._jobs)

    def submit(self, order: EngineOrder) -> None:
        """Accept a job. The turn that encodes its prompt yields its first event.

        Raises:
            InvalidRequest: No worker can draw it.
            TooLarge: It is too large for this worker.
            BottegaError: An add-on cannot serve it.
        """
        self.check_drawable(order.spec)
        self._waiting.add(order)

    def check_drawable(self, spec: ResolvedSpec) -> None:
        """Raise InvalidRequest or TooLarge if this engine cannot draw a spec."""
        check_drawable(spec, self._limits, self.model)

    def cancel(self, key: Hashable) -> None:
        """Remove a job. Do nothing if it is unknown."""
        self._waiting.drop(key)
        if key in self._jobs:
            self._forget(self._jobs[key])

    def enable_previews(self, key: Hashable) -> None:
        """Add previews to the progress of a job. Do nothing if it is unknown."""
        self._waiting.enable_previews(key)
        if key in self._jobs:
            job = self._jobs[key]
            job.order = replace(job.order, preview=True)

    def set_services(self, services: Sequence[ServiceAddress]) -> None:
        """Give each add-on the addresses of the services of its kind that exist now, the best first."""
        for addon in self.addons:
            addon.set_services([service for service in services if service.kind == addon.kind])

    def set_backlog(self, requests: int) -> None:
        """Set the number of requests that wait outside the engine and will be submitted later."""
        self._batcher.set_backlog(requests)
        if self._pair is not None:
            self._pair.backlog = requests

    def evaluations_left(self) -> Iterator[tuple[Hashable, int]]:
        """Yield each job's key, and the number of evaluations of the network that all of its images still need."""
        for job in self._jobs.values():
            yield job.key, job.evaluations_left
        for waiting in self._waiting:
            spec = waiting.order.spec
            yield waiting.order.key, spec.num_images * self.model.samplers.pace(spec.sampler).evaluations(spec.steps)

    def computed_shares(self) -> Mapping[Hashable, float]:
        """Return, for each encoded job, the fraction of its rows' tokens that its next step computes."""
        return {job.key: job.computed_share for job in self._jobs.values()}

    def check_accelerations(
        self,
        candidates: Sequence[Acceleration],
        *,
        deadline_s: float,
        trials: TrialLog | None = None,
    ) -> None:
        """Use those accelerations that are faster here and give the same result.

        Call it before `warm_up`, which measures the engine with them.

        Args:
            deadline_s: See `SelfCheckSettings`.
            trials: See `SelfCheck`.

        Raises:
            InternalError: See `SelfCheck.run`.
        """
        if not candidates:
            return
        probes = all_probes(self.model, self._denoiser.forward, self.addons, self._device_clock)
        settings = SelfCheckSettings(synchronize=self.model.runtime.synchronize, beat=self.beat, deadline_s=deadline_s)
        self.accelerations = SelfCheck(self.model, probes, settings, trials).run(candidates)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run and measure every stage. On a slow device, the time of a large picture is estimated from a small one."""
        stages = measure_stages(self.model, self._device_clock)
        self.fixed_s = stages.fixed_s
        row = stages.job.requests[0].rows()[0]
        self._denoiser.measure_memory(row, self.model.runtime)
        self._denoiser.warm_up(row, self._batcher.max_rows)

    def turn(self) -> Iterator[Event]:
        """Run one turn, and yield its events as they happen. Do nothing if there is no work."""
        yield from self._say_arrived()
        self._turn.begin()
        yield from self._encode_next()
        yield from self._update_readiness()
        turns = self.turns
        # Prompts that are encoded delay steps in every other turn at most.
        goes_on = any(self._may_go_first(decoding.job.order.share.tenant) for decoding in self._decodings.paused)
        self._skips_step = goes_on or (self._turn.is_long() and not self._skips_step)
        if not self._skips_step:
            yield from self._step()
        yield from self._decode_next()
        if self.turns == turns and not self._skips_step:
            self._wait()

    def _wait(self) -> None:
        """Wait for the device or for data of add-ons, unless there is something to do."""
        if self._decodings.paused or any(order.encoding is not None for order in self._waiting):
            return
        if self._decodings.wait():
            return
        self._readiness.wait([*(order.held for order in self._waiting), *(job.held for job in self._jobs.values())])

    def _encode_next(self) -> Iterator[Event]:
        """Encode the next job whose add-ons are ready, in part if this turn becomes long.

        Fail jobs whose add-ons never will be ready.
        """
        now_s = self._clock()
        ready = self._waiting.take_ready(now_s, used=self._batcher.used, may_begin=self._may_go_first)
        for taken in ready:
            if isinstance(taken, JobFailed):
                yield taken
            else:
                yield from self._open(taken, now_s)

    def _open(self, waiting: WaitingOrder, now_s: float) -> Iterator[Event]:
        try:
            if waiting.encoding is None:
                if not self._jobs:
                    self._device_clock.set()
                waiting.encoding = PausableWork(
                    self.model.runtime,
                    open_waiting(self.model, waiting, self.addons, now_s, self._device_clock),
                )
            waiting.encoding.run(
                lambda: (
                    self._turn.is_long()
                    or (waiting.preparing and bool(self._jobs) and self._turn.preparation_is_long())
                )
            )
        except Exception as error:  # noqa: BLE001 - the boundary of a job: its failure is not the others'
            if waiting.encoding is not None:
                waiting.uncharged.append(waiting.encoding.spans[-1])
                self._accounts.charge_ended(waiting)
            yield waiting.refuse(named_error(error, waiting.order.spec, self.model.memory))
            return
        waiting.uncharged.append(waiting.encoding.spans[-1])
        job = waiting.encoding.result
        if job is None:
            self._accounts.charge_ended(waiting)
            self._waiting.put_back(waiting)
            return
        job.order, job.encodings = waiting.order, waiting.encoding.spans
        job.uncharged += waiting.uncharged
        job.device_s = waiting.device_s
        self._jobs[job.key] = job
        self._jobs_by_request |= dict.fromkeys(job.runs, job)

    def _update_readiness(self) -> Iterator[Event]:
        """Give requests whose add-ons are ready to the batcher. Fail jobs whose add-ons never will be."""
        now_s = self._clock()
        for job in list(self._jobs.values()):
            try:
                job.check_inputs()
                yield from self._readiness.update(job, now_s)
            except Exception as error:  # noqa: BLE001 - the boundary of a job: its failure is not the others'
                yield self._fail(job, error)

    def _step(self) -> Iterator[Event]:
        with self._turn.stepping():
            outcome = self._stepper.step()
        if outcome is None:
            return
        for job, error in outcome.failed.items():
            yield self._fail(job, error)
        for job in outcome.jobs:
            self._reporter.note_step(job, self._clock())
            yield from self._say(job)

    def _say_arrived(self) -> Iterator[Event]:
        """Yield events for results that arrived from the device since the last turn."""
        self._stepper.note_times()
        for job in self._jobs.values():
            self._accounts.charge_ended(job)
        for job in self._reporter.jobs:
            yield from self._say(job)

    def _say(self, job: EngineJob, *, to_the_end: bool = False) -> Iterator[Event]:
        try:
            yield from self._reporter.say(job, to_the_end=to_the_end)
        except Exception as error:  # noqa: BLE001 - the boundary of a job: its failure is not the others'
            yield self._fail(job, error)

    def _may_go_first(self, tenant: str) -> bool:
        """Return whether a tenant may use the device now: no other one that could has used less."""
        others = [order.order.share.tenant for order in self._waiting if order.encoding is not None]
        others += [job.order.share.tenant for job in self._decodings.due()]
        used = self._batcher.used(tenant)
        return self._batcher.may_go_first(tenant) and all(used <= self._batcher.used(other) for other in others)

    def _decode_next(self) -> Iterator[Event]:
        """Yield the decoded image, and decode the next finished latent, or go on with one."""
        yield from self._collect()
        job = self._decodings.next_job(self._batcher.used, self._may_go_first)
        if job is None:
            return
        try:
            span = self._decodings.run(job, pause_due=self._turn.is_long, covered=self._denoiser.covered)
            if span is not None:
                self._accounts.charge(job, span.seconds)
        except Exception as error:  # noqa: BLE001 - the boundary of a job: its failure is not the others'
            yield self._fail(job, error)
        yield from self._collect()

    def _collect(self) -> Iterator[Event]:
        """Yield a decoded image, and the end of its job if it is the last one."""
        decoding = self._decodings.take_ready()
        if decoding is None:
            return
        job, request = decoding.job, decoding.request
        self._stepper.note_times()
        yield from self._say(job, to_the_end=True)
        if job not in self._jobs.values():
            return
        for span in decoding.spans[-1:]:  # Earlier ones were charged when it paused.
            self._accounts.charge(job, span.seconds)
        try:
            pixels = decoded_pixels(decoding)
            kept = {addon.kind: part.after_decode(request.index, pixels) for addon, part in job.addons.items()}
        except Exception as error:  # noqa: BLE001 - the boundary of a job: its failure is not the others'
            yield self._fail(job, error)
            return
        job.drawn.add(request.index)
        yield ImageDrawn(key=job.key, index=request.index, pixels=pixels)
        if by_kind := {kind: data for kind, data in kept.items() if data is not None}:
            yield JobKept(key=job.key, index=request.index, by_kind=by_kind)
        if job.finished:
            self._forget(job)
            record = job.record()
            beside_s = record.seconds["encode"] + record.seconds["decode"] / len(job.requests)
            self.fixed_s += _FIXED_WEIGHT * (beside_s - self.fixed_s)
            yield JobFinished(key=job.key, record=record, trace=job.trace())
            for part in job.addons.values():
                part.finish(record)

    def _fail(self, job: EngineJob, error: Exception) -> JobFailed:
        self._forget(job)
        named = named_error(error, job.order.spec, self.model.memory)
        return JobFailed(key=job.key, error=to_job_failure(named), trace=job.trace())

    def _forget(self, job: EngineJob) -> None:
        self._accounts.charge_ended(job)
        del self._jobs[job.key]
        self._reporter.forget(job)
        self._decodings.forget(job)
        close_parts(job.addons)
        if self._pair is not None and job.remote_job is not None:
            self._pair.forget(job.remote_job)
        for request in job.runs:
            del self._jobs_by_request[request]
            self._batcher.remove(request)
            self._stepper.forget(request)
