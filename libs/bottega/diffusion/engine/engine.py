"""The engine's loop: every turn encodes at most one prompt, runs one group for one step, decodes at most one latent.

Jobs join and leave between any two turns. Knows models, requests and groups; knows no processes and no wire.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from types import MappingProxyType

import torch

from bottega import rules
from bottega.diffusion.controlnets.provider import ControlNets
from bottega.diffusion.controlnets.similarity import MeasuredControlNets
from bottega.diffusion.engine.batcher import Batcher
from bottega.diffusion.engine.checkpoint import write_checkpoint
from bottega.diffusion.engine.events import Event, ImageDrawn, JobAdvanced, JobCheckpointed, JobFailed, JobFinished
from bottega.diffusion.engine.forward import Denoiser
from bottega.diffusion.engine.heartbeat import beat_in
from bottega.diffusion.engine.job import EngineJob, EngineOrder, open_job
from bottega.diffusion.engine.preview import LatentPreview
from bottega.diffusion.engine.readiness import ReadinessGate
from bottega.diffusion.engine.request import Request
from bottega.diffusion.engine.step import Stepper, check_fixed_rows
from bottega.diffusion.errors import named, not_finite
from bottega.diffusion.loras import LoraSource, LoraWeights
from bottega.diffusion.loras.addon import JobLoras, ask_for_loras
from bottega.diffusion.model.decode import decode_latent
from bottega.diffusion.model.model import Model
from bottega.diffusion.parallel.offload import OffloadTarget
from bottega.diffusion.parallel.remote_rows import RemoteJobs, RemoteLoras
from bottega.diffusion.spec import ResolvedSpec, undrawable
from bottega.errors import TooLarge
from bottega.planning import StepTimes

_log = logging.getLogger(__name__)

# Beyond a few times the size that it was made for a model draws nonsense, and attention grows with the square: one
# such request would hold up everybody else's turns for minutes.
_OWN_SIZES = 4
_LEAST_MAX_PIXELS = 512 * 512
# Weight of a new measurement of the time beside the steps.
_FIXED_WEIGHT = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What an operator bounds.

    max_rows: of one group. fixed_rows: pads every group to so many rows, for images that are equal byte for
    byte whatever runs beside them; 0 is off. max_wait_turns: that a request may be passed over.
    max_pixels: of one image; 0 is four times the model's own size, and 512 x 512 at least.
    checkpoint_interval_s: a job that runs has a checkpoint at least so often.
    progress_interval_s: progress is told at most so often.
    lora_timeout_s: how long a job waits for its LoRAs. pristine_on_host: what restores weights is kept in host memory.
    """

    max_rows: int = 16
    fixed_rows: int = 0
    max_wait_turns: int = 8
    max_pixels: int = 0
    checkpoint_interval_s: float = 2.0
    progress_interval_s: float = 0.1
    lora_timeout_s: float = 60.0
    pristine_on_host: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _WaitingOrder:
    """A job whose prompt has not been encoded."""

    order: EngineOrder
    loras: JobLoras


