"""Converts between the engine's tensors and messages of an approximate cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bottega.addons.cache.engine import JobRecording, LatentQuestion, LatentReply
from bottega.addons.cache.engine.recorder import latents_in_order
from bottega.addons.cache.wire import messages
from bottega.device_links.tensor_messages import DTYPES, tensor_at
from bottega.engine.spec import ResolvedSpec
from bottega.model.samplers import KARRAS
from bottega.store_times import check_times
from bottega.transport import Layout
from bottega.v1 import generation_pb2
from bottega.v1.cache_pb2 import CacheAnswer, CacheRecording

_HEADER_SPECS = 2


def question_of(number: int, question: LatentQuestion) -> messages.CacheMessage:
    """Return the message of a query."""
    return messages.question_message(number, question.header, _bytes(question.embedding))


def answer_of(layout: Layout, views: Sequence[memoryview]) -> tuple[int, LatentReply]:
    """Return the number of the query, and a copy of the response. Raise ValueError if the message breaks a rule."""
    number, header = messages.read_header(layout, views, CacheAnswer)
    check_times(header.times)
    messages.check_latents(layout, _HEADER_SPECS, len(header.hits))
    latents = [tensor_at(layout, views, index).clone() for index in range(_HEADER_SPECS, len(layout.specs))]
    return number, LatentReply(header=header, latents=tuple(latents))


def recording_of(recording: JobRecording, *, model_name: str) -> messages.CacheMessage:
    """Return the message of a recording.

    This waits for the device and scales down the image, so it must not be called in the engine's thread.
    """
    latents = latents_in_order(recording)
    picture = recording.small_picture()
    height, width, _ = picture.shape
    return messages.recording_message(
        CacheRecording(
            key=recording.key,
            model_hash=recording.model_hash,
            parameters=parameters_of(recording.spec, model_name=model_name),
            steps=[step for step, _ in latents],
        ),
        embedding=_bytes(recording.embedding),
        picture=(messages.picture_spec(height, width), _bytes(picture)),
        latents=[
            (messages.latent_spec(place, DTYPES[latent.dtype], tuple(latent.shape)), _bytes(latent))
            for place, (_, latent) in enumerate(latents)
        ],
    )


def parameters_of(spec: ResolvedSpec, *, model_name: str) -> generation_pb2.GenerationSpec:
    """Return the spec of an image for display, without input images."""
    pb = generation_pb2
    return pb.GenerationSpec(
        model=model_name,
        prompt=spec.prompt,
        negative_prompt=spec.negative_prompt,
        negative_prompt_2=spec.negative_prompt_2,
        num_inference_steps=spec.num_inference_steps,
        guidance_scale=spec.guidance_scale,
        guidance_rescale=spec.guidance_rescale,
        width=spec.width,
        height=spec.height,
        seed=spec.seed,
        num_images=spec.num_images,
        sampler=pb.Sampler.Value(f"SAMPLER_{spec.sampler.name}"),
        use_karras_sigmas=spec.use_karras_sigmas if spec.sampler in KARRAS else None,
        loras=[pb.Lora(name=lora.name, digest=lora.digest, scale=lora.scale) for lora in spec.loras],
        controlnets=[
            pb.ControlNet(
                name=control.name,
                controlnet_conditioning_scale=control.controlnet_conditioning_scale,
                control_guidance_start=control.control_guidance_start,
                control_guidance_end=control.control_guidance_end,
                guess_mode=control.guess_mode,
            )
            for control in spec.controlnets
        ],
    )


def _bytes(tensor: Tensor) -> memoryview:
    data: memoryview = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return data
