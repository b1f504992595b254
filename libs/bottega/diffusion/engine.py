"""The engine's loop: every turn encodes at most one prompt, runs one group for one step, decodes at most one latent.

Jobs join and leave between any two turns. Knows models, requests and groups; knows no processes and no wire.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from types import MappingProxyType

import torch
from torch import Tensor

from bottega import rules
from bottega.diffusion.batcher import Batcher
from bottega.diffusion.checkpoint import write_checkpoint
from bottega.diffusion.controls import ControlNets
from bottega.diffusion.decode import decode_latent
from bottega.diffusion.denoiser import Denoiser, Prediction
from bottega.diffusion.events import Checkpointed, Drawn, Event, Failed, Finished, LorasIn, Progress, Started
from bottega.diffusion.faults import named
from bottega.diffusion.follower import Follower
from bottega.diffusion.guests import GuestLoras, Guests
from bottega.diffusion.job import Job, Order, open_job
from bottega.diffusion.job_loras import JobLoras, ask_for_loras
from bottega.diffusion.loras import LoraSource, LoraWeights
from bottega.diffusion.model import Model
from bottega.diffusion.pair import Lendable, Pair, PairPrediction
from bottega.diffusion.preview import LatentPreview
from bottega.diffusion.pulse import beat_in
from bottega.diffusion.request import Request
from bottega.diffusion.row import Half, Row
from bottega.diffusion.similarity import MeasuredControlNets
from bottega.diffusion.spec import DrawingSpec, undrawable
from bottega.errors import NotFinite, TooLarge, Unavailable
from bottega.planning import StepTimes

_log = logging.getLogger(__name__)

# Beyond a few times the size that it was made for a model draws nonsense, and attention grows with the square: one
# such request would hold up everybody else's turns for minutes.
_OWN_SIZES = 4
_LEAST_MAX_PIXELS = 512 * 512
# The warm-up measures wider turns until one takes so long: the rest is learnt from real ones.
_WARM_UP_TURN_S = 1.0
# Weight of a new measurement of the time beside the steps.
_FIXED_WEIGHT = 0.2
# How long a job waits for its ControlNets: the largest in use has 5 GB, a minute's reading from a slow disk, and
# another one may have to be waited for first.
OPENING_TIMEOUT_S = 120.0
# How long a turn with nothing else to do waits for them: commands are heard between turns.
_PAUSE_S = 0.05


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
class _Arrival:
    """A job whose prompt has not been encoded."""

    order: Order
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
        follower: Follower | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _check_fixed_rows(limits.fixed_rows, model.device)
        self.model = model
        self.turns = 0
        self.fixed_s = 0.0
        self.step_times = StepTimes()
        self._limits = limits
        self._clock = clock
        self._controlnets = MeasuredControlNets(controlnets) if controlnets is not None else None
        self._loras = loras
        self.weights = LoraWeights(model, patches=not limits.fixed_rows, pristine_on_host=limits.pristine_on_host)
        self._denoiser = Denoiser(model.backbone, self.weights, self._controlnets, fixed_rows=limits.fixed_rows)
        self._batcher: Batcher[Request] = Batcher(
            self.step_times, max_rows=limits.fixed_rows or limits.max_rows, max_wait_turns=limits.max_wait_turns
        )
        self._pair = Pair(self._predict, follower, self.step_times) if follower is not None else None
        self.guests = Guests(
            self._predict,
            device=model.device,
            dtype=model.dtype,
            controlnets=controlnets,
            loras=GuestLoras(source=loras, weights=self.weights, timeout_s=limits.lora_timeout_s, clock=clock),
        )
        self._preview = LatentPreview.fit(model)
        self._arrivals: deque[_Arrival] = deque()
        self._jobs: dict[Hashable, Job] = {}
        self._owners: dict[Request, Job] = {}
        self._opening: dict[Job, float] = {}  # those whose ControlNets are not there, and since when

    @property
    def jobs(self) -> Mapping[Hashable, Job]:
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

    def submit(self, order: Order) -> None:
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
        self._arrivals.append(_Arrival(order=order, loras=loras))

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
        if self._pair is not None:
            self._pair.alive = alive

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
        if self._pair is not None:
            self._pair.backlog = backlog

    def steps_left(self) -> Iterator[tuple[Hashable, int]]:
        """Every job that is here, with its steps to go."""
        for job in self._jobs.values():
            yield job.key, job.steps_total - job.steps_done
        for arrival in self._arrivals:
            yield arrival.order.key, arrival.order.spec.num_images * arrival.order.spec.steps

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Runs every stage and measures it; turns of 1, 2, 4, ... rows until one takes a second."""
        defaults = self.model.defaults
        spec = DrawingSpec(prompt="", num_inference_steps=2, width=defaults.width, height=defaults.height)
        for _ in range(2):  # the first time pays for what is made once
            began_s = perf_counter()
            job = open_job(self.model, Order(key="", spec=spec))
            decode_latent(self.model, job.requests[0].latent)
            self.fixed_s = perf_counter() - began_s
        row = job.requests[0].rows()[0]
        count = 1
        while count <= self._batcher.max_rows:
            rows = [replace(row) for _ in range(count)]
            self._denoiser.predict(rows)  # the first of its size pays for what is made once
            if max(self._predict(rows).seconds for _ in range(3)) > _WARM_UP_TURN_S:
                break
            count *= 2
        if self._loras is not None:
            self._measure_loras(row)

    def _measure_loras(self, row: Row) -> None:
        """What LoRAs cost beside the weights and inside them, by one that changes nothing."""
        probe = self.weights.probe()
        for _ in range(3):
            self._predict([replace(row, loras=probe)])
        self.weights.measure_swap(probe)

    def turn(self) -> Iterator[Event]:
        """One turn, and what there is to say about it, as it happens. Harmless when there is nothing to do."""
        yield from self._encode()
        yield from self._begin()
        turns = self.turns
        yield from self._denoise()
        yield from self._decode()
        if self.turns == turns:
            self._pause()

    def _pause(self) -> None:
        """Waits a little for what jobs lack: nothing else can be done."""
        lacking = [*(each.loras for each in self._arrivals), *(job.loras for job in self._jobs.values())]
        if self._loras is not None and any(loras.pending for loras in lacking):
            self._loras.settle([handle for loras in lacking for handle in loras.handles], _PAUSE_S)
        elif self._controlnets is not None and self._opening:
            self._controlnets.settle([handle for job in self._opening for handle in job.controls.handles], _PAUSE_S)

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
                yield Failed(key=arrival.order.key, error=named(error))
                continue
            self._arrivals.remove(arrival)
            yield from self._open(arrival.order, arrival.loras)
            return

    def _open(self, order: Order, loras: JobLoras) -> Iterator[Event]:
        try:
            loras.patch_s = self.weights.put_in_text(loras.text_set(self.weights))
            began_s = perf_counter()
            job = open_job(self.model, order, self._controlnets, loras)
        except Exception as error:  # noqa: BLE001 - the boundary of a job: its failure is not the others'
            loras.close()
            yield Failed(key=order.key, error=named(error))
            return
        job.seconds["encode"] = perf_counter() - began_s
        self._jobs[job.key] = job
        self._owners |= dict.fromkeys(job.runs, job)
        self._opening[job] = self._clock()

    def _begin(self) -> Iterator[Event]:
        """Lets jobs go on whose ControlNets and LoRAs are there; fails those whose never will be; ends what is over."""
        now_s = self._clock()
        for job in list(self._jobs.values()):
            try:
                arrived = job.loras.arrive(self.weights, job.requests, now_s)
                opened = self._opened(job, now_s)
            except Exception as error:  # noqa: BLE001 - the boundary of a job: its failure is not the others'
                yield self._fail(job, error)
                continue
            if job.controls.over(min(request.step for request in job.requests)):
                job.controls.close()  # before the job's end: others may wait for the room
            if arrived and job.loras.step is not None:
                yield LorasIn(key=job.key, step=job.loras.step)
            if opened and (job in self._opening or job.loras.specs):
                yield from self._let_in(job, now_s)

    def _opened(self, job: Job, now_s: float) -> bool:
        """Whether a job's ControlNets are there. One whose server died in a step that needs it leaves the batcher: who
        goes on with it may have to load it first, and nobody else shall wait for that.

        Raises why they never will be.
        """
        if job.controls.opened:
            return True
        waited_s = now_s - self._opening.get(job, now_s)
        if waited_s > OPENING_TIMEOUT_S:
            raise Unavailable(f"the ControlNets were not there within {OPENING_TIMEOUT_S:g} s")
        if job not in self._opening and any(job.controls.needed(request.step) for request in job.requests):
            self._opening[job] = now_s
            for request in job.runs:
                self._batcher.remove(request)
        return False

    def _let_in(self, job: Job, now_s: float) -> Iterator[Event]:
        """A job can be denoised, for the first time or again; but not those of its images that now need its LoRAs."""
        if job in self._opening:
            job.opened(now_s - self._opening.pop(job))
        blocked = job.loras.block(job.requests, now_s)
        if job.loras.pending:
            blocked.update(job.meter.shadows)
        for request in job.runs:
            runs = request in self._batcher
            if runs and request in blocked:
                self._batcher.remove(request)
            elif not (runs or request in blocked or request.done):
                self._batcher.add(request)
        if not job.started and len(blocked) < len(job.runs):
            job.started, job.checkpoint_s = True, now_s
            yield Started(key=job.key, steps_total=job.steps_total, steps_resumed=job.steps_resumed)

    def _choose_weights(self) -> None:
        """Between two turns: LoRAs go into the weights, or out of them, as those under way need them."""
        requests = list(self._batcher.requests)
        if not any(request.loras_now or request.key.weights for request in requests) and not self.weights.patched:
            return
        if not requests:
            return  # what is in the weights stays: the next job may want the same
        height, width = requests[0].key.shape[1:]
        step_s = self.step_times.seconds((height, width), sum(request.row_count for request in requests))
        seconds = self.weights.choose(
            [request.loras_now for request in requests],
            steps=max(request.steps_left for request in requests),
            step_s=step_s or 0.0,
        )
        patched = self.weights.patched
        moved = [request for request in requests if request.share_weights(patched.key if patched else ())]
        if moved:
            self._batcher.regroup()
        for job in {self._owners[request] for request in requests}:
            job.loras.patch_s += seconds if job.loras.loras is not None else 0.0

    def _denoise(self) -> Iterator[Event]:
        self._choose_weights()
        began_s = perf_counter()
        group = self._batcher.next_group()
        if not group:
            return
        self.turns += 1
        jobs = list(dict.fromkeys(self._owners[request] for request in group))
        rows = [row for request in group for row in request.rows()]
        try:
            prediction = self._predict_shared(rows, jobs)
        except Exception as error:  # noqa: BLE001 - the boundary of a turn: the next one may go well
            yield from self._blame(group, error)
            return
        failed, sampler_s = self._advance(group, prediction.noise)
        for job in jobs:
            job.took(prediction, sampler_s=sampler_s, turn_s=perf_counter() - began_s)
        for job in jobs:
            if job in failed:
                yield self._fail(job, failed[job])
            else:
                yield from self._report(job)

    def _predict_shared(self, rows: list[Row], jobs: list[Job]) -> Prediction:
        """One turn's noise, some of it by the other worker where there is one and it pays."""
        if self._pair is None:
            return self._predict(rows)
        lendable: dict[Hashable, Lendable] = {
            request: Lendable(guest=job.guest, image=request.index)
            for job in jobs
            if job.guest is not None
            for request in job.requests
        }
        prediction = self._pair.predict(rows, lendable)
        if isinstance(prediction, PairPrediction):
            for job in jobs:
                job.lent(prediction, self._pair.name)
        return prediction

    def _predict(self, rows: Sequence[Row]) -> Prediction:
        prediction = self._denoiser.predict(rows)
        if len(prediction.noise) == len(rows):  # else some of them ran only half of it
            _, height, width = rows[0].sample.shape
            plain_s = self.step_times.seconds((height, width), len(rows))
            if self.weights.saw_step([row.loras for row in rows], prediction.seconds, plain_s) or plain_s is None:
                self.step_times.observe((height, width), len(rows), prediction.seconds)
        return prediction

    def _advance(self, group: list[Request], noise: dict[Row, Tensor]) -> tuple[dict[Job, Exception], float]:
        """Makes the step of those whose predictions are here. Returns whose failed, and the seconds it took."""
        halves: dict[Hashable, dict[Half, Tensor]] = {}
        for row, predicted in noise.items():
            halves.setdefault(row.owner, {})[row.half] = predicted
        stepped = [request for request in group if request in halves]
        failed: dict[Job, Exception] = {}
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

    def _blame(self, group: list[Request], error: Exception) -> Iterator[Event]:
        """A turn failed. Whoever ran alone fails; of several, each is tried alone from now on."""
        if len(group) > 1:
            _log.warning("a turn failed; its requests are retried one by one", extra={"why": type(error).__name__})
            for request in group:
                self._batcher.isolate(request)
            return
        yield self._fail(self._owners[group[0]], error)

    def _report(self, job: Job) -> Iterator[Event]:
        """Progress and checkpoint, where they are due."""
        now_s = self._clock()
        ended = job.steps_done == job.steps_total
        if ended or now_s - job.reported_s >= self._limits.progress_interval_s:
            job.reported_s = now_s
            yield self._progress(job)
        if not ended and job.checkpoint_due(now_s, self._limits.checkpoint_interval_s):
            if not all(request.finite for request in job.requests):
                yield self._fail(job, _not_finite())
                return
            job.checkpoint_s, job.checkpoint_steps = now_s, job.steps_done
            states = [request.state() for request in job.requests]
            data = write_checkpoint(self.model, job.order.spec, states)
            yield Checkpointed(key=job.key, steps_done=job.steps_done, data=data)

    def _progress(self, job: Job) -> Progress:
        shown = job.shown()
        preview = self._preview.draw(shown.estimate) if job.order.preview else None
        return Progress(key=job.key, steps_done=job.steps_done, preview_index=shown.index, preview=preview)

    def _decode(self) -> Iterator[Event]:
        """The oldest latent that is finished."""
        for job in self._jobs.values():
            request = job.undrawn()
            if request is not None:
                yield from self._draw(job, request)
                return

    def _draw(self, job: Job, request: Request) -> Iterator[Event]:
        try:
            if not request.finite:
                raise _not_finite()
            with job.stage("decode"):
                pixels = decode_latent(self.model, request.latent)
        except Exception as error:  # noqa: BLE001 - the boundary of a job: its failure is not the others'
            yield self._fail(job, error)
            return
        job.drawn.add(request.index)
        yield Drawn(key=job.key, index=request.index, pixels=pixels)
        if job.finished:
            self._forget(job)
            beside_s = job.seconds["encode"] + job.seconds["decode"] / len(job.requests)
            self.fixed_s += _FIXED_WEIGHT * (beside_s - self.fixed_s)
            yield Finished(key=job.key, record=job.record())

    def _fail(self, job: Job, error: Exception) -> Failed:
        self._forget(job)
        return Failed(key=job.key, error=named(error))

    def _forget(self, job: Job) -> None:
        del self._jobs[job.key]
        self._opening.pop(job, None)
        job.controls.close()
        job.loras.close()
        if self._pair is not None and job.guest is not None:
            self._pair.forget(job.guest)
        for request in job.runs:
            del self._owners[request]
            self._batcher.remove(request)


def _check_fixed_rows(fixed_rows: int, device: torch.device) -> None:
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


def _not_finite() -> NotFinite:
    return NotFinite("the model computed values that are no numbers; another seed or more steps may help")