class Engine:
    """Draws jobs on one device. One thread calls everything.

    turns: that ran a group. fixed_s: seconds that a job takes beside its steps: encoding, and decoding one image.
    controlnets: where its jobs' ControlNets are. loras: who brings its jobs' LoRAs. weights: what LoRAs do to them.
    follower: the other worker of a pair, which computes rows for this one. guests: the rows that this one computes for
    it.
    """

    def __init__(
        self,
        model: Model,
        limits: EngineLimits,
        *,
        controlnets: ControlNets | None = None,
        loras: LoraSource | None = None,
        follower: OffloadTarget | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_fixed_rows(limits.fixed_rows, model.device)
        self.model = model
        self.turns = 0
        self.fixed_s = 0.0
        self.step_times = StepTimes()
        self._limits = limits
        self._clock = clock
        self._loras = loras
        self._controlnets = MeasuredControlNets(controlnets) if controlnets is not None else None
        self.weights = LoraWeights(model, patches=not limits.fixed_rows, pristine_on_host=limits.pristine_on_host)
        self._batcher: Batcher[Request] = Batcher(
            self.step_times, max_rows=limits.fixed_rows or limits.max_rows, max_wait_turns=limits.max_wait_turns
        )
        self._arrivals: deque[_WaitingOrder] = deque()
        self._jobs: dict[Hashable, EngineJob] = {}
        self._owners: dict[Request, EngineJob] = {}
        self._entry = ReadinessGate(self._batcher, self.weights, controlnets=self._controlnets, loras=loras)
        denoiser = Denoiser(model.backbone, self.weights, self._controlnets, fixed_rows=limits.fixed_rows)
        self._stepper = Stepper(denoiser, self.weights, self._batcher, self._owners, self.step_times, follower=follower)
        self.guests = RemoteJobs(
            self._stepper.predict,
            device=model.device,
            dtype=model.dtype,
            controlnets=controlnets,
            loras=RemoteLoras(source=loras, weights=self.weights, timeout_s=limits.lora_timeout_s, clock=clock),
        )
        self._preview = LatentPreview.fit(model)

    @property
    def jobs(self) -> Mapping[Hashable, EngineJob]:
        """The jobs whose prompts have been encoded, by key, oldest first."""
        return MappingProxyType(self._jobs)

    @property
    def max_pixels(self) -> int:
        """Most pixels of one image: as told, or what the model is made for and some more."""
        own = self.model.defaults.width * self.model.defaults.height
        return self._limits.max_pixels or max(_OWN_SIZES * own, _LEAST_MAX_PIXELS)

    @property
    def busy(self) -> bool:
        """Whether a turn would do anything."""
        return bool(self._arrivals or self._jobs)

    def submit(self, order: EngineOrder) -> None:
        """Takes a job in; its first event comes with the turn that encodes it.

        Raises InvalidRequest for one of which nothing can be drawn, TooLarge, naming the limit, and Unavailable where
        it has LoRAs and nobody brings any.
        """
        rules.refuse(list(undrawable(order.spec, self.model.size_multiple)))
        pixels = order.spec.width * order.spec.height
        if pixels > self.max_pixels:
            raise TooLarge(
                f"{order.spec.width}x{order.spec.height} are {pixels} pixels; this worker draws at most "
                f"{self.max_pixels} (max_pixels)",
                metadata={"limit": "max_pixels", "max_pixels": str(self.max_pixels)},
            )
        loras = ask_for_loras(
            self._loras,
            order.spec.loras,
            order.lora_stores,
            now_s=self._clock(),
            timeout_s=self._limits.lora_timeout_s,
            bound=order.spec.lora_bound,
            step=order.spec.lora_step,
        )
        self._arrivals.append(_WaitingOrder(order=order, loras=loras))

    def cancel(self, key: Hashable) -> None:
        """Drops a job. Harmless when it is not here."""
        for arrival in [each for each in self._arrivals if each.order.key == key]:
            self._arrivals.remove(arrival)
            arrival.loras.close()
        if key in self._jobs:
            self._forget(self._jobs[key])

    def tell_alive(self, alive: Callable[[], None]) -> None:
        """Calls `alive` often from inside a turn, however long it takes; it must be quick."""
        beat_in((self.model.backbone.unet, self.model.vae, *self.model.text_encoders), alive)
        if self._stepper.pair is not None:
            self._stepper.pair.alive = alive

    def show(self, key: Hashable) -> None:
        """Draws previews of a job from now on. Harmless when it is not here."""
        self._arrivals = deque(
            replace(each, order=replace(each.order, preview=True)) if each.order.key == key else each
            for each in self._arrivals
        )
        if key in self._jobs:
            job = self._jobs[key]
            job.order = replace(job.order, preview=True)

    def expect(self, backlog: int) -> None:
        """So many requests wait elsewhere and will come when there is room."""
        self._batcher.expect(backlog)
        if self._stepper.pair is not None:
            self._stepper.pair.backlog = backlog

    def steps_left(self) -> Iterator[tuple[Hashable, int]]:
        """Every job that is here, with its steps to go."""
        for job in self._jobs.values():
            yield job.key, job.steps_total - job.steps_done
        for arrival in self._arrivals:
            yield arrival.order.key, arrival.order.spec.num_images * arrival.order.spec.steps

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Runs every stage and measures it."""
        defaults = self.model.defaults
        spec = ResolvedSpec(prompt="", num_inference_steps=2, width=defaults.width, height=defaults.height)
        for _ in range(2):  # the first time pays for what is made once
            began_s = perf_counter()
            job = open_job(self.model, EngineOrder(key="", spec=spec))
            decode_latent(self.model, job.requests[0].latent)
            self.fixed_s = perf_counter() - began_s
        self._stepper.warm_up(job.requests[0].rows()[0], with_loras=self._loras is not None)

    def turn(self) -> Iterator[Event]:
        """One turn, and what there is to say about it, as it happens. Harmless when there is nothing to do."""
        yield from self._encode()
        yield from self._begin()
        turns = self.turns
        yield from self._denoise()
        yield from self._decode()
        if self.turns == turns:
            jobs = self._jobs.values()
            self._entry.pause([*(each.loras for each in self._arrivals), *(job.loras for job in jobs)])

    def _encode(self) -> Iterator[Event]:
        """The oldest prompt whose LoRAs for the text encoders are here; fails those whose never will be."""
        now_s = self._clock()
        for arrival in list(self._arrivals):
            try:
                if not arrival.loras.text_ready(now_s):
                    continue
            except Exception as error:  # noqa: BLE001 - the boundary of a job: its failure is not the others'
                self._arrivals.remove(arrival)
                arrival.loras.close()
                yield JobFailed(key=arrival.order.key, error=named(error))
                continue
            self._arrivals.remove(arrival)
            yield from self._open(arrival.order, arrival.loras)
            return

    def _open(self, order: EngineOrder, loras: JobLoras) -> Iterator[Event]:
        try:
            text = loras.text_set(self.weights)
            seconds = self.weights.put_in_text(text)
            loras.patch_s = seconds if text is not None else 0.0  # else another's was taken out
            began_s = perf_counter()
            job = open_job(self.model, order, self._controlnets, loras)
        except Exception as error:  # noqa: BLE001 - the boundary of a job: its failure is not the others'
            loras.close()
            yield JobFailed(key=order.key, error=named(error))
            return
        job.seconds["encode"] = perf_counter() - began_s
        self._jobs[job.key] = job
        self._owners |= dict.fromkeys(job.runs, job)
        self._entry.add(job, self._clock())

    def _begin(self) -> Iterator[Event]:
        """Lets jobs go on whose ControlNets and LoRAs are there; fails those whose never will be; ends what is over."""
        now_s = self._clock()
        for job in list(self._jobs.values()):
            try:
                yield from self._entry.look(job, now_s)
            except Exception as error:  # noqa: BLE001 - the boundary of a job: its failure is not the others'
                yield self._fail(job, error)

    def _denoise(self) -> Iterator[Event]:
        self._stepper.choose_weights()
        began_s = perf_counter()
        group = self._batcher.next_group()
        if not group:
            return
        self.turns += 1
        jobs = list(dict.fromkeys(self._owners[request] for request in group))
        rows = [row for request in group for row in request.rows()]
        try:
            prediction = self._stepper.predict_shared(rows, jobs)
        except Exception as error:  # noqa: BLE001 - the boundary of a turn: the next one may go well
            yield from self._blame(group, error)
            return
        failed, sampler_s = self._stepper.advance(group, prediction.noise)
        self._stepper.ask_ahead([request for request in group if self._owners[request] not in failed])
        for job in jobs:
            job.took(prediction, sampler_s=sampler_s, turn_s=perf_counter() - began_s)
        for job in jobs:
            if job in failed:
                yield self._fail(job, failed[job])
            else:
                yield from self._report(job)

    def _blame(self, group: list[Request], error: Exception) -> Iterator[Event]:
        """A turn failed. Whoever ran alone fails; of several, each is tried alone from now on."""
        if len(group) > 1:
            _log.warning("a turn failed; its requests are retried one by one", extra={"why": type(error).__name__})
            for request in group:
                self._batcher.isolate(request)
            return
        yield self._fail(self._owners[group[0]], error)

    def _report(self, job: EngineJob) -> Iterator[Event]:
        """Progress and checkpoint, where they are due."""
        now_s = self._clock()
        ended = job.steps_done == job.steps_total
        if ended or now_s - job.reported_s >= self._limits.progress_interval_s:
            job.reported_s = now_s
            yield self._progress(job)
        if not ended and job.checkpoint_due(now_s, self._limits.checkpoint_interval_s):
            if not all(request.finite for request in job.requests):
                yield self._fail(job, not_finite(job.order.spec.loras))
                return
            job.checkpoint_s, job.checkpoint_steps = now_s, job.steps_done
            states = [request.state() for request in job.requests]
            data = write_checkpoint(self.model, job.order.spec, states)
            yield JobCheckpointed(key=job.key, steps_done=job.steps_done, data=data)

    def _progress(self, job: EngineJob) -> JobAdvanced:
        shown = job.shown()
        preview = self._preview.draw(shown.estimate) if job.order.preview else None
        return JobAdvanced(key=job.key, steps_done=job.steps_done, preview_index=shown.index, preview=preview)

    def _decode(self) -> Iterator[Event]:
        """The oldest latent that is finished."""
        for job in self._jobs.values():
            request = job.undrawn()
            if request is not None:
                yield from self._draw(job, request)
                return

    def _draw(self, job: EngineJob, request: Request) -> Iterator[Event]:
        try:
            if not request.finite:
                raise not_finite(job.order.spec.loras)
            with job.stage("decode"):
                pixels = decode_latent(self.model, request.latent)
        except Exception as error:  # noqa: BLE001 - the boundary of a job: its failure is not the others'
            yield self._fail(job, error)
            return
        job.drawn.add(request.index)
        yield ImageDrawn(key=job.key, index=request.index, pixels=pixels)
        if job.finished:
            self._forget(job)
            beside_s = job.seconds["encode"] + job.seconds["decode"] / len(job.requests)
            self.fixed_s += _FIXED_WEIGHT * (beside_s - self.fixed_s)
            yield JobFinished(key=job.key, record=job.record())

    def _fail(self, job: EngineJob, error: Exception) -> JobFailed:
        self._forget(job)
        return JobFailed(key=job.key, error=named(error))

    def _forget(self, job: EngineJob) -> None:
        del self._jobs[job.key]
        self._entry.forget(job)
        job.controls.close()
        job.loras.close()
        if self._stepper.pair is not None and job.guest is not None:
            self._stepper.pair.forget(job.guest)
        for request in job.runs:
            del self._owners[request]
            self._batcher.remove(request)
