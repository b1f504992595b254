"""The record of how a request was drawn: the parameters that were used, and the models, services and techniques.

Fields have the names of the contract's messages (generation.proto). Unknown fields of a newer gateway are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from google.protobuf.message import Message

from bottega.client.types.inputs import ControlNet, Lora, controlnet_from, lora_from
from bottega.client.types.messages import field_of, value_from
from bottega.client.types.options import FIDELITIES, SAMPLERS, FidelityName, GenerationOptions, SamplerName
from bottega.client.types.picture import FORMATS, Format
from bottega.v1 import generation_pb2
from bottega.v1.generation_pb2 import GenerationSpec

ResidualMode = Literal["synchronous", "pipelined"]

_NAMES: Mapping[str, Mapping[int, str]] = {
    argument: {number: name for name, number in numbers.items()}
    for argument, numbers in (("sampler", SAMPLERS), ("fidelity", FIDELITIES), ("format", FORMATS))
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
    """The prompt of each picture, if there are several; else empty."""
    num_images: int = 1
    model: str = ""
    prompt_2: str | None = None
    negative_prompt: str | None = None
    negative_prompt_2: str | None = None
    num_inference_steps: int = 0
    guidance_scale: float = 0.0
    guidance_rescale: float = 0.0
    width: int = 0
    height: int = 0
    seed: int = 0
    sampler: SamplerName | None = None
    use_karras_sigmas: bool | None = None
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
    masked_blocks: bool | None = None
    approximate_cache: bool | None = None
    cache_entry: str | None = None
    recording: str | None = None
    identical_results: bool | None = None
    format: Format | None = None
    quality: int = 0
    fidelity: FidelityName | None = None

    def options(self) -> GenerationOptions:
        """Return the keyword arguments that draw the same again, except for the prompt and the number of pictures."""
        options: dict[str, object] = {}
        for known in dataclasses.fields(self):
            value = getattr(self, known.name)
            empty = value is None or value == () or (value is False and known.name in _PLAIN_SWITCHES)
            if known.name not in _NO_OPTIONS and not empty:
                options[known.name] = value
        return cast("GenerationOptions", options)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """The seconds of one stage of a request, summed over its pictures."""

    stage: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """A prompt that was cut, because it was too long for its tokenizer."""

    field: str = ""
    """The field that was cut."""
    text: str = ""
    """The part of the text that was ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraUse:
    """A LoRA as it was used."""

    name: str = ""
    digest: str = ""
    """Hash of its canonical form, hex."""
    scale: float = 0.0
    from_step: int = 0
    """Denoising step from which it was used; the request's first step is exact."""
    load_s: float = 0.0
    """Seconds until its weights were at the worker."""
    wait_s: float = 0.0
    """Seconds that the request had to wait for its LoRAs."""
    patch_s: float = 0.0
    """Seconds for merging the LoRAs of the request into the weights."""
    similarities: tuple[float, ...] = ()
    """Least cosine of the latents with and without LoRAs after each step, if it was measured."""
    mixed_alphas: bool = False
    """Whether its modules have different alphas; stock Diffusers uses the most frequent one for all."""
    stock_may_leave_out: tuple[str, ...] = ()
    """Parts of it that stock Diffusers' loader leaves out."""
    rounded_otherwise: bool = False
    """Whether it was merged into half precision weights, which rounds differently from stock Diffusers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlNetUse:
    """A ControlNet as it was used."""

    name: str = ""
    stale_steps: int = 0
    """Steps that used residuals one step old."""
    image_digest: str = ""
    """SHA-256 of its control image, hex."""
    begin_step: int = 0
    """First step in which it was active."""
    end_step: int = 0
    """The step after the last one in which it was active."""
    waited_s: float = 0.0
    """Seconds that forwards waited for it."""
    servers: tuple[str, ...] = ()
    """Names of the servers that ran it, in order; the worker's own name if it ran there."""
    mode: ResidualMode | None = field(default=None, metadata={"convert": _MODES.get})
    """How its residuals were applied; "synchronous" is exact."""
    scale: float = 0.0
    digest: str = ""
    """Hash of its weights and configuration, hex."""
    similarity: float | None = None
    """Mean cosine of its residuals between adjacent steps; None if it was not measured."""
    transparency_unread: bool = False
    """Whether its control image has transparent pixels, which were used as if they were opaque."""
    scaled_from_16_bits: bool = False
    """Whether its control image is grey with 16 bits, which were scaled to 8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairUse:
    """The second worker of a pair that drew a request."""

    worker: str = ""
    """Its name; empty if there was none."""
    steps: int = 0
    """Steps, over all pictures, whose rows it computed in part."""
    taken_back_steps: int = 0
    """Steps whose rows it received but did not return, so that the first worker computed them."""
    waited_s: float = 0.0
    """Seconds that the first worker waited for those rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """A latent of the approximate cache from which a picture started."""

    entry: str = ""
    """The latent, "ENTRY@STEP", as the argument cache_entry takes it."""
    similarity: float = 0.0
    """Cosine of the two prompts' embeddings."""
    from_step: int = 0
    """The first step that was computed."""
    image: int = 0
    """Index of the picture in the request, from 0."""
    without_loras: bool = False
    """Whether the latent was drawn without the request's LoRAs."""
    skipped_steps: int = 0
    """Steps that it saved; 0 if that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskUse:
    """The mask of an edit as it was used."""

    digest: str = ""
    """SHA-256 of the mask as it was sent, hex; empty if there was no mask."""
    width: int = 0
    height: int = 0
    resized: bool = False
    """Whether it was resized to the size at which the picture was drawn."""
    converted: bool = False
    """Whether it had several channels, and was converted to grey."""
    share: float = 0.0
    """The share of the pixels that it redraws."""
    crop_x: int = 0
    crop_y: int = 0
    crop_width: int = 0
    """With padding_mask_crop, width of the part that was drawn; 0 without."""
    crop_height: int = 0
    computed_share: float = 0.0
    """The largest share of the tokens that masked blocks computed; 0 if everything was computed."""
    recording: str = ""
    """The recording that the edit used; empty if it used none."""
    computed_all_because: str = ""
    """Why everything was computed although masked blocks were allowed."""
    recorded: bool = False
    """Whether this edit has recorded activations for later edits."""
    dilated_share: float = 0.0
    """The share of the tokens under the mask and its margin, if masked blocks were allowed."""
    kept_latents: bool = False
    """Whether the latents that keep_for_editing kept were restored outside the mask."""
    transparency_unread: bool = False
    """Whether it has transparent pixels that were ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceUse:
    """The source of image-to-image or of an edit as it was used."""

    width: int = 0
    """Its own width in pixels, rotated as its EXIF says; 0 if there was no source."""
    height: int = 0
    resized: bool = False
    """Whether it was resized to the size at which the picture was drawn."""
    transparency_unread: bool = False
    """Whether it has transparent pixels, whose transparency was ignored."""
    scaled_from_16_bits: bool = False
    """Whether it is grey with 16 bits, which were scaled to 8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """A record of how a request was really drawn. It travels with the pictures."""

    parameters: Parameters = field(default_factory=Parameters, metadata={"convert": lambda spec: parameters_from(spec)})
    """The parameters, including decisions that depended on timing, so that they draw the same again.

    If some of several pictures started from cached latents, each is drawn again alone, with its own seed and its entry
    of `cached_starts`.
    """
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
    """Whether no approximate technique was used, and nothing was rounded otherwise than in stock Diffusers."""
    attempts: int = 0
    """Number of attempts; 0 if a stored result was returned."""
    repeated_steps: int = 0
    """Steps that were repeated after a worker was lost."""
    truncations: tuple[Truncation, ...] = field(default=(), metadata={"kind": Truncation})
    """Prompts that were cut."""
    loras: tuple[LoraUse, ...] = field(default=(), metadata={"kind": LoraUse})
    controlnets: tuple[ControlNetUse, ...] = field(default=(), metadata={"kind": ControlNetUse})
    blocks_reused: int = 0
    """Transformer blocks of an edit that were computed only for masked tokens."""
    blocks_total: int = 0
    """All transformer blocks that could have been reused."""
    begin_step: int = 0
    """First denoising step that was computed."""
    times: tuple[StageTime, ...] = field(default=(), metadata={"kind": StageTime})
    mean_group_requests: float = 0.0
    """Mean number of requests in the batches of this one's steps."""
    encoder_s: float = 0.0
    """Seconds of the steps with ControlNets before the first residual was needed."""
    pair: PairUse = field(default_factory=PairUse, metadata={"kind": PairUse})
    """The second worker of a pair; `PairUse()` if there was none."""
    cached_starts: tuple[CacheUse, ...] = field(default=(), metadata={"kind": CacheUse})
    """Cached latents from which pictures started; the other pictures started from noise."""
    identical_job: str = ""
    """The job whose stored result was returned; empty if the request was drawn."""
    mask: MaskUse = field(default_factory=MaskUse, metadata={"kind": MaskUse})
    """The mask of an edit; `MaskUse()` if there was none."""
    accelerations: tuple[str, ...] = ()
    """Accelerations that the worker used."""
    source: SourceUse = field(default_factory=SourceUse, metadata={"kind": SourceUse})
    """The source of image-to-image or of an edit; `SourceUse()` if there was none."""
    vae_dtype: str = ""
    """Element type that the VAE decoded in."""
    vae_tiled: bool = False
    """Whether the VAE decoded a picture in tiles."""
    device_s: float = 0.0
    """Seconds of the worker's device that the last attempt used, which count against its tenant's share."""
    shared_in_half_precision: bool = False
    """Whether the pictures are inexact only because steps in half precision were not computed alone, but beside other
    pictures or in parts.
    """


def provenance_from(message: generation_pb2.Provenance) -> Provenance:
    """Return the provenance that the wire describes."""
    return value_from(message, Provenance)


def parameters_from(spec: GenerationSpec) -> Parameters:
    """Return the parameters of a spec. A sampler, fidelity or format that this version does not know is None."""
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
