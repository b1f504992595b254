"""The engine add-on for ControlNets: a job's sessions begin when its prompt is encoded, and end with the job.

A provider opens the sessions and computes residuals; the model's forward pass adds them. If a second worker computes
some rows of the job, a message tells it which ControlNets they use. Messages are checked here, and raise ValueError if
they break a rule.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from torch import Tensor

from bottega import kinds, rules
from bottega.addons.controlnets.engine.provider import (
    HOSTS_FIELD,
    ControlHosts,
    ControlInput,
    ControlNetProvider,
    ControlRecord,
    MeasuredControlNets,
    read_hosts,
)
from bottega.addons.controlnets.engine.remote import MAX_SESSIONS, RemoteControls, controls_part, read_controls
from bottega.addons.controlnets.engine.sessions import stretched
from bottega.device.device import run_pieces
from bottega.engine.addon import EngineAddOn, JobAddOn
from bottega.engine.encode import Conditions, encode_image_in_pieces
from bottega.engine.errors import vae_not_finite
from bottega.engine.events import EngineRecord
from bottega.engine.forward import Prediction
from bottega.engine.job import EngineJob, EngineOrder, InputCheck
from bottega.engine.parallel.remote_rows import OffloadedPart
from bottega.engine.request import ActiveControl, Request
from bottega.engine.spans import TracedSpan
from bottega.engine.spec import ControlSpec
from bottega.errors import InternalError, Unavailable, Violation
from bottega.model.model import Model
from bottega.model.rows import Embeds, Half, Row
from bottega.model.vae import encode_dtype
from bottega.v1.generation_pb2 import RESIDUAL_MODE_PIPELINED, RESIDUAL_MODE_SYNCHRONOUS, ControlNetUse

# Name of the stage of waiting for ControlNets, before the first step and in steps.
CONTROLNETS = "controlnets"
# How long a job waits for its ControlNets. The largest in use has 5 GB, a minute's reading from a slow disk, and
# another one may have to be loaded first.
OPENING_TIMEOUT_S = 120.0


class EngineControlNets(EngineAddOn):
    """The engine add-on that opens the ControlNet sessions of jobs.

    Args:
        provider: Opens sessions; None if this worker has no ControlNets.
        model: The base model.
    """

    kind = kinds.CONTROLNET

    def __init__(self, provider: ControlNetProvider | None, model: Model) -> None:
        self.residuals = self._provider = MeasuredControlNets(provider) if provider is not None else None
        self._model = model

    def open_remote(self, part: OffloadedPart, halves: Mapping[Half, Embeds]) -> JobAddOn:
        """Open sessions with the ControlNets of a job of another worker, for which this worker computes rows."""
        if self._provider is None:
            raise Unavailable("this worker has no ControlNets")
        return RemoteControls(self._provider, read_controls(part, halves))

    def open(self, order: EngineOrder) -> JobAddOn | None:
        """Return the object for a job's sessions, not begun yet; None without ControlNets. Raise InvalidRequest."""
        return JobControlNets(self._provider, order, self._model) if order.spec.controlnets else None

    def wait(self, parts: Sequence[JobAddOn], timeout_s: float) -> None:
        """Wait until one of the sessions has opened or failed, or until the time-out."""
        handles = [handle for part in parts if isinstance(part, JobControlNets) for handle in part.handles]
        if handles and self._provider is not None:
            self._provider.settle(handles, timeout_s)


