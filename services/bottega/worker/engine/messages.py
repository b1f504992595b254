"""Converts the engine's events and answers to messages of the pipe. `orders` converts its commands."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from torch import Tensor

from bottega.engine.engine import Engine
from bottega.engine.errors import to_job_failure
from bottega.engine.events import (
    Event,
    ImageDrawn,
    JobAdvanced,
    JobCheckpointed,
    JobDecided,
    JobFailed,
    JobFinished,
    JobKept,
    JobStarted,
)
from bottega.engine.spans import EngineTrace
from bottega.errors import BottegaError, MethodNotServed
from bottega.model.model import Model
from bottega.model.sampler_choices import ModelSamplers
from bottega.model_files.control_layout import base_layout
from bottega.rpc.operation.metrics import link_counts
from bottega.rpc.status import to_job_error
from bottega.rules import MAX_REASON_CHARACTERS, MAX_SIDE
from bottega.v1 import engine_pb2, fleet_pb2, generation_pb2, image_pb2, tensor_pb2
from bottega.v1.device_pb2 import DeviceMemory
from bottega.v1.trace_pb2 import Span, Trace
from bottega.v1.worker_pb2 import AttemptDecisions, AttemptId, AttemptKept
from bottega.worker.engine.orders import SAMPLERS, attempt_of
from bottega.worker.engine.runtime import Runtime

_NUMBERS = {kind: number for number, kind in SAMPLERS.items()}


def event_of(event: Event, engine: Engine) -> engine_pb2.EngineEvent:
    """Convert an event of the engine to its message."""
    attempt = attempt_of(event.key)
    match event:
        case JobStarted():
            started = engine_pb2.EngineStarted(
                attempt=attempt, steps_total=event.steps_total, steps_resumed=event.steps_resumed
            )
            return engine_pb2.EngineEvent(started=started)
        case JobDecided():
            decisions = AttemptDecisions(by_kind=event.decisions)
            return engine_pb2.EngineEvent(decided=engine_pb2.EngineDecided(attempt=attempt, decisions=decisions))
        case JobAdvanced():
            progress = engine_pb2.EngineProgress(
                attempt=attempt,
                steps_done=event.steps_done,
                device_s=event.device_s,
                preview_index=event.preview_index,
            )
            if event.preview is not None:
                progress.preview.CopyFrom(_pixels(event.preview))
            return engine_pb2.EngineEvent(progress=progress)
        case JobCheckpointed():
            checkpoint = engine_pb2.EngineCheckpoint(
                attempt=attempt, steps_done=event.steps_done, checkpoint=event.data
            )
            return engine_pb2.EngineEvent(checkpoint=checkpoint)
        case ImageDrawn():
            picture = engine_pb2.EnginePicture(
                attempt=attempt, index=event.index, pixels=_pixels(event.pixels), handed_over_s=time.monotonic()
            )
            return engine_pb2.EngineEvent(picture=picture)
        case JobKept():
            data = AttemptKept(by_kind=event.by_kind).SerializeToString()
            kept = engine_pb2.EngineKept(attempt=attempt, index=event.index, kept=data)
            return engine_pb2.EngineEvent(kept=kept)
        case JobFinished():
            done = engine_pb2.EngineDone(
                attempt=attempt, provenance=_provenance(event, engine), trace=_trace(event.trace)
            )
            return engine_pb2.EngineEvent(done=done)
        case JobFailed():
            return failed(attempt, event.error, _trace(event.trace))


def failed(attempt: AttemptId, error: BottegaError, trace: Trace | None = None) -> engine_pb2.EngineEvent:
    """Return the message that says that an attempt has failed."""
    return engine_pb2.EngineEvent(
        failed=engine_pb2.EngineFailed(attempt=attempt, error=to_job_error(error), trace=trace)
    )


def ready_of(engine: Engine) -> engine_pb2.EngineEvent:
    """Return the message that says that the engine is ready, with its model's properties."""
    accelerations = [
        fleet_pb2.Acceleration(
            name=check.name,
            kept=check.kept,
            speedup=check.speedup,
            difference=check.difference if math.isfinite(check.difference) else 0.0,
            tolerance=check.tolerance,
            reason=check.reason,
        )
        for check in engine.accelerations
    ]
    model = model_message(engine.model, max_pixels=engine.max_pixels)
    ready = engine_pb2.EngineReady(model=model, device=str(engine.model.device), accelerations=accelerations)
    return engine_pb2.EngineEvent(ready=ready)


def model_message(model: Model, *, max_pixels: int) -> image_pb2.Model:
    """Return a model's properties.

    Args:
        max_pixels: Largest number of pixels of one image.
    """
    defaults = model.defaults
    return image_pb2.Model(
        name=model.name,
        model_hash=model.digest,
        dtype=model.dtype_name,
        default_width=defaults.width,
        default_height=defaults.height,
        size_multiple=model.size_multiple,
        max_pixels=max_pixels,
        default_steps=defaults.num_inference_steps,
        default_guidance_scale=defaults.guidance_scale,
        default_edit_guidance_scale=defaults.edit_guidance_scale,
        default_sampler=_NUMBERS[defaults.sampler],
        sampler_choices=_sampler_choices(model.samplers),
        edits_refused_because=model.edits_refused_because[:MAX_REASON_CHARACTERS],
        default_strength=defaults.strength,
        default_edit_strength=defaults.edit_strength,
        default_edit_controlnet_scale=model.family.edit_controlnet_scale,
        edits_only=model.image_channels > 0,
        one_text_encoder=len(model.text_encoders) == 1,
        max_clip_skip=model.max_clip_skip,
        strength_keeps_steps=model.family.strength_keeps_steps,
        max_side=min(model.max_side or 0, MAX_SIDE),
        plain_prompts_only=not model.family.weighs_words,
        embeds_guidance=model.embeds_guidance,
        takes_true_cfg=model.family.takes_true_cfg,
        max_sequence_length=model.family.max_sequence_length,
        guidance_from_zero=model.family.guidance_from_zero,
        vae_scale_factor=model.latent_scale,
        base=base_layout(model.backbone.network.config, model.latent_scale).base,
    )


