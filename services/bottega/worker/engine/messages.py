"""What the engine says and is told, as messages of the pipe."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from bottega import kinds
from bottega.diffusion.controlnets import base_layout
from bottega.diffusion.controlnets.hosts import read_hosts
from bottega.diffusion.controlnets.provider import ControlHosts
from bottega.diffusion.engine.engine import Engine
from bottega.diffusion.engine.events import (
    CachedStart,
    ControlUse,
    Event,
    ImageDrawn,
    JobAdvanced,
    JobCheckpointed,
    JobDecided,
    JobFailed,
    JobFinished,
    JobStarted,
    LoraRecord,
    PairRecord,
)
from bottega.diffusion.engine.job import EngineOrder
from bottega.diffusion.loras.addon import EngineLoras
from bottega.diffusion.model.samplers import SamplerKind
from bottega.diffusion.spec import ControlSpec, LoraSpec, ResolvedSpec
from bottega.errors import BottegaError
from bottega.latents import format_start
from bottega.rpc.operation.link_metrics import link_counts
from bottega.rpc.status import to_job_error
from bottega.v1 import engine_pb2, fleet_pb2, generation_pb2, image_pb2, tensor_pb2
from bottega.v1.worker_pb2 import AttemptDecisions, AttemptId
from bottega.worker.engine.runtime import Runtime

# A key of the engine: job and number, which is all that an AttemptId holds.
Key = tuple[str, int]

# Fields whose absence says something, or stands for the default of ResolvedSpec.
_OPTIONAL = frozenset(
    {
        "prompt_2",
        "negative_prompt",
        "negative_prompt_2",
        "guidance_scale",
        "guidance_rescale",
        "seed",
        "num_images",
        "strength",
    }
)

_OPTIONAL_OF_CONTROL = ("controlnet_conditioning_scale", "control_guidance_start", "control_guidance_end")

_SAMPLERS = {
    generation_pb2.SAMPLER_EULER: SamplerKind.EULER,
    generation_pb2.SAMPLER_EULER_ANCESTRAL: SamplerKind.EULER_ANCESTRAL,
    generation_pb2.SAMPLER_DDIM: SamplerKind.DDIM,
    generation_pb2.SAMPLER_DPMPP_2M: SamplerKind.DPMPP_2M,
}


def key_of(attempt: AttemptId) -> Key:
    """The engine's key of an attempt."""
    return attempt.job_id, attempt.number


def attempt_of(key: object) -> AttemptId:
    """The attempt of an engine's key."""
    assert isinstance(key, tuple), "every order was made here"
    return AttemptId(job_id=key[0], number=key[1])


def order_of(start: engine_pb2.EngineStart, default_sampler: SamplerKind) -> EngineOrder:
    """The order that a start command means."""
    return EngineOrder(
        key=key_of(start.attempt),
        spec=_spec(start, default_sampler),
        image=_tensor(start.image) if start.HasField("image") else None,
        control_images=tuple(_tensor(image.pixels) for image in start.control_images),
        addons=dict(start.addons),
        latent_parallelism=_may_be_lent(start.spec),
        decisions=dict(start.decisions.by_kind),
        checkpoint=start.checkpoint,
        preview=start.preview,
    )


def event_of(event: Event, engine: Engine) -> engine_pb2.EngineEvent:
    """The message that carries an event."""
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
                attempt=attempt, steps_done=event.steps_done, preview_index=event.preview_index
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
        case JobFinished():
            done = engine_pb2.EngineDone(attempt=attempt, provenance=_provenance(event, engine))
            return engine_pb2.EngineEvent(done=done)
        case JobFailed():
            return failed(attempt, event.error)


def failed(attempt: AttemptId, error: BottegaError) -> engine_pb2.EngineEvent:
    """The message that an attempt has failed."""
    return engine_pb2.EngineEvent(failed=engine_pb2.EngineFailed(attempt=attempt, error=to_job_error(error)))


def ready_of(engine: Engine) -> engine_pb2.EngineEvent:
    """The message that the engine is warm."""
    model, defaults = engine.model, engine.model.defaults
    said = image_pb2.Model(
        name=model.name,
        model_hash=model.digest,
        dtype=model.dtype_name,
        default_width=defaults.width,
        default_height=defaults.height,
        size_multiple=model.size_multiple,
        max_pixels=engine.max_pixels,
        default_steps=defaults.num_inference_steps,
        default_guidance_scale=defaults.guidance_scale,
        default_sampler=next(number for number, kind in _SAMPLERS.items() if kind is defaults.sampler),
        vae_scale_factor=model.latent_scale,
        base=base_layout(model.backbone.unet.config, model.latent_scale).base,
    )
    return engine_pb2.EngineEvent(ready=engine_pb2.EngineReady(model=said, device=str(model.device)))