class JobControlNets(JobAddOn):
    """The ControlNet sessions of one job.

    `begun` has the inputs of the sessions, and `active` the sessions as the job's requests use them. The requests share
    all sessions, unless each request draws its own latents of the control images. A ControlNet that a resumed job no
    longer needs has no session.
    """

    def __init__(self, provider: ControlNetProvider | None, order: EngineOrder, model: Model) -> None:
        self.active: tuple[ActiveControl, ...] = ()
        self.begun: tuple[ControlInput, ...] = ()
        self._provider = provider
        self._order = order
        self._model = model
        self._encodes = self.prepares_prompt = model.unet is None
        self._draws = model.family.draws_control_latents
        self._latents: dict[int, tuple[Tensor, Tensor]] = {}
        """Mean and standard deviation of each control image's latent, by the id of the image."""
        self._checks: list[InputCheck] = []
        self._hosts = read_hosts(order.addons.get(kinds.CONTROLNET, b""))
        if self._hosts and len(self._hosts) != len(order.spec.controlnets):
            rules.refuse([Violation(field=HOSTS_FIELD, description="must be one for each of spec.controlnets")])
        self._requests: Sequence[Request] = ()
        self._uses: tuple[_SessionUse, ...] = ()
        self._records: tuple[ControlRecord, ...] | None = None
        self._waiting_since_s: float | None = None
        self._waited_s = 0.0
        self._encoder_s = 0.0
        self._openings: list[TracedSpan] = []

    @property
    def handles(self) -> list[Hashable]:
        """The handles of the sessions, which the provider made."""
        return [control.handle for control in self.active]

    def prepare_prompt(self) -> Generator[None, None, None]:
        """Encode the control images if ControlNets read latents of them, as those for transformers do."""
        for image in self._order.control_images if self._encodes else ():
            if id(image) not in self._latents:
                size = self._order.spec.height, self._order.spec.width
                encoded = yield from encode_image_in_pieces(self._model, stretched(image, *size))
                self._latents[id(image)] = encoded.mean[0], encoded.std[0]
                error = vae_not_finite("encoded a control image", encode_dtype(self._model.vae))
                self._checks.append(InputCheck(finite=encoded.finite, error=error))

    def attach(self, job: EngineJob, conditions: Conditions, now_s: float) -> None:
        """Begin the sessions that the remaining steps need. Raises BottegaError if one can never be opened."""
        self._requests = job.requests
        self.begin(conditions, job.requests)
        job.inputs.extend(self._checks)
        self._waiting_since_s = now_s

    def begin(self, conditions: Conditions, requests: Sequence[Request]) -> None:
        """Begin the sessions that the requests still need, and pass them to the requests.

        Raises:
            BottegaError: A session can never be opened.
        """
        spec, images = self._order.spec, self._order.control_images
        if len(images) != len(spec.controlnets):
            raise InternalError(f"received {len(images)} control images for {len(spec.controlnets)} ControlNets")
        uses = _session_uses(spec.controlnets, requests[0], joins_unions=not self._encodes)
        groups: list[Sequence[Request]] = [[request] for request in requests] if self._draws else [requests]
        needed = [
            (group, use) for group in groups for use in uses if use.last > min(request.evaluation for request in group)
        ]
        self._uses = tuple(use for _, use in needed)
        if not needed:
            return
        if self._provider is None:
            raise Unavailable("this worker has no ControlNets")
        self.begun = tuple(self._input(use, conditions, group[0]) for group, use in needed)
        self.offloadable = len(self.begun) <= MAX_SESSIONS
        handles = self._provider.open(self.begun)
        shared = frozenset(Half) if self._model.family.halves_share_residuals else frozenset[Half]()
        self.active = tuple(
            ActiveControl(handle=handle, first=use.first, last=use.last, halves=shared | set(control.halves))
            for (_, use), handle, control in zip(needed, handles, self.begun, strict=True)
        )
        for request in requests:
            request.controls = tuple(
                control for control, (group, _) in zip(self.active, needed, strict=True) if request in group
            )

    def update(self, now_s: float) -> None:
        """Check whether the job has to wait for its sessions.

        A job begins when its sessions are open. If a server dies during a step that needs it, the job waits again,
        because the next server may have to load the ControlNet first, and other jobs must not wait for that.
        """
        if self._opened():
            if self._waiting_since_s is not None:
                waited_s = now_s - self._waiting_since_s
                self._waited_s += waited_s
                self._openings.append(
                    TracedSpan(
                        name="waiting for sessions", track="waits", begin_s=self._waiting_since_s, seconds=waited_s
                    )
                )
                self._waiting_since_s = None
        elif self._waiting_since_s is None:
            if any(self._needed(request.evaluation) for request in self._requests):
                self._waiting_since_s = now_s
        elif now_s - self._waiting_since_s > OPENING_TIMEOUT_S:
            raise Unavailable(f"the ControlNets were not loaded within {OPENING_TIMEOUT_S:g} s")
        made = min(request.evaluation for request in self._requests)
        if all(control.last <= made for control in self.active):
            self.close()  # before the job's end, because other jobs may wait for the room

    def blocks(self, request: Request) -> bool:
        """Return whether the request waits for a session to open. All requests of a job wait together."""
        return self._waiting_since_s is not None

    def after_forward(self, prediction: Prediction) -> float:
        """Add the time that a forward pass waited for residuals to this job's, and return it.

        The wait counts for every job with sessions in the forward pass.
        """
        if not self.active:
            return 0.0
        self._waited_s += prediction.waited_s
        self._encoder_s += prediction.encoder_s
        return prediction.waited_s

    def offload(self) -> OffloadedPart | None:
        """Return the message with which a second worker opens sessions with the same ControlNets; None without any."""
        return controls_part(self.begun) if self.begun else None

    def active_in(self, row: Row) -> int:
        """Return a bit mask of the sessions that are active in the batch row."""
        return sum(1 << place for place, handle in enumerate(self.handles) if handle in row.controls)

    def spans(self) -> Iterator[TracedSpan]:
        """Yield trace spans of waiting for sessions, and of calls to servers. Each ControlNet has its own track."""
        yield from self._openings
        for session, record in zip(self._uses, self._records or (), strict=False):
            track = f"ControlNet {self._order.spec.controlnets[session.places[0]].name}"
            for call in record.calls:
                yield TracedSpan(
                    name=f"residuals of step {call.step}",
                    track=track,
                    begin_s=call.began_s,
                    seconds=call.seconds,
                    service=call.server,
                )

    def report(self, record: EngineRecord) -> None:
        """Add the use of each ControlNet to the record, in the spec's order, including those that were never active."""
        spec = self._order.spec
        records: dict[int, list[ControlRecord]] = {}
        for session, made in zip(self._uses, self._records or (), strict=False):
            for place in session.places:
                records.setdefault(place, []).append(made)
        uses = [
            _use(
                control,
                self._requests[0].control_steps(control),
                _joined(records.get(place, []), concurrent=self._draws),
            )
            for place, control in enumerate(spec.controlnets)
        ]
        record.provenance.controlnets.extend(uses)
        record.provenance.encoder_s = self._encoder_s
        record.exact &= not any(use.stale_steps for use in uses)
        record.seconds[CONTROLNETS] = self._waited_s

    def close(self) -> None:
        if self._provider is not None and self.active and self._records is None:
            self._records = self._provider.close(self.handles)

    def _opened(self) -> bool:
        """Return whether all sessions are open. Raise the BottegaError of a failed one."""
        if self._provider is None or not self.active or self._records is not None:
            return True
        return self._provider.opened(self.handles)

    def _needed(self, evaluation: int) -> bool:
        return any(control.first <= evaluation < control.last for control in self.active)

    def _input(self, use: _SessionUse, conditions: Conditions, request: Request) -> ControlInput:
        order, spec, places = self._order, self._order.spec, use.places
        images = [spec.controlnets[place] for place in places]
        control = images[0]
        # As in Diffusers: the factors of several images count inside the network, that of one outside.
        several = len(images) > 1
        measured = any(image.measured for image in images)
        halves = {Half.CONDITIONAL: conditions.conditional}
        alone = control.guess_mode or self._model.family.halves_share_residuals
        if conditions.unconditional is not None and not alone:
            halves = {Half.UNCONDITIONAL: conditions.unconditional, **halves}
        if self._encodes:
            run_pieces(self.prepare_prompt())  # only what has not been encoded
        config = self._model.vae.config
        return ControlInput(
            name=control.name,
            images=tuple(self._image(index, request) for index in places),
            latent_scaling=(config.shift_factor or 0.0, config.scaling_factor) if self._encodes else None,
            modes=tuple(image.control_mode for image in images if image.control_mode is not None),
            image_scales=use.scales if several else (),
            height=spec.height,
            width=spec.width,
            halves=halves,
            scale=1.0 if several else use.scales[0],
            guess_mode=control.guess_mode,
            hosts=self._hosts[places[0]] if self._hosts else ControlHosts(),
            may_be_stale=spec.stale_residuals and not measured,
            measured=measured,
            share=order.share,
        )

    def _image(self, index: int, request: Request) -> Tensor:
        """Return a control image as pixels or as a latent, as the ControlNets read it; see `ControlInput.images`."""
        pixels = self._order.control_images[index]
        if not self._encodes:
            return pixels
        mean, deviation = self._latents[id(pixels)]
        return mean + deviation * request.control_noise[index][0] if self._draws else mean


