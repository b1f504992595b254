"""The engine's loop of turns, between which jobs join and leave.

Each turn encodes at most one prompt, runs one forward pass of a batch, and decodes at most one latent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch

from bottega.device.device import PausableWork, Span
from bottega.device.heartbeat import Heartbeat, call_after_blocks
from bottega.device.memory_plan import is_out_of_memory
from bottega.engine.acceleration.acceleration import Acceleration, AccelerationResult
from bottega.engine.acceleration.self_check import SelfCheck, SelfCheckSettings, TrialLog
from bottega.engine.addon import EngineAddOn, close_parts
from bottega.engine.batcher import Batcher
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
from bottega.engine.job import EngineJob, EngineOrder
from bottega.engine.limits import EngineLimits, check_drawable, check_fixed_rows, max_pixels, try_steps
from bottega.engine.parallel.pair import Pair
from bottega.engine.parallel.remote_rows import OffloadTarget, RemoteJobs
from bottega.engine.request import Request
from bottega.engine.results import Decoding, ImageDecoding, Reporter
from bottega.engine.spans import DeviceClock
from bottega.engine.spec import ResolvedSpec
from bottega.engine.step import Stepper
from bottega.engine.waiting import ReadinessGate, WaitingOrder, WaitingOrders, open_job
from bottega.engine.warm_up import engine_probes, measure_stages, sample_job
from bottega.model.model import Model
from bottega.model.vae import check_decodable
from bottega.v1.fleet_pb2 import ServiceAddress

_log = logging.getLogger(__name__)

# Weight of a new measurement in the average `Engine.fixed_s`.
_FIXED_WEIGHT = 0.2
# A trial of a request's steps may take .3 s, and LoRAs' differences for text encoders 6 s. After this time of the host,
# or this share of the last step if that is more, they go on in the next turn, so that they hardly delay other steps.
_MIN_PREPARATION_S = 0.02
_PREPARATION_SHARE = 0.25


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
        self._decodings: dict[EngineJob, ImageDecoding] = {}
        self._device_clock = DeviceClock(model.runtime)
        self._turn_began = model.runtime.record()
        self._turn_began_s = self._step_s = 0.0
        self._skips_step = False
        self._waiting = WaitingOrders(self.addons)
        heartbeat = heartbeat or Heartbeat()
        self.beat = heartbeat.beat
        self._denoiser = _open_denoiser(model, limits, self.addons, heartbeat, self._decoded_area)
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
        request = sample_job(self.model, self._device_clock).requests[0]
        probes = dict(engine_probes(self.model, self._denoiser.forward, request.rows(), request.latent))
        for addon in self.addons:
            probes.update({name: make(self.model) for name, make in addon.probes.items()})
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
        self._turn_began, self._turn_began_s = self.model.runtime.record(), self._clock()
        yield from self._encode_next()
        yield from self._update_readiness()
        turns = self.turns
        # Prompts that are encoded delay steps in every other turn at most.
        self._skips_step = self._decodes_first() or (self._is_long() and not self._skips_step)
        if not self._skips_step:
            yield from self._step()
        yield from self._decode_next()
        if self.turns == turns and not self._skips_step:
            self._wait()

    def _is_long(self) -> bool:
        """Return whether this turn would delay a tenant with short turns, who is here or may come, if it went on.

        A GPU that still works on what was enqueued before is not delayed.
        """
        turn = Span(begin=self._turn_began, end=self.model.runtime.record())
        return turn.ready and self._batcher.is_long(turn.seconds)

    def _preparation_is_long(self) -> bool:
        """Return whether preparing a new job would delay the jobs that run now, if it went on.

        It is the host's time that counts, because a GPU may still be busy with the last step.
        """
        max_s = max(_MIN_PREPARATION_S, _PREPARATION_SHARE * self._step_s)
        return bool(self._jobs) and self._clock() - self._turn_began_s > max_s

    def _wait(self) -> None:
        """Wait for the device or for data of add-ons, unless there is something to do."""
        if any(decoding.paused for decoding in self._decodings.values()):
            return
        if any(order.encoding is not None for order in self._waiting):
            return
        for decoding in self._decodings.values():
            decoding.wait()
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
                waiting.encoding = PausableWork(self.model.runtime, self._open_in_pieces(waiting, now_s))
            waiting.encoding.run(lambda: self._is_long() or (waiting.preparing and self._preparation_is_long()))
        except Exception as error:  # noqa: BLE001 - the boundary of a job: its failure is not the others'
            if waiting.encoding is not None:
                waiting.uncharged.append(waiting.encoding.spans[-1])
                self._charge_ended(waiting)
            yield waiting.refuse(self._named(error, waiting.order.spec))
            return
        waiting.uncharged.append(waiting.encoding.spans[-1])
        job = waiting.encoding.result
        if job is None:
            self._charge_ended(waiting)
            self._waiting.put_back(waiting)
            return
        job.order, job.encodings = waiting.order, waiting.encoding.spans
        job.uncharged += waiting.uncharged
        job.device_s = waiting.device_s
        self._jobs[job.key] = job
        self._jobs_by_request |= dict.fromkeys(job.runs, job)

    def _open_in_pieces(self, waiting: WaitingOrder, now_s: float) -> Generator[None, None, EngineJob]:
        waiting.preparing = True
        yield from try_steps(waiting.order.spec, self.model.samplers)
        for part in waiting.addons.values():
            yield from part.prepare_prompt()
        waiting.preparing = False
        # Nothing may pause between this and the encoding of the prompt, for which add-ons change the text encoders.
        for addon in self.addons:
            addon.before_prompt(waiting.addons.get(addon))
        return (yield from open_job(self.model, waiting.order, waiting.addons, now_s, self._device_clock))

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
        began_s = self._clock()
        outcome = self._stepper.step()
        self._step_s = self._clock() - began_s
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
            self._charge_ended(job)
        for job in self._reporter.jobs:
            yield from self._say(job)

    def _charge_ended(self, job: EngineJob | WaitingOrder) -> None:
        """Charge a job's tenant for its `uncharged` work that the device has done."""
        while job.uncharged and job.uncharged[0].ready:
            self._charge(job, job.uncharged.pop(0).seconds)

    def _charge(self, job: EngineJob | WaitingOrder, seconds: float) -> None:
        """Charge a job's tenant for device seconds outside of denoising steps."""
        job.device_s += seconds
        self._batcher.charge(job.order.share, seconds)

    def _say(self, job: EngineJob, *, to_the_end: bool = False) -> Iterator[Event]:
        try:
            yield from self._reporter.say(job, to_the_end=to_the_end)
        except Exception as error:  # noqa: BLE001 - the boundary of a job: its failure is not the others'
            yield self._fail(job, error)

    def _may_go_first(self, tenant: str) -> bool:
        """Return whether a tenant may use the device now: no other one that could has used less."""
        others = [order.order.share.tenant for order in self._waiting if order.encoding is not None]
        if not self._device_decodes:
            others += [job.order.share.tenant for job in self._due()]
        used = self._batcher.used(tenant)
        return self._batcher.may_go_first(tenant) and all(used <= self._batcher.used(other) for other in others)

    def _due(self) -> list[EngineJob]:
        """Return the jobs with an image that may be decoded now, or go on being decoded.

        Without memory for one more image beside those that are being decoded, these are finished first.
        """
        return [job for job in self._jobs.values() if self._is_due(job)]

    def _is_due(self, job: EngineJob) -> bool:
        decoding = self._decodings.get(job)
        if decoding is not None:
            return decoding.paused
        return (request := job.undrawn()) is not None and self._has_room(request)

    @property
    def _device_decodes(self) -> bool:
        """Whether the device is decoding an image, and not paused."""
        return not all(decoding.paused or decoding.elsewhere for decoding in self._decodings.values())

    def _decodes_first(self) -> bool:
        """Return whether an image that is being decoded goes on before the next step."""
        return any(
            decoding.paused and self._may_go_first(job.order.share.tenant) for job, decoding in self._decodings.items()
        )

    def _decode_next(self) -> Iterator[Event]:
        """Yield the decoded image, and decode the next finished latent, or go on with one.

        The oldest latent of the tenant that has used the device least is next. It waits while another tenant that has
        used less has requests to denoise.
        """
        yield from self._collect()
        if self._device_decodes:
            return  # It decodes one image at a time.
        due = self._due()
        if not due:
            return
        job = min(due, key=lambda job: (self._batcher.used(job.order.share.tenant), job not in self._decodings))
        if not self._may_go_first(job.order.share.tenant):
            return
        try:
            self._decode(job)
        except Exception as error:  # noqa: BLE001 - the boundary of a job: its failure is not the others'
            yield self._fail(job, error)
        yield from self._collect()

    def _has_room(self, request: Request) -> bool:
        """Return whether there is memory to decode an image beside those that are being decoded."""
        if not self._decoding_area():
            return True
        area = request.latent.shape[-2] * request.latent.shape[-1]
        return self.model.memory.fits_decoding(self._decoding_area() + self.model.decoded_area(area))

    def _decode(self, job: EngineJob) -> None:
        """Decode a finished image of a job, or a part of it if this turn becomes long."""
        decoding, request = self._decodings.get(job), job.undrawn()
        if decoding is None:
            assert request is not None, "one of its images is finished"
            begun = (part.decode(request) for part in job.addons.values())
            decoding = next((elsewhere for elsewhere in begun if elsewhere is not None), None)
            if decoding is None:
                check_decodable(self.model, request.latent)
                decoding = Decoding(self.model, job, request)
            self._decodings[job] = decoding
        with self._denoiser.covered(("decode", decoding.request.latent.shape, len(decoding.spans))):
            decoding.enqueue(self._is_long)
        if decoding.paused:
            self._charge(job, decoding.spans[-1].seconds)

    def _decoding_area(self) -> int:
        """Return the number of elements of latents that are being decoded, or encoded from an image."""
        scale = self.model.latent_scale
        specs = [order.order.spec for order in self._waiting if order.encodes_image]
        encoded = sum(self.model.decoded_area((spec.height // scale) * (spec.width // scale)) for spec in specs)
        return encoded + sum(decoding.area for decoding in self._decodings.values())

    def _decoded_area(self, area: int) -> int:
        """Return how many elements of latents may be decoded beside forwards of latents of this area."""
        return max(self._decoding_area(), self.model.decoded_area(area))

    def _collect(self) -> Iterator[Event]:
        decoding = next((decoding for decoding in self._decodings.values() if decoding.ready), None)
        if decoding is None:
            return
        del self._decodings[decoding.job]
        self._stepper.note_times()
        yield from self._say(decoding.job, to_the_end=True)
        if decoding.job in self._jobs.values():
            yield from self._hand_out(decoding)

    def _hand_out(self, decoding: ImageDecoding) -> Iterator[Event]:
        job, request = decoding.job, decoding.request
        for span in decoding.spans[-1:]:  # Earlier ones were charged when it paused.
            self._charge(job, span.seconds)
        try:
            job.check_inputs(to_the_end=True)
            pixels = decoding.take()
            job.note_decoding(decoding.how)
            job.note_elsewhere("decode", decoding.seconds)
            for span in decoding.spans:
                job.seconds["decode"] += span.seconds
                job.spans.add_of_device(f"decode image {request.index}", "decode", span, {})
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
        return JobFailed(key=job.key, error=to_job_failure(self._named(error, job.order.spec)), trace=job.trace())

    def _named(self, error: Exception, spec: ResolvedSpec) -> Exception:
        """Return the error; if the device ran out of memory, one that names the picture's size as the reason."""
        if not is_out_of_memory(error):
            return error
        _log.error("the device has no memory left for a job", extra={"why": str(error)})
        return self.model.memory.refusal(spec.width, spec.height)

    def _forget(self, job: EngineJob) -> None:
        self._charge_ended(job)
        del self._jobs[job.key]
        self._reporter.forget(job)
        self._decodings.pop(job, None)
        close_parts(job.addons)
        if self._pair is not None and job.remote_job is not None:
            self._pair.forget(job.remote_job)
        for request in job.runs:
            del self._jobs_by_request[request]
            self._batcher.remove(request)
            self._stepper.forget(request)


def _open_denoiser(
    model: Model,
    limits: EngineLimits,
    addons: Sequence[EngineAddOn],
    heartbeat: Heartbeat,
    decoded_area: Callable[[int], int],
) -> Denoiser:
    network = Network(
        backbone=model.backbone,
        row_weights=next((addon.row_weights for addon in addons if addon.row_weights is not None), None),
        residuals=next((addon.residuals for addon in addons if addon.residuals is not None), None),
        strategies=[addon.strategy for addon in addons if addon.strategy is not None],
        fixed_rows=limits.fixed_rows,
        device=model.runtime,
        operations=model.operations,
    )
    return Denoiser(
        network,
        addons=addons,
        memory=model.memory,
        decoded_area=decoded_area,
        heartbeat=heartbeat,
        compile_s=0.0 if model.device.type == "cpu" else limits.compile_s,
    )