def beat_of(runtime: Runtime, *, peer_links: int) -> engine_pb2.EngineEvent:
    """The message that the engine is alive, and how busy. peer_links: with the other worker of its pair."""
    engine = runtime.engine
    links = peer_links + sum(addon.open_links for addon in engine.addons)
    beat = engine_pb2.EngineBeat(
        turns=engine.turns,
        running=[
            fleet_pb2.RunningAttempt(attempt=attempt_of(key), steps_left=steps) for key, steps in engine.steps_left()
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
        hosted=[item for addon in engine.addons for item in addon.hosted()],
        switch_times=[
            fleet_pb2.SwitchTime(kind=addon.kind, seconds=addon.switch_s)
            for addon in engine.addons
            if addon.switch_s is not None
        ],
        counts=[
            engine_pb2.EngineCount(kind=addon.kind, event=event, count=count)
            for addon in engine.addons
            for event, count in addon.counts.items()
        ],
        links=link_counts(runtime.counters, open_links=links),
    )
    for addon in engine.addons:
        if isinstance(addon, EngineLoras):
            beat.lora_swaps, beat.lora_pristine_bytes = addon.weights.swaps, addon.weights.pristine_bytes
    return engine_pb2.EngineEvent(beat=beat)


def _spec(start: engine_pb2.EngineStart, default_sampler: SamplerKind) -> ResolvedSpec:
    """Every default has been filled in by the gateway, but for those that are absent on purpose."""
    spec = start.spec
    said = {field.name: value for field, value in spec.ListFields() if field.name in _OPTIONAL}
    return ResolvedSpec(
        prompt=spec.prompt,
        num_inference_steps=spec.num_inference_steps,
        width=spec.width,
        height=spec.height,
        sampler=_SAMPLERS.get(spec.sampler, default_sampler),
        use_karras_sigmas=spec.use_karras_sigmas,
        controlnets=tuple(_controls(start)),
        stale_residuals=_may_be_stale(spec),
        loras=tuple(map(_lora, spec.loras)),
        **said,
    )


def _controls(start: engine_pb2.EngineStart) -> Iterator[ControlSpec]:
    """Each with its digest: a checkpoint fits no other version."""
    hosts = read_hosts(start.addons[kinds.CONTROLNET]) if kinds.CONTROLNET in start.addons else ()
    for net, image, host in itertools.zip_longest(start.spec.controlnets, start.control_images, hosts):
        if net is not None and image is not None:
            yield _control(net, image.digest, (host or ControlHosts()).digest)


def _control(net: generation_pb2.ControlNet, image_digest: str, digest: str) -> ControlSpec:
    said = {name: getattr(net, name) for name in _OPTIONAL_OF_CONTROL if net.HasField(name)}  # type: ignore[arg-type]
    return ControlSpec(
        name=net.name,
        image_digest=image_digest,
        digest=digest,
        guess_mode=net.guess_mode,
        measured=net.measure_similarity,
        **said,
    )


def _lora(lora: generation_pb2.Lora) -> LoraSpec:
    return LoraSpec(
        name=lora.name,
        digest=lora.digest,
        scale=lora.scale,
        from_step=lora.from_step if lora.HasField("from_step") else None,
        bound=lora.max_step,
        measured=lora.measure_similarity,
    )


def _may_be_stale(spec: generation_pb2.GenerationSpec) -> bool:
    """Whether residuals may be one step old: as the request says, else as its fidelity does."""
    if spec.techniques.HasField("stale_residuals"):
        return spec.techniques.stale_residuals
    return spec.fidelity in (generation_pb2.FIDELITY_BALANCED, generation_pb2.FIDELITY_FAST)


def _may_be_lent(spec: generation_pb2.GenerationSpec) -> bool:
    """Whether the peer may compute rows. It is exact, so that only the request itself forbids it."""
    return spec.techniques.latent_parallelism if spec.techniques.HasField("latent_parallelism") else True


def _provenance(event: JobFinished, engine: Engine) -> generation_pb2.Provenance:
    record = event.record
    return generation_pb2.Provenance(
        model_hash=engine.model.digest,
        dtype=engine.model.dtype_name,
        device=str(engine.model.device),
        exact=record.exact,
        begin_step=record.begin_step,
        truncations=[generation_pb2.Truncation(field=name, text=text) for name, text in record.truncations.items()],
        times=[generation_pb2.StageTime(stage=name, seconds=seconds) for name, seconds in record.seconds.items()],
        mean_group_requests=record.mean_group_requests,
        controlnets=[_use(use) for use in record.controlnets],
        loras=[_lora_use(lora) for lora in record.loras],
        encoder_s=record.encoder_s,
        pair=None if record.pair is None else _pair(record.pair),
        cached_starts=[_start(start) for start in record.cached_starts],
    )


def _lora_use(lora: LoraRecord) -> generation_pb2.LoraUse:
    return generation_pb2.LoraUse(
        name=lora.name,
        digest=lora.digest,
        scale=lora.scale,
        from_step=lora.from_step,
        load_s=lora.load_s,
        wait_s=lora.wait_s,
        patch_s=lora.patch_s,
        similarities=lora.similarities,
    )


def _start(start: CachedStart) -> generation_pb2.CacheUse:
    return generation_pb2.CacheUse(
        entry=format_start(start.entry, start.step),
        similarity=start.similarity,
        from_step=start.from_step,
        image=start.image,
    )


def _pair(pair: PairRecord) -> generation_pb2.PairUse:
    return generation_pb2.PairUse(
        worker=pair.worker, steps=pair.steps, taken_back_steps=pair.taken_back_steps, waited_s=pair.waited_s
    )


def _use(use: ControlUse) -> generation_pb2.ControlNetUse:
    pb = generation_pb2
    return pb.ControlNetUse(
        name=use.name,
        stale_steps=use.stale_steps,
        image_digest=use.image_digest,
        begin_step=use.begin_step,
        end_step=use.end_step,
        waited_s=use.waited_s,
        servers=use.servers,
        mode=pb.RESIDUAL_MODE_PIPELINED if use.pipelined else pb.RESIDUAL_MODE_SYNCHRONOUS,
        scale=use.scale,
        digest=use.digest,
        similarity=use.similarity,
    )


def _tensor(message: tensor_pb2.Tensor) -> Tensor:
    return torch.frombuffer(bytearray(message.data), dtype=torch.uint8).reshape(tuple(message.shape))


def _pixels(pixels: Tensor) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(
        data_type=tensor_pb2.DATA_TYPE_UINT8, shape=tuple(pixels.shape), data=pixels.numpy().tobytes()
    )
