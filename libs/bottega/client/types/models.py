"""What a gateway serves, as the SDK describes it: models, their samplers, and the adapters that requests may name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from bottega.client.types.messages import describe
from bottega.client.types.options import SAMPLERS, SamplerName
from bottega.errors import Violation
from bottega.rules import refuse
from bottega.v1 import image_pb2

AdapterKindName = Literal["controlnet", "lora"]

_SAMPLER_NAMES = {number: name for name, number in SAMPLERS.items()}
_KINDS: dict[AdapterKindName, image_pb2.AdapterKind.ValueType] = {
    "controlnet": image_pb2.ADAPTER_KIND_CONTROLNET,
    "lora": image_pb2.ADAPTER_KIND_LORA,
}
_KIND_NAMES = {number: name for name, number in _KINDS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSampler:
    """A sampler with or without Karras' sigmas, as a model has it."""

    sampler: SamplerName
    use_karras_sigmas: bool
    is_default: bool
    """Whether a request with this sampler that says nothing of Karras' sigmas is drawn with this choice."""
    refused_because: str
    """Why the model's scheduler configuration rules it out; empty where it draws."""
    refused_steps: Mapping[int, str]
    """Numbers of steps that it cannot make, each with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that is served."""

    name: str
    """Name to ask for."""
    model_hash: str
    """Hash of its weights and configuration, hex."""
    dtype: str
    """Element type that it computes in."""
    workers: int
    """Workers that serve it now."""
    default_width: int
    """Width in pixels when none is asked for."""
    default_height: int
    """Height in pixels when none is asked for."""
    size_multiple: int
    """Width and height must be multiples of this."""
    max_pixels: int
    """Most pixels of one picture (width x height)."""
    default_steps: int
    """Denoising steps when none are asked for."""
    default_guidance_scale: float
    """Guidance scale when none is asked for."""
    default_edit_guidance_scale: float | None
    """Guidance scale of an edit without ControlNets when none is asked for; None is default_guidance_scale."""
    default_sampler: SamplerName | None
    """Sampler when none is asked for; None is one that this version does not know."""
    sampler_choices: tuple[ServedSampler, ...]
    """Every sampler that this version knows, with and without Karras' sigmas; empty is not known."""
    vae_scale_factor: int
    """Pixels that one element of the latent stands for, along each side."""
    base: str
    """What its ControlNets must have been made for; empty is not known, and fits all."""
    edits_refused_because: str
    """Why edits with a mask are refused; empty where they are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A ControlNet or a LoRA that a request may name."""

    kind: AdapterKindName
    name: str
    """Name to ask for."""
    digest: str
    """Hash of its weights, hex."""
    models: tuple[str, ...]
    """Names of the models that are served now which it can be used with; empty where it fits none."""
    trigger_words: tuple[str, ...] = ()
    """Words that call the style of a LoRA in a prompt."""


def model_from(model: image_pb2.Model) -> ServedModel:
    """Return the model that the wire describes."""
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
    )


def adapter_from(adapter: image_pb2.Adapter) -> Adapter | None:
    """Return the adapter that the wire describes; None for a kind that this version does not know."""
    if adapter.kind not in _KIND_NAMES:
        return None
    return Adapter(
        kind=_KIND_NAMES[adapter.kind],
        name=adapter.name,
        digest=adapter.digest,
        models=tuple(adapter.models),
        trigger_words=tuple(adapter.trigger_words),
    )


def adapter_kind_to_wire(kind: AdapterKindName | None) -> image_pb2.AdapterKind.ValueType:
    """Return the contract's number of a kind; None is all kinds. Raise InvalidRequest where it is none."""
    if kind is None:
        return image_pb2.ADAPTER_KIND_UNSPECIFIED
    if kind not in _KINDS:
        refuse([Violation(field="kind", description=f"must be of {', '.join(_KINDS)}; got {describe(kind)}")])
    return _KINDS[kind]
