"""The engine's loop: every turn encodes at most one prompt, runs one group for one step, decodes at most one latent.

Jobs join and leave between any two turns.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch

from bottega.diffusion.acceleration.acceleration import Acceleration, AccelerationResult
from bottega.diffusion.acceleration.probes import engine_probes
from bottega.diffusion.acceleration.self_check import SelfCheck, SelfCheckSettings
from bottega.diffusion.acceleration.trial_log import TrialLog
from bottega.diffusion.device.out_of_memory import is_out_of_memory
from bottega.diffusion.device.span import Span
from bottega.diffusion.editing.masked.backbone import MaskedBackbone
from bottega.diffusion.editing.masked.feature_maps import FullMaps
from bottega.diffusion.editing.masked.support import unsupported
from bottega.diffusion.editing.sparse import SparseMaps
from bottega.diffusion.engine.addon import EngineAddOn, close_parts
from bottega.diffusion.engine.batcher import Batcher
from bottega.diffusion.engine.bounded_forward import BoundedForward
from bottega.diffusion.engine.decoding import Decoding, start_decoding
from bottega.diffusion.engine.events import (
    Event,
    ImageDrawn,
    JobFailed,
    JobFinished,
    JobKept,
)
from bottega.diffusion.engine.forward import Denoiser
from bottega.diffusion.engine.job import EngineJob, EngineOrder, open_job
from bottega.diffusion.engine.limits import EngineLimits, check_drawable, check_fixed_rows, max_pixels
from bottega.diffusion.engine.measured import MeasuredForward
from bottega.diffusion.engine.readiness import ReadinessGate
from bottega.diffusion.engine.reporting import Reporter
from bottega.diffusion.engine.request import Request
from bottega.diffusion.engine.spans import DeviceClock
from bottega.diffusion.engine.step import Stepper
from bottega.diffusion.engine.waiting import WaitingOrder, WaitingOrders
from bottega.diffusion.engine.warm_up import measure_stages, sample_job
from bottega.diffusion.errors import to_job_failure
from bottega.diffusion.heartbeat import Heartbeat, call_after_blocks
from bottega.diffusion.model.decode import check_decodable
from bottega.diffusion.model.model import Model
from bottega.diffusion.parallel.offload import OffloadTarget
from bottega.diffusion.parallel.pair import Pair
from bottega.diffusion.parallel.remote_rows import RemoteJobs
from bottega.diffusion.spec import ResolvedSpec
from bottega.errors import MethodNotServed, Unavailable
from bottega.planning import RowFractions, StepTimes
from bottega.v1.activations_pb2 import BlockProfile
from bottega.v1.fleet_pb2 import ServiceAddress

_log = logging.getLogger(__name__)

# Weight of a new measurement of the time beside the steps.
_FIXED_WEIGHT = 0.2


class Engine:
    """Draws jobs on one device. One thread calls everything.

    addons: what jobs may need beside the model: ControlNets, LoRAs.
    peer: the other worker of a pair, to which rows of its groups may be offloaded. heartbeat: beats while a turn runs.

    fixed_s: seconds that a job takes beside its steps: encoding, and decoding one image.
    remote_jobs: the rows that this engine computes for its peer.
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
        if heartbeat is not None:  # first: fitting the preview runs the VAE
            call_after_blocks((model.backbone.unet, model.vae, *model.text_encoders), heartbeat.beat)
        self.model = model
        self.fixed_s = 0.0
        self.accelerations: Sequence[AccelerationResult] = ()
        self.step_times = StepTimes()
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

        self.addons = tuple(addons)
        self._waiting = WaitingOrders(self.addons)
        self.row_fractions = RowFractions()
        self._batcher: Batcher[Request] = Batcher(
            self.step_times,
            self.row_fractions,
            max_rows=limits.fixed_rows or limits.max_rows,
            max_wait_turns=limits.max_wait_turns,
        )
        self._readiness = ReadinessGate(self._batcher, self.addons)
        denoiser = Denoiser(
            model.backbone,
            next((addon.row_weights for addon in self.addons if addon.row_weights is not None), None),
            next((addon.residuals for addon in self.addons if addon.residuals is not None), None),
            fixed_rows=limits.fixed_rows,
            masked=_masked_backbone(model, limits, heartbeat),
            device=model.runtime,
            operations=model.operations,
        )
        self._denoiser = denoiser
        self._bounded = BoundedForward(
            denoiser,
            model.memory,
            decoded_area=model.decoded_area,
            splits=not limits.fixed_rows,
            heartbeat=heartbeat,
            compile_s=0.0 if model.device.type == "cpu" else limits.compile_s,
        )
        self._forward = MeasuredForward(
            self._bounded, self.step_times, self.addons, self.row_fractions, fixed_rows=limits.fixed_rows
        )
        self._pair = None
        if peer is not None:
            self._pair = Pair(
                self._forward.predict, peer, self.step_times, self.row_fractions, heartbeat or Heartbeat()
            )
        self._stepper = Stepper(
            self._forward,
            self._batcher,
            self._jobs_by_request,
            self.addons,
            self._pair,
            device=model.runtime,
            splits=not limits.fixed_rows,
        )
        self._beat = (heartbeat or Heartbeat()).beat
        self.remote_jobs = RemoteJobs(
            self._forward.predict,
            device=model.runtime,
            dtype=model.dtype,
            addons=self.addons,
            clock=clock,
        )

    @property
    def jobs(self) -> Mapping[Hashable, EngineJob]:
        """The jobs whose prompts have been encoded, by key, oldest first."""
        return MappingProxyType(self._jobs)

    @property
    def turns(self) -> int:
        """Number of turns so far in which a group ran."""
        return self._stepper.turns

    @property
    def steps(self) -> int:
        """Number of denoising steps of requests, in all turns so far."""
        return self._stepper.steps

    @property
    def max_pixels(self) -> int:
        """Most pixels of one image: as configured, or what the model is made for and some more."""
        return max_pixels(self._limits, self.model)

    @property
    def busy(self) -> bool:
        """Whether a turn would do anything."""
        return bool(self._waiting or self._jobs)

    def submit(self, order: EngineOrder) -> None:
        """Takes a job in; its first event comes with the turn that encodes it.

        Raises InvalidRequest for one of which nothing can be drawn, TooLarge, naming the limit, and what an add-on
        raises that cannot serve it, Unavailable for instance.
        """
        check_drawable(order.spec, self._limits, self.model)
        self._waiting.add(order)

    def cancel(self, key: Hashable) -> None:
        """Drops a job. Harmless when it is not here."""
        self._waiting.drop(key)
        if key in self._jobs:
            self._forget(self._jobs[key])

    def enable_previews(self, key: Hashable) -> None:
        """The job's progress has previews from now on. Harmless when it is not here."""
        self._waiting.enable_previews(key)
        if key in self._jobs:
            job = self._jobs[key]
            job.order = replace(job.order, preview=True)

    def set_services(self, services: Sequence[ServiceAddress]) -> None:
        """These services are there now, the best first. Each add-on is told of those of its kind."""
        for addon in self.addons:
            addon.set_services([service for service in services if service.kind == addon.kind])

    def set_backlog(self, requests: int) -> None:
        """So many requests wait elsewhere and will come when there is room."""
        self._batcher.set_backlog(requests)
        if self._pair is not None:
            self._pair.backlog = requests

    def steps_left(self) -> Iterator[tuple[Hashable, int]]:
        """Every job that is here, with its steps to go, over all images."""
        for job in self._jobs.values():
            yield job.key, job.steps_left
        for waiting in self._waiting:
            yield waiting.order.key, waiting.order.spec.num_images * waiting.order.spec.steps

    def computed_shares(self) -> Mapping[Hashable, float]:
        """Of every job that denoises, the share of the tokens of its rows that its next turn computes."""
        return {job.key: job.computed_share for job in self._jobs.values()}

    def check_accelerations(
        self, candidates: Sequence[Acceleration], *, deadline_s: float, trials: TrialLog | None = None
    ) -> None:
        """Keeps of these what is faster here and draws the same. Before `warm_up`, which measures what is kept.

        Raises InternalError, see SelfCheck.
        """
        if not candidates:
            return
        request = sample_job(self.model, self._device_clock).requests[0]
        probes = engine_probes(self.model, self._denoiser.predict, request.rows(), request.latent)
        settings = SelfCheckSettings(synchronize=self.model.runtime.synchronize, beat=self._beat, deadline_s=deadline_s)
        self.accelerations = SelfCheck(self.model, probes, settings, trials).run(candidates)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run every stage and measure it; what a large picture takes follows from a small one on a slow device."""
        stages = measure_stages(self.model, self._device_clock)
        self.fixed_s = stages.fixed_s
        row = stages.job.requests[0].rows()[0]
        self._bounded.measure_memory(row, self.model.runtime)
        self._forward.warm_up(row, self._batcher.max_rows)

    def turn(self) -> Iterator[Event]:
        """One turn, and its events as they happen. Harmless when there is nothing to do."""
        yield from self._say_arrived()
        yield from self._encode_next()
        yield from self._update_readiness()
        turns = self.turns
        yield from self._step()
        yield from self._decode_next()
        if self.turns == turns and self._decoding is not None:
            self._decoding.wait()  # there is nothing else to do meanwhile
        elif self.turns == turns:
            self._readiness.wait(
                [*(each.addons for each in self._waiting), *(job.addons for job in self._jobs.values())]
            )

    def profile_blocks(self, width: int, height: int) -> BlockProfile:
        """Measures what the network's blocks take for edits of pictures of this size, 0 is the model's own.

        Raises Unavailable while there is anything to draw, which would be measured as well and would wait for it;
        InvalidRequest and TooLarge for a size that it does not draw; MethodNotServed where nothing is masked here.
        """
        if self.busy:
            raise Unavailable("this worker draws pictures now; its blocks are measured while it has nothing to do")
        defaults = self.model.defaults
        width, height = width or defaults.width, height or defaults.height
        spec = ResolvedSpec(
            prompt="",
            num_inference_steps=defaults.num_inference_steps,
            width=width,
            height=height,
            sampler=defaults.sampler,
            use_karras_sigmas=defaults.use_karras_sigmas,
        )
        check_drawable(spec, self._limits, self.model)
        for addon in self.addons:
            profile = addon.profile_blocks(width, height, self._beat)
            if profile is not None:
                return profile
        raise MethodNotServed("this worker computes no masked blocks")

    def _encode_next(self) -> Iterator[Event]:
        """Encode the next prompt that has all it needs; fail those that never will."""
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
        """Lets requests go on whose add-ons are there; fails the jobs whose add-ons never will be."""
        now_s = self._clock()
        for job in list(self._jobs.values()):
            try:
                job.check_inputs()
                yield from self._readiness.update(job, now_s)
            except Exception as error:  # noqa: BLE001 - the boundary of a job: its failure is not the others'
                yield self._fail(job, error)

    def _step(self) -> Iterator[Event]:
        """One denoising step of a group, and what there is to say about it."""
        outcome = self._stepper.step()
        if outcome is None:
            return
        for job, error in outcome.failed.items():
            yield self._fail(job, error)
        for job in outcome.jobs:
            self._reporter.note_step(job, self._clock())
            yield from self._say(job)

    def _say_arrived(self) -> Iterator[Event]:
        """Yield events of what has arrived from the device since the last turn."""
        self._stepper.note_times()
        for job in self._jobs.values():
            self._charge_encoding(job)
        for job in self._reporter.jobs:
            yield from self._say(job)

    def _charge_encoding(self, job: EngineJob) -> None:
        """Charge a job's tenant for its first stage once the device has done it."""
        if not job.charged_encoding and job.encoding is not None and job.encoding.ready:
            job.charged_encoding = True
            self._charge(job, job.encoding.seconds)

    def _charge(self, job: EngineJob, seconds: float) -> None:
        """Charge a job's tenant for seconds of the device beside its turns."""
        job.device_s += seconds
        self._batcher.charge(job.order.share, seconds)

    def _say(self, job: EngineJob, *, to_the_end: bool = False) -> Iterator[Event]:
        """What there is to say of a job, see Reporter."""
        try:
            yield from self._reporter.say(job, to_the_end=to_the_end)
        except Exception as error:  # noqa: BLE001 - the boundary of a job: its failure is not the others'
            yield self._fail(job, error)

    def _decode_next(self) -> Iterator[Event]:
        """Hand out what has been decoded, and have the next latent that is finished decoded.

        Of the tenant that has used least of the device, the oldest is next. Where another one whose requests are
        denoised has used less, its turns come before.
        """
        yield from self._collect()
        if self._decoding is not None:
            return
        for job in sorted(self._jobs.values(), key=lambda job: self._batcher.used(job.order.share.tenant)):
            request = job.undrawn()
            if request is not None and self._batcher.may_go_first(job.order.share.tenant):
                try:
                    check_decodable(self.model, request.latent)
                    with self._bounded.covered(("decode", request.latent.shape)):
                        self._decoding = start_decoding(self.model, job, request)
                except Exception as error:  # noqa: BLE001 - the boundary of a job: its failure is not the others'
                    yield self._fail(job, error)
                yield from self._collect()
                return

    def _collect(self) -> Iterator[Event]:
        """Hands out the image that has been decoded."""
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
        for part in job.addons.values():
            if (kept := part.keep(request.index)) is not None:
                yield JobKept(key=job.key, index=request.index, data=kept)
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
        """That the device had no memory, with what it had none for; else the error itself."""
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


def _masked_backbone(model: Model, limits: EngineLimits, heartbeat: Heartbeat | None) -> MaskedBackbone | None:
    """Over the model's network; None for one of which it does not know all parts."""
    if unsupported(model.backbone.unet):
        return None
    maps = SparseMaps() if limits.sparse_convolutions else FullMaps()
    return MaskedBackbone(
        model.backbone.unet,
        maps=maps,
        beat=heartbeat.beat if heartbeat else None,
        operations=model.operations,
        memory=model.memory,
    )
