"""Runs one attempt in the front process: decodes inputs, sends the attempt to the engine, encodes images."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

from bottega.addons.interface.front_addon import FrontAddOn
from bottega.background_tasks import BackgroundTasks
from bottega.errors import BottegaError, DeadlinePassed, InternalError, TooLarge
from bottega.planning import Pace, steps_to_run
from bottega.process.child import MAX_FRAME_BYTES
from bottega.rules import is_flow_matching
from bottega.schedules import keeps_steps
from bottega.v1 import engine_pb2
from bottega.v1.fleet_pb2 import RunningAttempt
from bottega.v1.generation_pb2 import GenerationSpec, Provenance, StageTime
from bottega.v1.image_pb2 import Model, SamplerChoice
from bottega.v1.trace_pb2 import Trace
from bottega.v1.worker_pb2 import AttemptDecisions, RunAttemptRequest
from bottega.worker.attempts import Attempt, FailedEvent, KeptEvent, PictureEvent, ProgressEvent, StartedEvent
from bottega.worker.engine_client import WorkerEngineClient
from bottega.worker.image_codec import AttemptInputs, ImageCodec
from bottega.worker.metrics import WorkerMetrics

_log = logging.getLogger(__name__)

# Trace track of the front process: images in the codec processes.
_TRACK = "codec"
# Upper bound on a message to the engine, less the largest spec.
_MAX_START_BYTES = MAX_FRAME_BYTES - 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureOrigin:
    """The facts that a worker writes about itself into provenances and image files, and the add-ons that add more."""

    worker: str
    """Name of the worker."""
    version: str
    """Version of the suite."""
    model_hash: str
    """Hash of the model's weights and configuration, in hex."""
    addons: Sequence[FrontAddOn] = ()
    """Add-ons of the front process, which write the attempt's decisions into the parameters."""


class AttemptTrace:
    """The spans of one attempt, in the front process and the engine. Times count from the creation of this object."""

    def __init__(self) -> None:
        self._began_ns = time.monotonic_ns()
        self._trace = Trace()

    def add(self, name: str, *, began_s: float, seconds: float) -> None:
        """Add a span of the front process.

        Args:
            began_s: Start of the span, on CLOCK_MONOTONIC.
        """
        self._trace.spans.add(
            name=name,
            track=_TRACK,
            begin_ns=round(began_s * 1e9) - self._began_ns,
            duration_ns=round(seconds * 1e9),
        )

    def take(self, engine: Trace) -> None:
        """Add the spans of the engine, whose times are on CLOCK_MONOTONIC."""
        self._trace.dropped += engine.dropped
        for span in engine.spans:
            taken = self._trace.spans.add()
            taken.CopyFrom(span)
            taken.begin_ns -= self._began_ns

    def message(self) -> Trace:
        """Return all spans, sorted by their start."""
        self._trace.spans.sort(key=lambda span: span.begin_ns)
        return self._trace


