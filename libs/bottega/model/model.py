"""A model on a device: the parts of a folder in Diffusers' layout, its sizes and its digest.

Weights are loaded from safetensors files only.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
from diffusers import AutoencoderKL, SchedulerMixin, UNet2DConditionModel
from diffusers.utils import logging as diffusers_logging
from torch import nn
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer, T5EncoderModel, T5Tokenizer
from transformers.utils import logging as transformers_logging

from bottega.device.device import Device
from bottega.device.devices import open_device, use_device
from bottega.device.engine_start import StartReporter, silent_reporter
from bottega.device.memory_plan import MemoryPlan, is_out_of_memory, open_memory_plan
from bottega.errors import ConfigError
from bottega.model.backbones import MadeBackbone, make_backbone
from bottega.model.backbones.unet import UNetBackbone
from bottega.model.family import ModelFamily, family_of
from bottega.model.operations import Operations
from bottega.model.sampler_choices import ModelSamplers, SamplerChoice
from bottega.model.schedulers import KARRAS, SamplerKind, default_kind, ignored_algorithm_advice
from bottega.model.text_encoders import TextCache, TextEncoderSettings, keep_on_host
from bottega.model.vae import VaeDecoder, VaeSettings, make_decoder
from bottega.model.weights import (
    NOWHERE,
    Placement,
    drop_halves,
    dtype_name,
    load_network,
    load_text_encoder,
    outline,
    size_bytes,
)
from bottega.model_files.digest import KnownDigests, model_digest
from bottega.model_files.family_names import OPTIONAL_PARTS
from bottega.model_files.folder_check import check_model_folder
from bottega.model_files.presets import Preset, read_preset
from bottega.model_files.report import ModelReport, PartReport
from bottega.plain_text import excerpt

_SHOWN_CHARACTERS = 200
# Seconds between reports of the progress of hashing.
_HASH_REPORT_S = 0.1
# Largest share of the memory that the weights leave which embeddings of prompts may take.
_PROMPTS_SHARE = 0.05
# Reservation for the weights of the block of a text encoder that is kept on the host.
_BLOCKS = "text encoder blocks"

ROLES = frozenset({"encode", "denoise", "decode"})
"""The stages of a picture: the text encoders, the network with the VAE's encoder of pictures, and the VAE's decoder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Values for parameters that a request does not set."""

    width: int
    height: int
    num_inference_steps: int
    guidance_scale: float
    edit_guidance_scale: float
    """Default guidance scale of edits without ControlNets."""
    strength: float
    """Default strength of image-to-image without ControlNets."""
    edit_strength: float
    sampler: SamplerKind
    use_karras_sigmas: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """The parts of one model, in evaluation mode. They must be run in inference mode."""

    name: str
    family: ModelFamily
    digest: str
    """SHA-256 of weights and configuration, hex."""
    dtype: torch.dtype
    device: torch.device
    """With its index if it is a GPU."""
    runtime: Device
    """Streams, events and copies of the device."""
    tokenizers: tuple[CLIPTokenizer | T5Tokenizer, ...]
    """In the order of the text encoders."""
    text_encoders: tuple[CLIPTextModel | CLIPTextModelWithProjection | T5EncoderModel, ...]
    """In the family's order."""
    backbone: MadeBackbone
    vae: AutoencoderKL
    decoder: VaeDecoder
    """Decodes with the VAE."""
    samplers: ModelSamplers
    zeros_for_absent_negative: bool
    latent_scale: int
    """Number of pixels, on each side, that one latent element stands for."""
    defaults: Defaults
    operations: Operations = field(default_factory=Operations)
    """Operations that accelerations may replace."""
    memory: MemoryPlan = field(default_factory=MemoryPlan)
    """Plan of the memory of the device."""
    prompt_cache: TextCache = field(default_factory=TextCache)
    """Cache of encoded prompts."""

    @property
    def encodes(self) -> bool:
        """Whether the text encoders are loaded. If not, they have no weights, and another process computes them."""
        return bool(self.text_encoders[0].device.type != NOWHERE)

    @property
    def is_as_stock(self) -> bool:
        """Whether the weights are those of `from_pretrained` with the model's element type: of encoders and network."""
        return all(encoder.dtype == self.dtype for encoder in self.text_encoders) and not self.operations.rounds_weights

    @property
    def decodes(self) -> bool:
        """Whether the VAE's decoder is loaded. If not, it has no weights, and another process decodes."""
        return bool(self.vae.decoder.conv_in.weight.device.type != NOWHERE)

    @property
    def scheduler_config(self) -> Mapping[str, Any]:
        """The model's scheduler configuration, from which samplers are created."""
        return self.samplers.config

    @property
    def latent_channels(self) -> int:
        """Number of channels of the latent."""
        return int(self.vae.config.latent_channels)

    @property
    def unet(self) -> UNet2DConditionModel | None:
        """The denoising network if it is a UNet; None if it is a transformer."""
        return self.backbone.network if isinstance(self.backbone, UNetBackbone) else None

    @property
    def image_channels(self) -> int:
        """Number of channels of a mask and a masked image that the network reads after the latent; 0 if it has none."""
        return self.backbone.image_channels

    @property
    def mask_channels(self) -> int:
        """Number of channels of the mask: 1, or one for each pixel of an element of the latent."""
        return max(1, self.image_channels - self.latent_channels)

    @property
    def guidance_width(self) -> int:
        """Width of the embedding of the guidance scale that the UNet reads instead of a second row; 0 without one."""
        return int(self.backbone.network.config.get("time_cond_proj_dim") or 0)

    @property
    def embeds_guidance(self) -> bool:
        """Whether guidance takes no second row: the network reads its scale, or was trained to draw without it."""
        return self.guidance_width > 0 or self.family.distilled_guidance

    @property
    def patch_size(self) -> int:
        """Number of elements of the latent, on each side, that one token of a transformer stands for; 1 for UNets."""
        return self.backbone.patch_size

    @property
    def max_side(self) -> int | None:
        """Largest width or height in pixels for which the network has embeddings of positions; None for any."""
        places = self.backbone.network.config.get("pos_embed_max_size")
        return int(places) * self.patch_size * self.latent_scale if places else None

    def tokens(self, width: int, height: int) -> int:
        """Return the number of tokens of a picture, of patches of its latent. Sides are in pixels."""
        side = self.latent_scale * self.patch_size
        return (width // side) * (height // side)

    @property
    def max_clip_skip(self) -> int:
        """The largest `clip_skip`: it takes the token embeddings of the text encoder with the fewest layers.

        It is 0 if the model reads no states between layers.
        """
        if not self.family.states_from_end:
            return 0
        layers = min(
            encoder.config.num_hidden_layers
            for encoder in self.text_encoders
            if not isinstance(encoder, T5EncoderModel)  # which never leaves out layers
        )
        return int(layers) + 1 - self.family.states_from_end

    @property
    def denoiser(self) -> tuple[str, nn.Module]:
        """The part of the denoising network, such as `unet`, and the network."""
        return next(iter(self.family.networks)), self.backbone.network

    @property
    def networks(self) -> Mapping[str, nn.Module]:
        """The networks that LoRAs may change, by the name of their part."""
        encoders = dict(zip(self.family.text_encoders, self.text_encoders, strict=True))
        return {**encoders, **dict([self.denoiser])}

    @property
    def size_multiple(self) -> int:
        """Number of pixels that width and height must be multiples of. Diffusers accepts multiples of 8."""
        return math.lcm(8, self.latent_scale * self.patch_size)

    def is_tiled(self, area: int) -> bool:
        """Return whether a latent of `area` elements is decoded in tiles, by the measurements so far."""
        if area <= self.decoder.tile_area:
            return False  # Reading the available memory of a CPU takes time.
        return self.decoder.is_tiled(area, fits=self.memory.fits_decoding(area))

    def decoded_area(self, area: int) -> int:
        """Return how many elements of a latent of this area are decoded at once."""
        return self.decoder.tile_area if self.is_tiled(area) else area

    @property
    def edits_refused_because(self) -> str:
        """Why edits with a mask are refused; empty if they are not."""
        if self.decoder.statistics is None:
            return ""
        # Diffusers' inpainting pipeline applies them when it decodes but not when it encodes, which shifts colours.
        return f"model {self.name} cannot edit pictures, because its VAE has latents_mean and latents_std; use another"

    @property
    def dtype_name(self) -> str:
        """float32, float16 or bfloat16."""
        return dtype_name(self.dtype)


def load_model(
    folder: Path,
    *,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    vae: VaeSettings | None = None,
    text: Mapping[str, TextEncoderSettings] = MappingProxyType({}),
    prompt_cache_bytes: int = 0,
    device_memory_mib: int = 0,
    device_memory_share: float = 1.0,
    variant: str = "",
    vae_folder: Path | None = None,
    reporter: StartReporter | None = None,
    known_digests: KnownDigests | None = None,
    roles: Collection[str] = ROLES,
) -> Model:
    """Load a folder in Diffusers' layout. Nothing is downloaded, and weights are read from safetensors only.

    Call it in the thread that will compute, whose current device it sets.

    Args:
        folder: Folder with model_index.json.
        name: Name of the model in requests.
        dtype: Element type of the weights in memory.
        text: Settings of text encoders, by part.
        prompt_cache_bytes: See TextCache. On a small device it gets less.
        device_memory_mib: See `open_memory_plan`.
        device_memory_share: See `open_memory_plan`.
        variant: See `check_model_folder`.
        vae_folder: Folder of a VAE that replaces the model's own.
        reporter: Receives the progress of loading.
        known_digests: Digests of files that were hashed before; None to hash all.
        roles: Stages that it has to compute, of `ROLES`. Parts for other stages are loaded without weights.

    Raises:
        ConfigError: The folder is not a model that can be served.
        ValueError: The device has no room for it.
        OSError: A file cannot be read.
    """
    report = check_model_folder(folder, variant, vae=vae_folder)
    if report.problems:  # Diffusers would take the path of a missing folder for a name on the hub.
        raise ConfigError(report.refusal)
    family, preset = family_of(report), read_preset(folder) or Preset()
    runtime = use_device(device)
    diffusers_logging.set_verbosity_error()
    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    memory = open_memory_plan(runtime, device_memory_mib, share=device_memory_share)
    reporter = reporter or silent_reporter()
    target = Placement(device=runtime.torch_device, dtype=dtype, on_read=reporter.advance)
    with _Hashing(report, preset, known_digests, _text_dtypes(text, dtype)) as hashing:
        pipeline, decoder = _load_parts(report, target, memory, vae or VaeSettings(), reporter, text=text, roles=roles)
        model_hash = hashing.result(reporter)
    config = _scheduler_config(pipeline.scheduler, preset, family.scheduler_overrides)
    denoiser = getattr(pipeline, next(iter(family.networks)))
    defaults = _defaults(family, preset, report.default_size, config)
    return Model(
        name=name,
        family=family,
        digest=model_hash,
        dtype=dtype,
        device=runtime.torch_device,
        runtime=runtime,
        tokenizers=tuple(getattr(pipeline, part) for part in family.tokenizers),
        text_encoders=tuple(getattr(pipeline, part) for part in family.text_encoders),
        backbone=make_backbone(denoiser),
        vae=pipeline.vae,
        decoder=decoder,
        memory=memory,
        prompt_cache=_prompt_cache(memory, prompt_cache_bytes if "encode" in roles else 0),
        samplers=_samplers(config, defaults, even_sigmas=family.even_sigmas),
        zeros_for_absent_negative=bool(pipeline.config.get("force_zeros_for_empty_prompt")),
        latent_scale=pipeline.vae_scale_factor,
        defaults=defaults,
    )


def _prompt_cache(memory: MemoryPlan, size_bytes: int) -> TextCache:
    """Return a cache of prompts, with less memory on a device where the weights leave little."""
    return TextCache(memory.reserve_up_to("prompts", size_bytes, share=_PROMPTS_SHARE) if size_bytes else 0)


def _text_dtypes(text: Mapping[str, TextEncoderSettings], dtype: torch.dtype) -> dict[str, str]:
    """Return the names of the element types of text encoders, by part, that differ from the model's."""
    wanted = {part: settings.dtype or dtype for part, settings in text.items()}
    return {part: dtype_name(own) for part, own in wanted.items() if own != dtype}


def _scheduler_config(
    scheduler: SchedulerMixin, preset: Preset, overrides: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the scheduler configuration that a model's files, its family and its preset set.

    Defaults of the scheduler's class are left out, because they do not apply to other classes that are made from the
    configuration.
    """
    config = dict(scheduler.config)
    config = {key: value for key, value in config.items() if key not in config.get("_use_default_values", ())}
    config.pop("_use_default_values", None)
    config |= {key: value for key, value in overrides.items() if key in scheduler.config}
    config["_class_name"] = type(scheduler).__name__
    return config | preset.scheduler_overrides


def _samplers(config: Mapping[str, Any], defaults: Defaults, *, even_sigmas: bool) -> ModelSamplers:
    """Try every sampler. Raise ConfigError if the model's default sampler does not work."""
    samplers = ModelSamplers(config, steps=defaults.num_inference_steps, even_sigmas=even_sigmas)
    own = SamplerChoice(kind=defaults.sampler, karras=defaults.use_karras_sigmas)
    if reason := samplers.refusals[own]:
        raise ConfigError(f"the model's sampler, {own}, cannot draw: {reason}")
    return samplers


def _load_parts(
    report: ModelReport,
    target: Placement,
    memory: MemoryPlan,
    vae: VaeSettings,
    reporter: StartReporter,
    *,
    text: Mapping[str, TextEncoderSettings],
    roles: Collection[str],
) -> tuple[Any, VaeDecoder]:
    """Load the parts onto the device, into the family's pipeline.

    Text encoders come first, because loading one takes more memory than its weights.

    Raises:
        ConfigError: Diffusers cannot load them.
        OSError: A file cannot be read.
        ValueError: They do not fit.
    """
    family, parts = family_of(report), dict[str, nn.Module]()
    try:
        for name, kind in {**family.text_encoders, **family.networks}.items():
            is_encoder, settings = name in family.text_encoders, text.get(name, TextEncoderSettings())
            own = replace(target, dtype=settings.dtype or target.dtype) if is_encoder else target
            if not _is_needed(name, roles, is_encoder=is_encoder):
                parts[name] = outline(kind, report.parts[name], own.dtype)
                continue
            reporter.begin(f"loading {name}", report.parts[name].size_bytes)
            if is_encoder and settings.on_host and target.device.type != "cpu":
                parts[name] = _load_on_host(kind, report.parts[name], own, memory)
            else:
                load = load_text_encoder if is_encoder else load_network
                parts[name] = load(kind, report.parts[name], own)
            _reserve(memory, parts)
        absent = dict.fromkeys(part for part in OPTIONAL_PARTS.get(report.family, ()) if part not in report.parts)
        with ignored_algorithm_advice(), warnings.catch_warnings():
            # Old configurations, which the family's pipeline corrects: see `scheduler_overrides`.
            warnings.filterwarnings("ignore", "The configuration file of", FutureWarning)
            pipeline = family.pipeline.from_pretrained(
                str(report.folder), **parts, **absent, **family.left_out, local_files_only=True
            )
        pipeline.vae.register_to_config(**family.vae_overrides)
        if _is_needed("vae", roles):
            decoder = make_decoder(pipeline.vae, device=target.device, dtype=target.dtype, settings=vae)
        else:
            decoder = VaeDecoder(vae=pipeline.vae, dtype=target.dtype, stock_dtype=target.dtype)
        drop_halves(pipeline.vae, roles)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        loaded_mib = sum(map(size_bytes, parts.values())) >> 20
        raise ValueError(
            f"{target.device} does not have enough memory for the model: {loaded_mib} MiB of its weights were loaded; "
            "use a smaller dtype, or a larger device"
        ) from None
    except (ArithmeticError, AttributeError, ImportError, LookupError, TypeError) as error:
        # Diffusers and transformers raise these for unexpected values that the folder's check does not find.
        what = f"{type(error).__name__}: {excerpt(str(error), _SHOWN_CHARACTERS)}"
        raise ConfigError(
            f"the model {report.folder} cannot be loaded by Diffusers ({what}); correct its configurations"
        ) from error
    _reserve(memory, parts)  # The VAE may have changed its element types.
    return pipeline, decoder


def _is_needed(part: str, roles: Collection[str], *, is_encoder: bool = False) -> bool:
    """Return whether a part of the pipeline computes something in these roles."""
    if is_encoder:
        return "encode" in roles
    return "denoise" in roles or (part == "vae" and "decode" in roles)


def _load_on_host(kind: Any, part: PartReport, target: Placement, memory: MemoryPlan) -> nn.Module:
    """Load a text encoder into host memory, from which its blocks visit the device; see `keep_on_host`."""
    memory.keep_on_host(part.name, part.parameters * target.dtype.itemsize)
    encoder: nn.Module = load_text_encoder(kind, part, replace(target, device=torch.device("cpu")))
    kept = keep_on_host(encoder, open_device(target.device))
    memory.keep_on_host(part.name, kept.host)
    # The encoders compute one after the other.
    memory.reserve(_BLOCKS, max(kept.device, memory.reserved.get(_BLOCKS, 0)))
    return encoder


def _reserve(memory: MemoryPlan, parts: Mapping[str, nn.Module]) -> None:
    loaded = (part for name, part in parts.items() if name not in memory.on_host)
    memory.reserve("model", sum(map(size_bytes, loaded)))


class _Hashing:
    """The digest of a model, which a thread computes while the weights are loaded: each takes one core.

    Leaving its context ends the thread.
    """

    def __init__(
        self, report: ModelReport, preset: Preset, known: KnownDigests | None, text_dtypes: Mapping[str, str]
    ) -> None:
        self._size_bytes = report.size_bytes
        self._hashed_bytes = 0
        self._cancelled = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="model-hash")
        self._digest = self._pool.submit(model_digest, report, preset, self._advance, known, text_dtypes=text_dtypes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._cancelled = True
        self._pool.shutdown()

    def result(self, reporter: StartReporter) -> str:
        """Return the digest, and report the progress that it has made until then."""
        reporter.begin("hashing its files", self._size_bytes)
        reported_bytes = 0
        while True:
            done, _ = wait([self._digest], timeout=_HASH_REPORT_S)
            hashed_bytes = self._hashed_bytes
            reporter.advance(hashed_bytes - reported_bytes)
            reported_bytes = hashed_bytes
            if done:
                return self._digest.result()

    def _advance(self, size_bytes: int) -> None:
        if self._cancelled:
            raise CancelledError
        self._hashed_bytes += size_bytes


def _defaults(family: ModelFamily, preset: Preset, size: int, config: dict[str, Any]) -> Defaults:
    steps, guidance = preset.num_inference_steps, preset.guidance_scale
    kind = default_kind(config) if preset.sampler is None else SamplerKind[preset.sampler.upper()]
    return Defaults(
        width=size,
        height=size,
        num_inference_steps=family.num_inference_steps if steps is None else steps,
        guidance_scale=family.guidance_scale if guidance is None else guidance,
        edit_guidance_scale=family.edit_guidance_scale if guidance is None else guidance,
        strength=family.strength,
        edit_strength=family.edit_strength,
        sampler=kind,
        use_karras_sigmas=kind in KARRAS and bool(config.get("use_karras_sigmas")),
    )
