"""The record of how a request was drawn: the parameters, and the models, services and techniques that were used.

Fields are named as in generation.proto. Fields that only newer gateways send are ignored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from google.protobuf.message import Message

from bottega.client.types.inputs import ControlNet, Lora, controlnet_from, lora_from
from bottega.client.types.messages import field_of, value_from
from bottega.client.types.options import (
    FIDELITIES,
    PROMPT_SYNTAXES,
    SAMPLERS,
    FidelityName,
    GenerationOptions,
    PromptSyntaxName,
)
from bottega.client.types.picture import FORMATS, Format
from bottega.rules import LAST_SIGMAS, SPACINGS, FinalSigmasTypeName, SamplerName, TimestepSpacingName
from bottega.v1 import generation_pb2
from bottega.v1.generation_pb2 import GenerationSpec

ResidualMode = Literal["synchronous", "pipelined"]

_NAMES: Mapping[str, Mapping[int, str]] = {
    argument: {number: name for name, number in numbers.items()}
    for argument, numbers in (
        ("sampler", SAMPLERS),
        ("fidelity", FIDELITIES),
        ("format", FORMATS),
        ("prompt_syntax", PROMPT_SYNTAXES),
        ("timestep_spacing", SPACINGS),
        ("final_sigmas_type", LAST_SIGMAS),
    )
}
_MODES: Mapping[int, ResidualMode] = {
    generation_pb2.RESIDUAL_MODE_SYNCHRONOUS: "synchronous",
    generation_pb2.RESIDUAL_MODE_PIPELINED: "pipelined",
}
# Fields of Parameters that are not keyword arguments of client.generate().
_NO_OPTIONS = frozenset({"prompt", "prompts", "num_images"})
# False means the same as None for these.
_PLAIN_SWITCHES = frozenset({"mask_alpha", "keep_for_editing"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The complete parameters of a picture, with defaults and seed, and without input images.

    GenerationOptions documents the fields. `client.generate(parameters.prompt, **parameters.options())` draws the same
    picture again, with its input images given again.
    """

    prompt: str = ""
    prompts: tuple[str, ...] = ()
    """The prompt of each picture if they differ; else empty."""
    num_images: int = 1
    model: str = ""
    prompt_2: str | None = None
    negative_prompt: str | None = None
    negative_prompt_2: str | None = None
    prompt_syntax: PromptSyntaxName | None = None
    clip_skip: int | None = None
    max_sequence_length: int | None = None
    num_inference_steps: int = 0
    guidance_scale: float = 0.0
    guidance_rescale: float = 0.0
    true_cfg_scale: float | None = None
    cfg_normalization: float | None = None
    cfg_truncation: float | None = None
    width: int = 0
    height: int = 0
    seed: int = 0
    sampler: SamplerName | None = None
    use_karras_sigmas: bool | None = None
    use_exponential_sigmas: bool | None = None
    use_beta_sigmas: bool | None = None
    timestep_spacing: TimestepSpacingName | None = None
    final_sigmas_type: FinalSigmasTypeName | None = None
    timesteps: tuple[int, ...] = ()
    sigmas: tuple[float, ...] = ()
    strength: float | None = None
    mask_alpha: bool = False
    padding_mask_crop: int | None = None
    keep_unmasked: bool | None = None
    mask_feather: int | None = None
    keep_for_editing: bool = False
    controlnets: tuple[ControlNet, ...] = ()
    lora: tuple[Lora, ...] = ()
    bounded_lora_loading: bool | None = None
    stale_residuals: bool | None = None
    latent_parallelism: bool | None = None
    shared_turns: bool | None = None
    step_caching: bool | None = None
    masked_blocks: bool | None = None
    approximate_cache: bool | None = None
    cache_entry: str | None = None
    recording: str | None = None
    identical_results: bool | None = None
    format: Format | None = None
    quality: int = 0
    metadata: bool | None = None
    fidelity: FidelityName | None = None

    def options(self) -> GenerationOptions:
        """Return the keyword arguments that draw the same pictures, except for prompt and number of pictures."""
        options: dict[str, object] = {}
        for known in dataclasses.fields(self):
            value = getattr(self, known.name)
            empty = value is None or value == () or (value is False and known.name in _PLAIN_SWITCHES)
            if known.name not in _NO_OPTIONS and not empty:
                options[known.name] = value
        return cast("GenerationOptions", options)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """The seconds that one stage of a request took, summed over its pictures."""

    stage: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """A prompt that was cut, because it was too long for its tokenizer."""

    field: str = ""
    """Name of the prompt's field."""
    text: str = ""
    """The part of the text that was ignored."""
    encoders: tuple[str, ...] = ()
    """Text encoders that ignored it, such as `text_encoder_2`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraUse:
    """A LoRA or a textual inversion embedding as it was used."""

    name: str = ""
    digest: str = ""
    """SHA-256 of the LoRA in canonical form, hex."""
    scale: float = 0.0
    from_step: int = 0
    """First denoising step that used the LoRA; the request's first step is exact."""
    load_s: float = 0.0
    """Seconds until the LoRA's weights were at the worker."""
    wait_s: float = 0.0
    """Seconds that the request had to wait for its LoRAs."""
    patch_s: float = 0.0
    """Seconds to merge the LoRAs of the request into the weights."""
    similarities: tuple[float, ...] = ()
    """Lowest cosine between latents with and without the LoRAs, after each step; empty if it was not measured."""
    mixed_alphas: bool = False
    """Whether the modules of the LoRA have different alphas; stock Diffusers then uses the most frequent one for
    all."""
    stock_may_leave_out: tuple[str, ...] = ()
    """Modules of the LoRA that stock Diffusers' loader ignores."""
    rounded_otherwise: bool = False
    """Whether the LoRA was merged into half precision weights, which rounds differently from stock Diffusers."""
    token: str = ""
    """Token of a textual inversion embedding, which is in the prompts from the first step on; empty for a LoRA."""
    ignored_layers: int = 0
    """Number of layers of the LoRA's file that match nothing in the model and are ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlNetUse:
    """A ControlNet as it was used."""

    name: str = ""
    stale_steps: int = 0
    """Number of steps that used residuals of the step before."""
    image_digest: str = ""
    """SHA-256 of the control image, hex."""
    begin_step: int = 0
    """First step in which the ControlNet was active."""
    end_step: int = 0
    """Step after the last one in which the ControlNet was active."""
    waited_s: float = 0.0
    """Seconds that the model's forward passes waited for residuals of the ControlNet."""
    servers: tuple[str, ...] = ()
    """Names of the servers that ran the ControlNet, in order; the worker's own name if the worker ran it."""
    mode: ResidualMode | None = field(default=None, metadata={"convert": _MODES.get})
    """How residuals were applied; "synchronous" is exact."""
    scale: float = 0.0
    digest: str = ""
    """Hash of the ControlNet's weights and configuration, hex."""
    similarity: float | None = None
    """Mean cosine between the residuals of adjacent steps; None if it was not measured."""
    transparency_unread: bool = False
    """Whether the control image has transparent pixels, which were used as if they were opaque."""
    scaled_from_16_bits: bool = False
    """Whether the control image is grey with 16 bits, which were scaled to 8."""
    control_mode: int | None = None
    """Number of the mode of the control image, if the ControlNet is a union."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairUse:
    """A second worker that computed a part of a request's forward passes."""

    worker: str = ""
    """Name of the second worker; empty if there was none."""
    steps: int = 0
    """Steps in which the second worker computed some of the batch rows, summed over all pictures."""
    taken_back_steps: int = 0
    """Steps whose rows the second worker did not return, so that the first worker computed them."""
    waited_s: float = 0.0
    """Seconds that the first worker waited for the second one's rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """A cached latent from which a picture started."""

    entry: str = ""
    """ID of the latent, "ENTRY@STEP", as the argument cache_entry takes it."""
    similarity: float = 0.0
    """Cosine between the embeddings of the picture's prompt and the latent's prompt."""
    from_step: int = 0
    """First step of the picture that was computed."""
    image: int = 0
    """Index of the picture in the request, from 0."""
    without_loras: bool = False
    """Whether the latent was drawn without the LoRAs of the request."""
    skipped_steps: int = 0
    """Number of steps that were skipped; 0 if that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskUse:
    """The mask of an edit as it was used."""

    digest: str = ""
    """SHA-256 of the mask as it was sent, hex; empty if there was no mask."""
    width: int = 0
    height: int = 0
    resized: bool = False
    """Whether the mask was resized to the size at which the picture was drawn."""
    converted: bool = False
    """Whether the mask had several channels, and was converted to grey."""
    share: float = 0.0
    """Share of the pixels that the mask redraws."""
    crop_x: int = 0
    crop_y: int = 0
    crop_width: int = 0
    """Width of the part that was drawn, with padding_mask_crop; 0 without it."""
    crop_height: int = 0
    computed_share: float = 0.0
    """Largest share of the tokens that was computed in a block; 0 if all tokens were computed in all blocks."""
    recording: str = ""
    """ID of the recorded activations that the edit used; empty if it used none."""
    computed_all_because: str = ""
    """Why all tokens were computed although masked_blocks allowed otherwise; empty if they were not."""
    recorded: bool = False
    """Whether this edit has recorded activations for later edits."""
    dilated_share: float = 0.0
    """Share of the tokens under the mask with its margin; 0 if masked_blocks did not allow to reuse others."""
    kept_latents: bool = False
    """Whether latents outside the mask were restored from those that keep_for_editing stored."""
    transparency_unread: bool = False
    """Whether the mask has transparent pixels that were ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceUse:
    """The input image of image-to-image or of an edit, and how it was used."""

    width: int = 0
    """Width of the image in pixels, after the rotation in its EXIF data; 0 if there was no image."""
    height: int = 0
    resized: bool = False
    """Whether the image was resized to the size at which the picture was drawn."""
    transparency_unread: bool = False
    """Whether the image has transparent pixels, whose transparency was ignored."""
    scaled_from_16_bits: bool = False
    """Whether the image is grey with 16 bits, which were scaled to 8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """A record of how a request was really drawn, which comes with the pictures."""

    parameters: Parameters = field(default_factory=Parameters, metadata={"convert": lambda spec: parameters_from(spec)})
    """The parameters that draw the same pictures again, including decisions that depended on timing.

    If some of several pictures started from cached latents, each is drawn again alone, with its own seed and its entry
    of `cached_starts`."""
    image_digest: str = ""
    """SHA-256 of the input image, hex; empty if there was none."""
    model_hash: str = ""
    """Hash of the model's weights and configuration, hex."""
    dtype: str = ""
    """Element type that the model computed in."""
    device: str = ""
    worker: str = ""
    """Name of the worker that finished the request."""
    bottega_version: str = ""
    exact: bool = False
    """Whether no approximate technique was used, and all rounding was that of stock Diffusers."""
    attempts: int = 0
    """Number of attempts at the request; 0 if a stored result was returned."""
    repeated_steps: int = 0
    """Number of steps that were repeated after a worker was lost."""
    truncations: tuple[Truncation, ...] = field(default=(), metadata={"kind": Truncation})
    """Prompts that were too long, with the text that was ignored."""
    loras: tuple[LoraUse, ...] = field(default=(), metadata={"kind": LoraUse})
    controlnets: tuple[ControlNetUse, ...] = field(default=(), metadata={"kind": ControlNetUse})
    blocks_reused: int = 0
    """Transformer blocks, counted in every forward pass, that were reused, or computed only for masked tokens."""
    blocks_total: int = 0
    """Transformer blocks, counted in every forward pass, that could have been."""
    begin_step: int = 0
    """First denoising step that was computed."""
    times: tuple[StageTime, ...] = field(default=(), metadata={"kind": StageTime})
    mean_group_requests: float = 0.0
    """Mean number of requests in the batches that computed this request's steps."""
    encoder_s: float = 0.0
    """Seconds of computation before the first ControlNet residual was needed, summed over the steps with
    ControlNets."""
    pair: PairUse = field(default_factory=PairUse, metadata={"kind": PairUse})
    """The second worker that computed a part of the request; `PairUse()` if there was none."""
    cached_starts: tuple[CacheUse, ...] = field(default=(), metadata={"kind": CacheUse})
    """Cached latents from which pictures started; the other pictures started from noise."""
    identical_job: str = ""
    """ID of the job whose stored result was returned; empty if the request was drawn."""
    mask: MaskUse = field(default_factory=MaskUse, metadata={"kind": MaskUse})
    """The mask of an edit; `MaskUse()` if there was none."""
    accelerations: tuple[str, ...] = ()
    """Accelerations that the worker used."""
    source: SourceUse = field(default_factory=SourceUse, metadata={"kind": SourceUse})
    """The source of image-to-image or of an edit; `SourceUse()` if there was none."""
    vae_dtype: str = ""
    """Element type in which the VAE decoded."""
    vae_tiled: bool = False
    """Whether the VAE decoded a picture in tiles."""
    device_s: float = 0.0
    """Seconds of the worker's device that the last attempt used; the scheduler charges them to the tenant."""
    shared_in_half_precision: bool = False
    """Whether the pictures are inexact only because steps in half precision were computed in batches with other
    pictures, or in parts."""
    plain_s: float = 0.0
    """Seconds that the denoising steps take alone and without ControlNets and LoRAs, by the worker's measurements."""
    controlnets_s: float = 0.0
    """Part of `device_s` in which steps waited for ControlNets."""
    loras_s: float = 0.0
    """Seconds that LoRAs added to steps."""


def provenance_from(message: generation_pb2.Provenance) -> Provenance:
    """Convert a message to a Provenance."""
    return value_from(message, Provenance)


def parameters_from(spec: GenerationSpec) -> Parameters:
    """Convert a spec to Parameters. A sampler, fidelity or format that this version does not know is None."""
    values: dict[str, Any] = {}
    for known in dataclasses.fields(Parameters):
        if known.name in ("controlnets", "lora"):
            continue
        message: Message = spec if known.name in spec.DESCRIPTOR.fields_by_name else spec.techniques
        value = field_of(message, known.name)
        if value is not None:
            values[known.name] = _NAMES[known.name].get(value) if known.name in _NAMES else value
    return Parameters(
        controlnets=tuple(map(controlnet_from, spec.controlnets)), lora=tuple(map(lora_from, spec.loras)), **values
    )