@dataclass(frozen=True, slots=True, kw_only=True)
class _SessionUse:
    """The use of a session by a job."""

    places: tuple[int, ...]
    """Indexes of its images in the spec."""
    scales: tuple[float, ...]
    """Scale of each image."""
    first: int
    """First evaluation in which it is active."""
    last: int
    """Evaluation after the last one in which it is active."""


def _session_uses(controls: Sequence[ControlSpec], request: Request, *, joins_unions: bool) -> list[_SessionUse]:
    """Return the use of each session.

    There is one session for each control image. A union for a UNet reads several images together. Its steps are split
    into spans in which the set of active images does not change, and each span has one session. As in Diffusers,
    inactive images have scale 0, and the union also runs in spans without an active image.
    """
    windows = [request.control_window(control) for control in controls]
    scales = [control.controlnet_conditioning_scale for control in controls]
    together = joins_unions and len(controls) > 1 and controls[0].control_mode is not None
    if not together or any(control.name != controls[0].name for control in controls):
        return [
            _SessionUse(places=(place,), scales=(scale,), first=first, last=last)
            for place, (scale, (first, last)) in enumerate(zip(scales, windows, strict=True))
        ]
    edges = {request.first_evaluation, request.last_evaluation, *(edge for window in windows for edge in window)}
    return [
        _SessionUse(
            places=tuple(range(len(controls))),
            scales=tuple(
                scale if start <= first < end else 0.0 for scale, (start, end) in zip(scales, windows, strict=True)
            ),
            first=first,
            last=last,
        )
        for first, last in itertools.pairwise(sorted(edges))
    ]