class AttemptRunner:
    """Runs one attempt. Call `start`, then `on_engine_event` with each event of the engine about the attempt.

    Args:
        request: The validated request without its large fields. The runner changes it.
        on_end: Called once, when the attempt has ended.
    """

    def __init__(
        self,
        request: RunAttemptRequest,
        inputs: AttemptInputs,
        attempt: Attempt,
        *,
        engine: WorkerEngineClient,
        images: ImageCodec,
        metrics: WorkerMetrics,
        origin: PictureOrigin,
        on_end: Callable[[AttemptRunner], None],
    ) -> None:
        self.attempt = attempt
        self._request = request
        self._inputs = inputs
        self._engine = engine
        self._images = images
        self._metrics = metrics
        self._origin = origin
        self._on_end = on_end
        self._began_s = time.monotonic()
        self._facts = _facts(request)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._done: Provenance | None = None
        self._trace = AttemptTrace()
        self._encodes_preview = False
        self._tasks = BackgroundTasks("work of an attempt")
        self._expiry: asyncio.TimerHandle | None = None
        self._in_engine = False

    @property
    def spec(self) -> GenerationSpec:
        """The spec of the attempt."""
        return self._request.spec

    @property
    def in_engine(self) -> bool:
        """Whether the engine runs the attempt. If the engine dies then, the attempt is lost."""
        return self._in_engine and self._done is None

    def report(self, model: Model | None) -> RunningAttempt:
        """Return the report of an attempt that is not in the engine now: it has not started, or is being encoded."""
        steps_left = 0 if self.attempt.started else evaluations_expected(self.spec, model)
        return RunningAttempt(attempt=self.attempt.key.message(), steps_left=steps_left)

    def start(self) -> None:
        """Start the attempt in the background."""
        _log.info("attempt started", extra=self._facts)
        self._metrics.attempt_began()
        if self._request.HasField("deadline_s"):
            loop = asyncio.get_running_loop()
            self._expiry = loop.call_later(max(0.0, self._request.deadline_s), self._expire)
        self._spawn(self._send_start())

    def enable_previews(self) -> None:
        """Send previews with each progress report from now on."""
        if self._request.preview:
            return
        self._request.preview = True
        if self.in_engine:
            preview = engine_pb2.EnginePreview(attempt=self._request.attempt)
            self._send_if_alive(engine_pb2.EngineCommand(preview=preview))

    def abort(self, error: BottegaError) -> None:
        """End the attempt with an error, and cancel it in the engine. Does nothing if it has ended."""
        if self.attempt.ended:
            return
        if self.in_engine:
            self._cancel_in_engine()
        self.fail(error)

    def fail(self, error: BottegaError, trace: Trace | None = None) -> None:
        """End an attempt that the engine no longer runs with an error. Does nothing if it has ended.

        Args:
            trace: Spans of the engine; None if there are none.
        """
        if not self.attempt.ended:
            if trace is not None:
                self._trace.take(trace)
            self.attempt.fail(error, self._trace.message())
            self._end()

    def on_engine_event(self, event: engine_pb2.EngineEvent) -> None:
        """Handle an event of the engine about this attempt."""
        match event.WhichOneof("event"):
            case "started":
                started = event.started
                self.attempt.start(StartedEvent(steps_total=started.steps_total, steps_resumed=started.steps_resumed))
            case "decided":
                self._decide(event.decided.decisions)
            case "progress":
                self._advance(event.progress)
            case "picture":
                self._spawn(self._encode(event.picture))
            case "kept":
                self.attempt.add_kept(KeptEvent(index=event.kept.index, data=event.kept.kept))
            case "done":
                self._done = event.done.provenance
                self._trace.take(event.done.trace)
                self._complete_if_ready()

    async def _send_start(self) -> None:
        command = engine_pb2.EngineCommand()
        request, start = self._request, command.start
        start.request.CopyFrom(request)
        size_bytes = self._inputs.size_bytes(request.spec)
        if size_bytes > _MAX_START_BYTES:
            raise TooLarge(
                f"the decoded images of the request take {size_bytes} bytes; at most {_MAX_START_BYTES} are allowed",
                metadata={"limit": "start_bytes", "start_bytes": str(_MAX_START_BYTES)},
            )
        await self._inputs.move_into(start, self._images, self._note_decoding)
        start.request.preview = request.preview  # a caller may have asked for previews while images were decoded
        self._engine.send(command, size_bytes)
        self._in_engine = True

    def _decide(self, new: AttemptDecisions) -> None:
        """Add new decisions to the attempt's decisions."""
        decisions = AttemptDecisions()
        for part in (self.attempt.decisions or self._request.decisions, new):
            decisions.MergeFrom(part)
        self.attempt.set_decisions(decisions)

    def _advance(self, progress: engine_pb2.EngineProgress) -> None:
        self._metrics.steps_done(max(0, progress.steps_done - self.attempt.steps_done))
        if progress.HasField("preview") and not self._encodes_preview:
            self._encodes_preview = True
            self._spawn(self._encode_preview(progress))
        else:
            self.attempt.advance(ProgressEvent(steps_done=progress.steps_done, device_s=progress.device_s))

    async def _encode_preview(self, progress: engine_pb2.EngineProgress) -> None:
        try:
            jpeg = await self._images.preview(progress.preview)
        except BottegaError as error:
            _log.warning("a preview could not be encoded and is skipped", extra={**self._facts, **_why(error)})
            jpeg = b""
        finally:
            self._encodes_preview = False
        steps_done = max(progress.steps_done, self.attempt.steps_done)
        self.attempt.advance(
            ProgressEvent(
                steps_done=steps_done,
                device_s=progress.device_s,
                preview_index=progress.preview_index,
                preview_jpeg=jpeg,
            )
        )

    async def _encode(self, picture: engine_pb2.EnginePicture) -> None:
        spec = self._spec_of(picture.index)
        overlay, profile = self._inputs.overlay, self._inputs.icc_profile
        encoded = await self._images.encode(
            picture.pixels,
            spec,
            picture.index,
            model_hash=self._origin.model_hash,
            overlay=overlay,
            icc_profile=profile,
        )
        handoff_s = max(0.0, encoded.began_s - picture.handed_over_s)
        self._seconds["handoff"] += handoff_s
        self._note_time("encode_image", "encode", encoded.seconds)
        self._trace.add(f"wait for a codec, image {picture.index}", began_s=picture.handed_over_s, seconds=handoff_s)
        self._trace.add(f"encode image {picture.index}", began_s=encoded.began_s, seconds=encoded.seconds)
        self.attempt.add_picture(PictureEvent(index=picture.index, data=encoded.data))
        self._complete_if_ready()

    def _spec_of(self, index: int | None) -> GenerationSpec:
        """Return the spec that draws image `index` again; for None, the parameters that all images share."""
        decisions = (self.attempt.decisions or self._request.decisions).by_kind
        spec = GenerationSpec()
        spec.CopyFrom(self._request.spec)
        for addon in self._origin.addons:
            addon.pin(spec, index, self._request, decisions.get(addon.kind))
        return spec

    def _complete_if_ready(self) -> None:
        if self._done is None or len(self.attempt.pictures) < self._request.spec.num_images:
            return
        self._metrics.observe_group(self._done.mean_group_requests)
        self._metrics.observe_loras(self._done.loras)
        provenance = self._provenance(self._done)
        self._metrics.observe_stages(provenance.times)
        self.attempt.complete(provenance, self._trace.message())
        self._end()

    def _provenance(self, provenance: Provenance) -> Provenance:
        """Add what the front process knows to the engine's provenance."""
        provenance.parameters.CopyFrom(self._spec_of(None))
        provenance.worker = self._origin.worker
        provenance.bottega_version = self._origin.version
        self._inputs.report(provenance)
        for use in provenance.controlnets:
            use.servers[:] = [server or self._origin.worker for server in use.servers]
        provenance.times.extend(StageTime(stage=stage, seconds=seconds) for stage, seconds in self._seconds.items())
        return provenance

    def _note_decoding(self, seconds: float) -> None:
        self._note_time("decode_image", "decode", seconds)
        self._trace.add("decode an input image", began_s=time.monotonic() - seconds, seconds=seconds)

    def _note_time(self, stage: str, work: str, seconds: float) -> None:
        self._seconds[stage] += seconds
        self._metrics.observe_codec(work, seconds)

    def _expire(self) -> None:
        self.abort(DeadlinePassed("the deadline passed before the images were done"))

    def _cancel_in_engine(self) -> None:
        cancel = engine_pb2.EngineCancel(attempt=self._request.attempt)
        self._send_if_alive(engine_pb2.EngineCommand(cancel=cancel))

    def _send_if_alive(self, command: engine_pb2.EngineCommand) -> None:
        try:
            self._engine.send(command)
        except BottegaError as error:  # the loss of the engine ends the attempt
            facts = {"command": command.WhichOneof("command"), **_why(error)}
            _log.info("a command could not be sent, because the engine is lost", extra={**self._facts, **facts})

    def _end(self) -> None:
        if self._expiry:
            self._expiry.cancel()
        self._tasks.cancel_soon()
        outcome = self.attempt.outcome
        error = outcome.error if isinstance(outcome, FailedEvent) else None
        self._metrics.attempt_ended(error.reason_name.lower() if error else "completed")
        self._report(error)
        self._on_end(self)

    def _report(self, error: BottegaError | None) -> None:
        facts = {**self._facts, "seconds": round(time.monotonic() - self._began_s, 3)}
        if error is None:
            _log.info("attempt completed", extra=facts)
        else:
            _log.warning("attempt failed", extra={**facts, **_why(error)})

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        if self.attempt.ended:
            work.close()
            return
        self._tasks.start(self._guarded(work))

    async def _guarded(self, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except BottegaError as error:
            self.abort(error)
        except Exception:  # noqa: BLE001 - the boundary of an attempt: a defect ends this attempt only
            _log.exception("an attempt failed with an unexpected error", extra=self._facts)
            self.abort(InternalError("the worker could not serve the request because of a defect"))


def _facts(request: RunAttemptRequest) -> dict[str, object]:
    """Return the fields of every log line about an attempt. Events of the engine have no call that sets them."""
    return {
        "job_id": request.attempt.job_id,
        "request_id": request.request_id,
        "attempt": request.attempt.number,
        "model": request.spec.model,
    }


def _why(error: BottegaError) -> dict[str, object]:
    return {"reason": error.reason_name, "text": error.message}


def evaluations_expected(spec: GenerationSpec, model: Model | None) -> int:
    """Return how often an attempt evaluates the network, estimated from its spec. Only the engine knows it exactly."""
    skips = spec.HasField("strength") and not keeps_steps(spec, model is not None and model.strength_keeps_steps)
    steps = steps_to_run(
        spec.num_inference_steps, spec.strength if skips else None, flows=is_flow_matching(spec.sampler)
    )
    choices = () if model is None else model.sampler_choices
    choice = next((choice for choice in choices if choice.sampler == spec.sampler), SamplerChoice())
    pace = Pace(per_step=choice.evaluations_per_step or 1, extra=choice.extra_evaluations)
    return spec.num_images * pace.evaluations(steps)
