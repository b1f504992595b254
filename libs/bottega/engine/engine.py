"""The engine's loop of turns, between which jobs join and leave.

Each turn encodes at most one prompt, runs one forward pass of a batch, and decodes at most one latent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch

from bottega.device.heartbeat import Heartbeat, call_after_blocks
from bottega.device.out_of_memory import is_out_of_memory
from bottega.device.span import Span
from bottega.engine.acceleration.acceleration import Acceleration, AccelerationResult
from bottega.engine.acceleration.probes import engine_probes
from bottega.engine.acceleration.self_check import SelfCheck, SelfCheckSettings
from bottega.engine.acceleration.trial_log import TrialLog
from bottega.engine.addon import EngineAddOn, close_parts
from bottega.engine.batcher import Batcher
from bottega.engine.decoding import Decoding, start_decoding
from bottega.engine.denoiser import Denoiser
from bottega.engine.errors import to_job_failure
from bottega.engine.events import (
    Event,
    ImageDrawn,
    JobFailed,
    JobFinished,
    JobKept,
)
from bottega.engine.forward import Network
from bottega.engine.job import EngineJob, EngineOrder, open_job
from bottega.engine.limits import EngineLimits, check_drawable, check_fixed_rows, max_pixels
from bottega.engine.parallel.offload import OffloadTarget
from bottega.engine.parallel.pair import Pair
from bottega.engine.parallel.remote_rows import RemoteJobs
from bottega.engine.reporting import Reporter
from bottega.engine.request import Request
from bottega.engine.spans import DeviceClock
from bottega.engine.spec import ResolvedSpec
from bottega.engine.step import Stepper
from bottega.engine.waiting import ReadinessGate, WaitingOrder, WaitingOrders
from bottega.engine.warm_up import measure_stages, sample_job
from bottega.model.decode import check_decodable
from bottega.model.model import Model
from bottega.v1.fleet_pb2 import ServiceAddress

_log = logging.getLogger(__name__)

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
        check_fixed_rows(limits.fixed_rows, model.device)
        if heartbeat is not None:  # Before the preview is fitted, which runs the VAE.
            call_after_blocks((model.backbone.unet, model.vae, *model.text_encoders), heartbeat.beat)
        self.model = model
        self.fixed_s = 0.0
        """Seconds that a job takes besides its steps: for encoding, and for decoding one image."""
        self.accelerations: Sequence[AccelerationResult] = ()
        self.addons = tuple(addons)
        self._limits = limits
        self._clock = clock
        self._jobs: dict[Hashable, EngineJob] = {}
        self._jobs_by_request: dict[Request, EngineJob] = {}
        self._reporter = Reporter(
            model,
            progress_interval_s=limits.progress_interval_s,
            checkpoint_interval_s=limits.checkpoint_interval_s,
        )
        self._decoding: Decoding | None = None
        self._device_clock = DeviceClock(model.runtime)
        self._waiting = WaitingOrders(self.addons)
        heartbeat = heartbeat or Heartbeat()
        self.beat = heartbeat.beat
        self._denoiser = _open_denoiser(model, limits, self.addons, heartbeat)
        self.step_times = self._denoiser.step_times
        self.row_fractions = self._denoiser.row_fractions
        self._batcher: Batcher[Request] = Batcher(
            self.step_times,
            self.row_fractions,
            max_rows=limits.fixed_rows or limits.max_rows,
            max_wait_turns=limits.max_wait_turns,
        )
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

    def steps_left(self) -> Iterator[tuple[Hashable, int]]:
        """Yield each job's key, and the number of steps that are left for all of its images."""
        for job in self._jobs.values():
            yield job.key, job.steps_left
        for waiting in self._waiting:
            yield waiting.order.key, waiting.order.spec.num_images * waiting.order.spec.steps

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
        request = sample_job(self.model, self._device_clock).requests[0]
        probes = dict(engine_probes(self.model, self._denoiser.forward, request.rows(), request.latent))
        for addon in self.addons:
            probes.update(addon.probes(self.model))
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
        yield from self._encode_next()
        yield from self._update_readiness()
        turns = self.turns
        yield from self._step()
        yield from self._decode_next()
        if self.turns == turns and self._decoding is not None:
            self._decoding.wait()  # There is nothing else to do.
        elif self.turns == turns:
            waiting = [order.addons for order in self._waiting]
            self._readiness.wait([*waiting, *(job.addons for job in self._jobs.values())])

    def _encode_next(self) -> Iterator[Event]:
        """Encode the prompt of the next job whose add-ons are ready. Fail jobs whose add-ons never will be."""
        now_s = self._clock()
        ready = self._waiting.take_ready(now_s, used=self._batcher.used, may_begin=self._batcher.may_go_first)
        for taken in ready:
            if isinstance(taken, JobFailed):
                yield taken
            else:
                yield from self._open(taken, now_s)

    def _open(self, waiting: WaitingOrder, now_s: float) -> Iterator[Event]:
        try:
            for addon in self.addons:
                addon.before_prompt(waiting.addons.get(addon))
            if not self._jobs:
                self._device_clock.set()
            began = self.model.runtime.record()
            job = open_job(self.model, waiting.order, waiting.addons, now_s, self._device_clock)
        except Exception as error:  # noqa: BLE001 - the boundary of a job: its failure is not the others'
            yield waiting.refuse(self._named(error, waiting.order.spec))
            return
        job.encoding = Span(begin=began, end=self.model.runtime.record())
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
            self._charge_encoding(job)
        for job in self._reporter.jobs:
            yield from self._say(job)

    def _charge_encoding(self, job: EngineJob) -> None:
        if not job.charged_encoding and job.encoding is not None and job.encoding.ready:
            job.charged_encoding = True
            self._charge(job, job.encoding.seconds)

    def _charge(self, job: EngineJob, seconds: float) -> None:
        """Charge a job's tenant for device seconds outside of denoising steps."""
        job.device_s += seconds
        self._batcher.charge(job.order.share, seconds)

    def _say(self, job: EngineJob, *, to_the_end: bool = False) -> Iterator[Event]:
        try:
            yield from self._reporter.say(job, to_the_end=to_the_end)
        except Exception as error:  # noqa: BLE001 - the boundary of a job: its failure is not the others'
            yield self._fail(job, error)

    def _decode_next(self) -> Iterator[Event]:
        """Yield the decoded image, and start to decode the next finished latent.

        The oldest latent of the tenant that has used the device least is next. It waits while another tenant that has
        used less has requests to denoise.
        """
        yield from self._collect()
        if self._decoding is not None:
            return
        for job in sorted(self._jobs.values(), key=lambda job: self._batcher.used(job.order.share.tenant)):
            request = job.undrawn()
            if request is not None and self._batcher.may_go_first(job.order.share.tenant):
                try:
                    check_decodable(self.model, request.latent)
                    with self._denoiser.covered(("decode", request.latent.shape)):
                        self._decoding = start_decoding(self.model, job, request)
                except Exception as error:  # noqa: BLE001 - the boundary of a job: its failure is not the others'
                    yield self._fail(job, error)
                yield from self._collect()
                return

    def _collect(self) -> Iterator[Event]:
        if self._decoding is None or not self._decoding.ready:
            return
        decoding, self._decoding = self._decoding, None
        self._stepper.note_times()
        yield from self._say(decoding.job, to_the_end=True)
        if decoding.job in self._jobs.values():
            yield from self._hand_out(decoding)

    def _hand_out(self, decoding: Decoding) -> Iterator[Event]:
        job, request = decoding.job, decoding.request
        self._charge(job, decoding.span.seconds)
        try:
            job.check_inputs(to_the_end=True)
            pixels = decoding.take(self.model)
            job.note_decoding(self.model.decoder, tiled=decoding.tiled)
            job.seconds["decode"] += decoding.span.seconds
            job.spans.add_of_device(f"decode image {request.index}", "decode", decoding.span, {})
            for part in job.addons.values():
                part.after_decode(request.index, pixels)
        except Exception as error:  # noqa: BLE001 - the boundary of a job: its failure is not the others'
            yield self._fail(job, error)
            return
        job.drawn.add(request.index)
        yield ImageDrawn(key=job.key, index=request.index, pixels=pixels)
        kept = {addon.kind: part.keep(request.index) for addon, part in job.addons.items()}
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
        return JobFailed(key=job.key, error=to_job_failure(self._named(error, job.order.spec)), trace=job.trace())

    def _named(self, error: Exception, spec: ResolvedSpec) -> Exception:
        """Return the error; if the device ran out of memory, one that names the picture's size as the reason."""
        if not is_out_of_memory(error):
            return error
        _log.error("the device has no memory left for a job", extra={"why": str(error)})
        return self.model.memory.refusal(spec.width, spec.height)

    def _forget(self, job: EngineJob) -> None:
        self._charge_encoding(job)
        del self._jobs[job.key]
        self._reporter.forget(job)
        if self._decoding is not None and self._decoding.job is job:
            self._decoding = None
        close_parts(job.addons)
        if self._pair is not None and job.remote_job is not None:
            self._pair.forget(job.remote_job)
        for request in job.runs:
            del self._jobs_by_request[request]
            self._batcher.remove(request)
            self._stepper.forget(request)


def _open_denoiser(model: Model, limits: EngineLimits, addons: Sequence[EngineAddOn], heartbeat: Heartbeat) -> Denoiser:
    network = Network(
        backbone=model.backbone,
        row_weights=next((addon.row_weights for addon in addons if addon.row_weights is not None), None),
        residuals=next((addon.residuals for addon in addons if addon.residuals is not None), None),
        strategies=addons,
        fixed_rows=limits.fixed_rows,
        device=model.runtime,
        operations=model.operations,
    )
    return Denoiser(
        network,
        addons=addons,
        memory=model.memory,
        decoded_area=model.decoded_area,
        heartbeat=heartbeat,
        compile_s=0.0 if model.device.type == "cpu" else limits.compile_s,
    )