def _joined(records: Sequence[ControlRecord], *, concurrent: bool) -> ControlRecord:
    """Merge the records of a control image's sessions into one.

    Args:
        records: The records.
        concurrent: Whether the sessions ran at the same time, one for each picture, so that a forward pass waited for
            all at once; otherwise they ran one after the other.
    """
    waits_s = [record.waited_s for record in records]
    similarities = [record.similarity for record in records if record.similarity is not None]
    return ControlRecord(
        waited_s=max(waits_s, default=0.0) if concurrent else sum(waits_s),
        stale_steps=sum(record.stale_steps for record in records),
        pipelined=any(record.pipelined for record in records),
        servers=tuple(dict.fromkeys(server for record in records for server in record.servers)),
        similarity=fmean(similarities) if similarities else None,
        calls=tuple(call for record in records for call in record.calls),
    )


def _use(control: ControlSpec, steps: tuple[int, int], record: ControlRecord) -> ControlNetUse:
    begin, end = steps
    return ControlNetUse(
        name=control.name,
        image_digest=control.image_digest,
        begin_step=begin,
        end_step=end,
        scale=control.controlnet_conditioning_scale,
        digest=control.digest,
        waited_s=record.waited_s,
        stale_steps=record.stale_steps,
        mode=RESIDUAL_MODE_PIPELINED if record.pipelined else RESIDUAL_MODE_SYNCHRONOUS,
        servers=record.servers,
        similarity=record.similarity,
        control_mode=control.control_mode,
    )