def _sampler_choices(samplers: ModelSamplers) -> Iterator[image_pb2.SamplerChoice]:
    for choice, reason in samplers.refusals.items():
        pace = samplers.pace(choice.kind)
        yield image_pb2.SamplerChoice(
            sampler=_NUMBERS[choice.kind],
            use_karras_sigmas=choice.karras,
            is_default=choice == samplers.default_choice(choice.kind),
            refused_because=reason[:MAX_REASON_CHARACTERS],
            refused_steps={} if reason else samplers.refused_steps(choice),
            evaluations_per_step=pace.per_step,
            extra_evaluations=pace.extra,
        )


def answer_of(engine: Engine, question: engine_pb2.EngineQuestion) -> engine_pb2.EngineEvent:
    """Return the message with the answer of an add-on to a question, or with its error."""
    answer = engine_pb2.EngineAnswer(request=question.request)
    try:
        addon = next((addon for addon in engine.addons if addon.kind == question.kind), None)
        if addon is None:
            raise MethodNotServed(f"this worker has no add-on of kind {question.kind}")
        answer.answer = addon.answer(question.question, engine)
    except Exception as error:  # noqa: BLE001 - the boundary of a command
        answer.error.CopyFrom(to_job_error(to_job_failure(error)))
    return engine_pb2.EngineEvent(answer=answer)


def beat_of(runtime: Runtime, *, peer_links: int, device_memory: DeviceMemory) -> engine_pb2.EngineEvent:
    """Return the heartbeat message, which reports the engine's load.

    Args:
        peer_links: Number of open connections to the other worker of the pair.
    """
    engine = runtime.engine
    shares = engine.computed_shares()
    beat = engine_pb2.EngineBeat(
        turns=engine.turns,
        steps=engine.steps,
        running=[
            fleet_pb2.RunningAttempt(attempt=attempt_of(key), steps_left=steps, computed_share=shares.get(key, 0.0))
            for key, steps in engine.evaluations_left()
        ],
        step_times=[
            fleet_pb2.StepTime(
                latent_height=shape[0],
                latent_width=shape[1],
                rows=rows,
                seconds=seconds,
                outdated=engine.step_times.outdated(shape, rows),
            )
            for shape, rows, seconds in engine.step_times.entries()
        ],
        fixed_s=engine.fixed_s,
        masked_times=[
            fleet_pb2.MaskedTimes(latent_height=shape[0], latent_width=shape[1], fixed_share=fixed_share)
            for shape, fixed_share in engine.row_fractions.entries()
        ],
        links=link_counts(runtime.counters, open_links=peer_links),
        device_memory=device_memory,
    )
    add_prompt_metrics(beat, engine.model)
    for addon in engine.addons:
        addon.fill_beat(beat)
    return engine_pb2.EngineEvent(beat=beat)


def add_prompt_metrics(beat: engine_pb2.EngineBeat, model: Model) -> None:
    """Add what the cache of encoded prompts has counted to the report, if the model has text encoders."""
    if not model.encodes:
        return
    cache, name = model.prompt_cache, "bottega_worker_prompt_cache"
    beat.metrics.add(name=f"{name}_hits", text="Prompts whose embeddings were cached.", value=cache.hits, counts=True)
    beat.metrics.add(name=f"{name}_misses", text="Prompts that were encoded.", value=cache.misses, counts=True)
    beat.metrics.add(name=f"{name}_bytes", text="Bytes of cached embeddings of prompts.", value=cache.used_bytes)


def _provenance(event: JobFinished, engine: Engine) -> generation_pb2.Provenance:
    record = event.record
    as_stock = record.denoised_as_stock and record.decoded_as_stock and engine.model.is_as_stock
    exact_if_alone = record.exact and as_stock
    provenance = generation_pb2.Provenance(
        model_hash=engine.model.digest,
        dtype=engine.model.dtype_name,
        device=str(engine.model.device),
        exact=exact_if_alone and not record.shared_in_half_precision,
        times=[generation_pb2.StageTime(stage=name, seconds=seconds) for name, seconds in record.seconds.items()],
        accelerations=[check.name for check in engine.accelerations if check.kept],
        shared_in_half_precision=exact_if_alone and record.shared_in_half_precision,
    )
    provenance.MergeFrom(record.provenance)
    return provenance


def _trace(trace: EngineTrace) -> Trace:
    """Convert the spans of a trace. Their times are on CLOCK_MONOTONIC."""
    spans = [
        Span(
            name=span.name,
            service=span.service,
            track=span.track,
            begin_ns=round(span.begin_s * 1e9),
            duration_ns=round(span.seconds * 1e9),
            facts=span.facts,
        )
        for span in trace.spans
    ]
    return Trace(spans=spans, dropped=trace.dropped)


def _pixels(pixels: Tensor) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(
        data_type=tensor_pb2.DATA_TYPE_UINT8, shape=tuple(pixels.shape), data=pixels.numpy().tobytes()
    )
