"""What really happened to a request, as typed values: its parameters as they were used, and what took part in it.

Fields have the names of the contract's messages (generation.proto). What a newer gateway says beside them is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

from google.protobuf.message import Message

from bottega.client.types.control import ControlNet, controlnet_from
from bottega.client.types.lora import Lora, lora_from
from bottega.client.types.options import FIDELITIES, SAMPLERS, FidelityName, GenerationOptions, SamplerName
from bottega.client.types.picture import FORMATS, Format
from bottega.v1 import generation_pb2
from bottega.v1.generation_pb2 import GenerationSpec

ValueT = TypeVar("ValueT")
ResidualMode = Literal["synchronous", "pipelined"]

_NAMES: Mapping[str, Mapping[int, str]] = {
    argument: {number: name for name, number in numbers.items()}
    for argument, numbers in (("sampler", SAMPLERS), ("fidelity", FIDELITIES), ("format", FORMATS))
}
_MODES: Mapping[int, ResidualMode] = {
    generation_pb2.RESIDUAL_MODE_SYNCHRONOUS: "synchronous",
    generation_pb2.RESIDUAL_MODE_PIPELINED: "pipelined",
}
# Fields of Parameters that are no keyword arguments of client.generate().
_NO_OPTIONS = frozenset({"prompt", "prompts", "num_images"})
# Of these, false says the same as nothing.
_PLAIN_SWITCHES = frozenset({"mask_alpha", "keep_for_editing"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The parameters of a picture, with all defaults and the seed filled in, and without input images.

    Fields are documented as keyword arguments, by GenerationOptions. `client.generate(parameters.prompt,
    **parameters.options())` draws the same again, with the input images given once more.
    """

    prompt: str = ""
    prompts: tuple[str, ...] = ()
    """Prompt of each picture, where there are several; else empty."""
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
    masked_blocks: bool | None = None
    approximate_cache: bool | None = None
    cache_entry: str | None = None
    recording: str | None = None
    identical_results: bool | None = None
    format: Format | None = None
    quality: int = 0
    fidelity: FidelityName | None = None

    def options(self) -> GenerationOptions:
        """Return the keyword arguments that draw the same again, without prompt and number of pictures."""
        said: dict[str, object] = {}
        for known in dataclasses.fields(self):
            value = getattr(self, known.name)
            empty = value is None or value == () or (value is False and known.name in _PLAIN_SWITCHES)
            if known.name not in _NO_OPTIONS and not empty:
                said[known.name] = value
        return cast("GenerationOptions", said)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """Seconds spent in one stage of a request, summed over its pictures."""

    stage: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """A prompt that was longer than its tokenizer takes."""

    field: str = ""
    """The field that was cut."""
    text: str = ""
    """The text that had no effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraUse:
    """A LoRA as it was used."""

    name: str = ""
    digest: str = ""
    """Hash of its canonical form, hex."""
    scale: float = 0.0
    from_step: int = 0
    """Denoising step at which it went in; the request's first step is exact."""
    load_s: float = 0.0
    """Seconds until its weights were at the worker."""
    wait_s: float = 0.0
    """Seconds that the request could not go on for want of its LoRAs."""
    patch_s: float = 0.0
    """Seconds of putting its LoRAs into weights."""
    similarities: tuple[float, ...] = ()
    """Where it was measured: after each step, the least cosine of the latents with and without LoRAs."""
    mixed_alphas: bool = False
    """Whether its modules have different alphas, of which stock Diffusers uses the most frequent one."""
    stock_may_leave_out: tuple[str, ...] = ()
    """What of it stock Diffusers' loader leaves out."""
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
    """Who ran it, in order; the worker's own name stands for the worker."""
    mode: ResidualMode | None = None
    """How its residuals came into the steps: "synchronous" is exact."""
    scale: float = 0.0
    digest: str = ""
    """Hash of its weights and configuration, hex."""
    similarity: float | None = None
    """Mean cosine of its residuals between adjacent steps, where it was measured."""
    transparency_unread: bool = False
    """Whether its control image has transparent pixels, which were taken as opaque."""
    scaled_from_16_bits: bool = False
    """Whether its control image is grey with 16 bits, which were scaled to 8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairUse:
    """The other worker of a pair, as it took part."""

    worker: str = ""
    """Its name; empty where none took part."""
    steps: int = 0
    """Steps, over all pictures, that had rows computed there."""
    taken_back_steps: int = 0
    """Steps whose rows were given there and had to be computed here."""
    waited_s: float = 0.0
    """Seconds that the drawing worker waited for those rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """A latent of the approximate cache as a picture started from it."""

    entry: str = ""
    """It, as the argument cache_entry takes it."""
    similarity: float = 0.0
    """Cosine of the two prompts' embeddings."""
    from_step: int = 0
    """The first step that the picture is made of."""
    image: int = 0
    """Which of the request's pictures, from 0."""
    without_loras: bool = False
    """Whether it was recorded without the request's LoRAs."""
    skipped_steps: int = 0
    """Steps that it saved; 0 is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskUse:
    """The mask of an edit as it was used."""

    digest: str = ""
    """SHA-256 of the mask as it was sent, hex; empty where there was no mask."""
    width: int = 0
    height: int = 0
    resized: bool = False
    """Whether it was resized to the size at which the picture was drawn."""
    converted: bool = False
    """Whether it had several channels, and was made grey first."""
    share: float = 0.0
    """The share of the pixels that it redraws."""
    crop_x: int = 0
    crop_y: int = 0
    crop_width: int = 0
    """With padding_mask_crop, width of the part that was drawn; 0 without."""
    crop_height: int = 0
    computed_share: float = 0.0
    """The largest share of the tokens that masked blocks have computed; 0 where all was computed."""
    recording: str = ""
    """What the edit took from others; empty where it took nothing."""
    computed_all_because: str = ""
    """Why all was computed though masked blocks were allowed."""
    recorded: bool = False
    """Whether this edit has recorded activations that later ones can use."""
    dilated_share: float = 0.0
    """The share of the tokens under the mask and the margin around it, where masked blocks were allowed."""
    kept_latents: bool = False
    """Whether the latents that keep_for_editing kept were put back outside the mask."""
    transparency_unread: bool = False
    """Whether it has transparent pixels that were not looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceUse:
    """The source of image-to-image or of an edit as it was used."""

    width: int = 0
    """Its own width in pixels, turned as its EXIF says; 0 where there was no source."""
    height: int = 0
    resized: bool = False
    """Whether it was resized to the size at which the picture was drawn."""
    transparency_unread: bool = False
    """Whether it has pixels that are not opaque and the result does not keep that."""
    scaled_from_16_bits: bool = False
    """Whether it is grey with 16 bits, which were scaled to 8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """A record of how a request was really drawn. It travels with the pictures."""

    parameters: Parameters = field(default_factory=Parameters)
    """What was drawn, with what timing decided, so that they draw the same again. Of several pictures of which some
    started from cached latents each is drawn again alone, by its own seed and its entry of `cached_starts`."""
    image_digest: str = ""
    """SHA-256 of the input image, hex; empty without one."""
    model_hash: str = ""
    """Hash of the model's weights and configuration, hex."""
    dtype: str = ""
    """Element type that the model computed in."""
    device: str = ""
    worker: str = ""
    """Name of the worker that finished the request."""
    bottega_version: str = ""
    exact: bool = False
    """Whether no approximate technique took part."""
    attempts: int = 0
    """Attempts it took; 0 where a stored result answered it."""
    repeated_steps: int = 0
    """Steps that were run again after a worker was lost."""
    truncations: tuple[Truncation, ...] = field(default=(), metadata={"kind": Truncation})
    """Prompts that were cut."""
    loras: tuple[LoraUse, ...] = field(default=(), metadata={"kind": LoraUse})
    controlnets: tuple[ControlNetUse, ...] = field(default=(), metadata={"kind": ControlNetUse})
    blocks_reused: int = 0
    """Transformer blocks of an edit that were computed for masked tokens alone."""
    blocks_total: int = 0
    """Transformer blocks in all, of which some could have been reused."""
    begin_step: int = 0
    """First denoising step that ran."""
    times: tuple[StageTime, ...] = field(default=(), metadata={"kind": StageTime})
    mean_group_requests: float = 0.0
    """Mean number of requests in the groups that this one's steps ran in."""
    encoder_s: float = 0.0
    """Seconds of the steps with ControlNets before the first residual was needed."""
    pair: PairUse = field(default_factory=PairUse, metadata={"kind": PairUse})
    """The other worker of a pair; `PairUse()` where none took part."""
    cached_starts: tuple[CacheUse, ...] = field(default=(), metadata={"kind": CacheUse})
    """Cached latents that pictures started from; the others started from noise."""
    identical_job: str = ""
    """The job whose stored result this is; empty where it was drawn."""
    mask: MaskUse = field(default_factory=MaskUse, metadata={"kind": MaskUse})
    """The mask of an edit; `MaskUse()` where there was none."""
    accelerations: tuple[str, ...] = ()
    """Accelerations that the worker's self-check had kept."""
    source: SourceUse = field(default_factory=SourceUse, metadata={"kind": SourceUse})
    """The source of image-to-image or of an edit; `SourceUse()` where there was none."""
    vae_dtype: str = ""
    """Element type that the VAE decoded in."""
    vae_tiled: bool = False
    """Whether the VAE decoded a picture in tiles."""
    device_s: float = 0.0
    """Seconds of the worker's device that the last attempt used, for which its tenant is charged."""


