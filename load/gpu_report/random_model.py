"""A model folder and a ControlNet of a topology, with random weights, made on the device and written once.

Speed does not depend on what weights say, as long as they keep activations finite and of about unit variance.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bottega.miniature import WEIGHTS
from bottega.model.weights import DTYPES
from load.gpu_report.report import Figure
from load.gpu_report.rig import Rig
from load.gpu_report.topology import Topology

# Of embeddings of tokens, CLIP's own.
_EMBEDDING_STD = 0.02


def measure(rig: Rig) -> Sequence[Figure]:
    """Write both where they are not there yet, and measure their sizes."""
    for target, write in ((rig.model, write_model), (rig.controlnet, write_controlnet)):
        if not target.is_dir():
            # All of it or nothing: a folder that is there is whole.
            partial = target.with_name(f"{target.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            write(partial, rig.size.topology, rig.device, DTYPES[rig.size.dtype])
            partial.rename(target)
    return [
        Figure("model_gib", "the model's files", _gib(rig.model), "GiB"),
        Figure("controlnet_gib", "a ControlNet's", _gib(rig.controlnet), "GiB"),
    ]


def write_model(folder: Path, topology: Topology, device: str, dtype: torch.dtype) -> None:
    """Write a model in Diffusers' layout. The same device gives the same weights."""
    from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

    tokenizers = [CLIPTokenizer.from_pretrained(WEIGHTS / name) for name in ("tokenizer", "tokenizer_2")]
    for tokenizer in tokenizers:
        tokenizer.model_max_length = topology.prompt_tokens
    text_configs = [
        CLIPTextConfig(
            **config,
            max_position_embeddings=topology.prompt_tokens,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        for config, tokenizer in zip((topology.text, topology.text_2), tokenizers, strict=True)
    ]
    with torch.device("meta"):
        parts: dict[str, nn.Module] = {
            "unet": UNet2DConditionModel(**topology.unet),
            "vae": AutoencoderKL(**topology.vae),
            "text_encoder": CLIPTextModel(text_configs[0]),
            "text_encoder_2": CLIPTextModelWithProjection(text_configs[1]),
        }
    for seed, part in enumerate(parts.values()):
        _randomize(part, seed, device, dtype)
    pipeline = StableDiffusionXLPipeline(
        **parts,
        tokenizer=tokenizers[0],
        tokenizer_2=tokenizers[1],
        scheduler=EulerDiscreteScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            timestep_spacing="leading",
            steps_offset=1,
            # A random network removes no noise; taken as velocity, its output keeps latents at about unit variance.
            prediction_type="v_prediction",
        ),
        force_zeros_for_empty_prompt=True,
        add_watermarker=False,
    )
    pipeline.save_pretrained(folder, safe_serialization=True)


def write_controlnet(folder: Path, topology: Topology, device: str, dtype: torch.dtype) -> None:
    """Write a ControlNet of the UNet's encoder half; no convolution is zero, so that its residuals matter."""
    from diffusers import ControlNetModel, UNet2DConditionModel

    with torch.device("meta"):
        unet = UNet2DConditionModel(**topology.unet)
        net = ControlNetModel.from_unet(
            unet, conditioning_embedding_out_channels=topology.controlnet_channels, load_weights_from_unet=False
        )
    _randomize(net, 1, device, dtype)
    net.save_pretrained(folder, safe_serialization=True)


def _randomize(part: nn.Module, seed: int, device: str, dtype: torch.dtype) -> None:
    """Replace weights of the meta device: matrices by their fan-in, norms as they begin, no biases."""
    generator = torch.Generator(device).manual_seed(seed)

    def drawn(name: str, like: torch.Tensor) -> torch.Tensor:
        made = torch.empty(like.shape, device=device, dtype=dtype)
        if like.dim() < 2:
            return made.fill_(0.0 if name.endswith("bias") else 1.0)
        std = _EMBEDDING_STD if "embeddings." in name else 1 / math.sqrt(math.prod(like.shape[1:]))
        return made.normal_(std=std, generator=generator)

    state: dict[str, Any] = {name: drawn(name, like) for name, like in part.state_dict().items()}
    part.load_state_dict(state, assign=True)


def _gib(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**30
