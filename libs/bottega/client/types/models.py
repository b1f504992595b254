"""Models, samplers and adapters that a gateway serves, as the SDK describes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from bottega.client.types.messages import describe
from bottega.client.types.options import SAMPLERS
from bottega.errors import Violation
from bottega.rules import SamplerName, refuse
from bottega.v1 import image_pb2

AdapterKindName = Literal["controlnet", "lora"]

EMBEDDED_MODEL = "miniature"
"""Default name of the embedded model. It is also in bottega.model_files, whose import takes 0.3 s."""

_SAMPLER_NAMES = {number: name for name, number in SAMPLERS.items()}
_KINDS: dict[AdapterKindName, image_pb2.AdapterKind.ValueType] = {
    "controlnet": image_pb2.ADAPTER_KIND_CONTROLNET,
    "lora": image_pb2.ADAPTER_KIND_LORA,
}
_KIND_NAMES = {number: name for name, number in _KINDS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSampler:
    """A sampler of a model, either with or without Karras sigmas."""

    sampler: SamplerName
    use_karras_sigmas: bool
    is_default: bool
    """Whether requests that name this sampler and do not set use_karras_sigmas use this variant."""
    refused_because: str
    """Why the model's scheduler configuration rules out this variant; empty if it can be used."""
    refused_steps: Mapping[int, str]
    """Numbers of inference steps that this variant does not support, each with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that is served."""

    name: str
    """Name of the model in requests."""
    model_hash: str
    """Hash of the model's weights and configuration, hex."""
    dtype: str
    """Element type that the model computes in."""
    workers: int
    """Number of workers that serve the model now."""
    default_width: int
    """Default width in pixels."""
    default_height: int
    """Default height in pixels."""
    size_multiple: int
    """Width and height must be multiples of this."""
    max_pixels: int
    """Maximum of width x height of one picture."""
    default_steps: int
    """Default number of denoising steps."""
    default_guidance_scale: float
    """Default guidance scale."""
    default_edit_guidance_scale: float | None
    """Default guidance scale of an edit without ControlNets; None if it is default_guidance_scale."""
    default_strength: float | None
    """Default strength of image-to-image without ControlNets; None if it is not known."""
    default_edit_strength: float | None
    """Default strength of an edit; None if it is not known."""
    default_edit_controlnet_scale: float
    """Default scale of the ControlNets of an edit."""
    default_sampler: SamplerName | None
    """Default sampler; None if this version of the SDK does not know the sampler."""
    sampler_choices: tuple[ServedSampler, ...]
    """Every sampler that this version of the SDK knows, with and without Karras sigmas; empty if the gateway lists
    none."""
    vae_scale_factor: int
    """Side length in pixels of one element of the latent."""
    base: str
    """Base model that ControlNets must be made for to fit; empty if that is not known, and every ControlNet fits."""
    edits_refused_because: str
    """Why the model refuses edits with a mask; empty if it supports them."""
    edits_only: bool
    """Whether the model draws only edits with a mask."""
    one_text_encoder: bool
    """Whether the model has one text encoder, so that it refuses prompt_2 and negative_prompt_2."""
    max_clip_skip: int | None
    """The largest clip_skip; None if it is not known."""
    strength_keeps_steps: bool
    """Whether image-to-image makes all steps, from a noise level that the strength sets, instead of the last ones."""
    max_side: int
    """Largest width and height in pixels; 0 if only max_pixels limits them."""
    plain_prompts_only: bool
    """Whether the model refuses weighted prompts."""
    embeds_guidance: bool
    """Whether guidance_scale is an input of the network, or ignored by it, and costs no second row."""
    takes_true_cfg: bool
    """Whether the model takes a true_cfg_scale above 1."""
    max_sequence_length: int
    """The largest max_sequence_length; 0 if the model refuses the argument."""
    guidance_from_zero: bool
    """Whether guidance is off at a guidance_scale of 0, not of 1. Only such models take cfg_normalization and
    cfg_truncation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A ControlNet or a LoRA that a request may name."""

    kind: AdapterKindName
    name: str
    """Name of the adapter in requests."""
    digest: str
    """Hash of the adapter's weights, hex."""
    models: tuple[str, ...]
    """Names of the served models that the adapter can be used with."""
    trigger_words: tuple[str, ...] = ()
    """Words that invoke a LoRA's style when they are in the prompt; empty for ControlNets."""
    control_modes: int = 0
    """Number of control modes of a ControlNet, which are numbered from 0; 0 if it is not a union."""


def model_from(model: image_pb2.Model) -> ServedModel:
    """Convert a message to a ServedModel."""
    edit = model.default_edit_guidance_scale if model.HasField("default_edit_guidance_scale") else None
    return ServedModel(
        name=model.name,
        model_hash=model.model_hash,
        dtype=model.dtype,
        workers=model.workers,
        default_width=model.default_width,
        default_height=model.default_height,
        size_multiple=model.size_multiple,
        max_pixels=model.max_pixels,
        default_steps=model.default_steps,
        default_guidance_scale=model.default_guidance_scale,
        default_edit_guidance_scale=edit,
        default_strength=model.default_strength if model.HasField("default_strength") else None,
        default_edit_strength=model.default_edit_strength if model.HasField("default_edit_strength") else None,
        default_edit_controlnet_scale=(
            model.default_edit_controlnet_scale if model.HasField("default_edit_controlnet_scale") else 1.0
        ),
        default_sampler=_SAMPLER_NAMES.get(model.default_sampler),
        sampler_choices=tuple(
            ServedSampler(
                sampler=_SAMPLER_NAMES[choice.sampler],
                use_karras_sigmas=choice.use_karras_sigmas,
                is_default=choice.is_default,
                refused_because=choice.refused_because,
                refused_steps=MappingProxyType(dict(choice.refused_steps)),
            )
            for choice in model.sampler_choices
            if choice.sampler in _SAMPLER_NAMES
        ),
        vae_scale_factor=model.vae_scale_factor,
        base=model.base,
        edits_refused_because=model.edits_refused_because,
        edits_only=model.edits_only,
        one_text_encoder=model.one_text_encoder,
        max_clip_skip=model.max_clip_skip if model.HasField("max_clip_skip") else None,
        strength_keeps_steps=model.strength_keeps_steps,
        max_side=model.max_side,
        plain_prompts_only=model.plain_prompts_only,
        embeds_guidance=model.embeds_guidance,
        takes_true_cfg=model.takes_true_cfg,
        max_sequence_length=model.max_sequence_length,
        guidance_from_zero=model.guidance_from_zero,
    )


def adapter_from(adapter: image_pb2.Adapter) -> Adapter | None:
    """Convert a message to an Adapter; None if this version of the SDK does not know its kind."""
    if adapter.kind not in _KIND_NAMES:
        return None
    return Adapter(
        kind=_KIND_NAMES[adapter.kind],
        name=adapter.name,
        digest=adapter.digest,
        models=tuple(adapter.models),
        trigger_words=tuple(adapter.trigger_words),
        control_modes=adapter.control_modes,
    )


def adapter_kind_to_wire(kind: AdapterKindName | None) -> image_pb2.AdapterKind.ValueType:
    """Convert a kind to the message's enum value; None means all kinds. Raise InvalidRequest for any other value."""
    if kind is None:
        return image_pb2.ADAPTER_KIND_UNSPECIFIED
    if kind not in _KINDS:
        refuse([Violation(field="kind", description=f"must be of {', '.join(_KINDS)}; got {describe(kind)}")])
    return _KINDS[kind]