def provenance_from(message: generation_pb2.Provenance) -> Provenance:
    """Return the provenance that the wire describes."""
    return _value_from(message, Provenance)


def parameters_from(spec: GenerationSpec) -> Parameters:
    """Return the parameters that a spec means. A name that this version does not know is None."""
    said: dict[str, Any] = {}
    for known in dataclasses.fields(Parameters):
        if known.name in ("controlnets", "lora"):
            continue
        message: Message = spec if known.name in spec.DESCRIPTOR.fields_by_name else spec.techniques
        value = _field_of(message, known.name)
        if value is not None:
            said[known.name] = _NAMES[known.name].get(value) if known.name in _NAMES else value
    return Parameters(
        controlnets=tuple(map(controlnet_from, spec.controlnets)), lora=tuple(map(lora_from, spec.loras)), **said
    )


def _value_from(message: Message, kind: type[ValueT]) -> ValueT:
    """Return the value whose fields have the names of a message's."""
    said: dict[str, Any] = {}
    for known in dataclasses.fields(cast("Any", kind)):
        value = _field_of(message, known.name)
        if known.name == "parameters":
            value = parameters_from(value)
        elif known.name == "mode":
            value = _MODES.get(value)
        elif (inner := known.metadata.get("kind")) is not None:
            several = isinstance(value, tuple)
            value = tuple(_value_from(each, inner) for each in value) if several else _value_from(value, inner)
        said[known.name] = value
    return kind(**said)


def _field_of(message: Message, name: str) -> Any:
    """Return the value of a field: several as a tuple, None for a number or text that is absent."""
    known = message.DESCRIPTOR.fields_by_name[name]
    if known.is_repeated:
        return tuple(getattr(message, name))
    if known.message_type is None and known.has_presence and not message.HasField(name):
        return None
    return getattr(message, name)
