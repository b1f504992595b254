"""Loads a model from a folder in Diffusers' layout. Weights are loaded from safetensors files only."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
from diffusers import SchedulerMixin
from diffusers.utils import logging as diffusers_logging
from torch import nn
from transformers.utils import logging as transformers_logging

from bottega.device.devices import open_device, use_device
from bottega.device.engine_start import StartReporter, silent_reporter
from bottega.device.memory_plan import MemoryPlan, is_out_of_memory, open_memory_plan
from bottega.errors import ConfigError
from bottega.model.backbones import make_backbone
from bottega.model.family import ModelFamily, family_of
from bottega.model.model import Defaults, Model
from bottega.model.sampler_choices import ModelSamplers, SamplerChoice
from bottega.model.schedulers import KARRAS, SamplerKind, Sigmas, default_kind, ignored_algorithm_advice
from bottega.model.text_encoders import TextCache, TextEncoderSettings, keep_on_host
from bottega.model.vae import VaeDecoder, VaeSettings, make_decoder
from bottega.model.weights import (
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
        samplers=_samplers(config, defaults, sigmas=family.sigmas),
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


def _samplers(config: Mapping[str, Any], defaults: Defaults, *, sigmas: Sigmas | None) -> ModelSamplers:
    """Try every sampler. Raise ConfigError if the model's default sampler does not work."""
    samplers = ModelSamplers(config, steps=defaults.num_inference_steps, sigmas=sigmas)
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
    with _explained(report, target.device, parts):
        for name in (*family.text_encoders, *family.networks):
            parts[name] = _load_part(name, report, target, memory, reporter, text=text, roles=roles)
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
    _reserve(memory, parts)  # The VAE may have changed its element types.
    return pipeline, decoder


@contextmanager
def _explained(report: ModelReport, device: torch.device, parts: Mapping[str, nn.Module]) -> Iterator[None]:
    """Raise ValueError if the device runs out of memory, and ConfigError if Diffusers cannot load the folder.

    Args:
        parts: Parts that have been loaded, also within the context.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        loaded_mib = sum(map(size_bytes, parts.values())) >> 20
        raise ValueError(
            f"{device} does not have enough memory for the model: {loaded_mib} MiB of its weights were loaded; "
            "use a smaller dtype, or a larger device"
        ) from None
    except (ArithmeticError, AttributeError, ImportError, LookupError, TypeError) as error:
        # Diffusers and transformers raise these for unexpected values that the folder's check does not find.
        what = f"{type(error).__name__}: {excerpt(str(error), _SHOWN_CHARACTERS)}"
        raise ConfigError(
            f"the model {report.folder} cannot be loaded by Diffusers ({what}); correct its configurations"
        ) from error


def _load_part(
    name: str,
    report: ModelReport,
    target: Placement,
    memory: MemoryPlan,
    reporter: StartReporter,
    *,
    text: Mapping[str, TextEncoderSettings],
    roles: Collection[str],
) -> nn.Module:
    """Load a text encoder or a denoising network; without weights if the roles do not compute it."""
    family, part = family_of(report), report.parts[name]
    is_encoder, settings = name in family.text_encoders, text.get(name, TextEncoderSettings())
    kind = (family.text_encoders if is_encoder else family.networks)[name]
    own = replace(target, dtype=settings.dtype or target.dtype) if is_encoder else target
    module: nn.Module
    if not _is_needed(name, roles, is_encoder=is_encoder):
        module = outline(kind, part, own.dtype)
        return module
    reporter.begin(f"loading {name}", part.size_bytes)
    if is_encoder and settings.on_host and target.device.type != "cpu":
        return _load_on_host(kind, part, own, memory)
    module = load_text_encoder(kind, part, own) if is_encoder else load_network(kind, part, own)
    return module


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
