"""The networks that are measured, as configurations of Diffusers and transformers: SDXL-base's own, and small ones.

Numbers alone: it imports neither.
Source of SDXL's: the config.json files of stabilityai/stable-diffusion-xl-base-1.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Config = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The configurations of a model's networks."""

    unet: Config
    vae: Config
    text: Config
    """Of CLIP's first text tower."""
    text_2: Config
    prompt_tokens: int
    """Tokens that both towers read."""
    controlnet_channels: tuple[int, ...]
    """Channels of a ControlNet's embedding of its image."""


SDXL = Topology(
    unet={
        "sample_size": 128,
        "in_channels": 4,
        "out_channels": 4,
        "block_out_channels": (320, 640, 1280),
        "layers_per_block": 2,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2, 10),
        "attention_head_dim": (5, 10, 20),
        "cross_attention_dim": 2048,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
    vae={
        "block_out_channels": (128, 256, 512, 512),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "layers_per_block": 2,
        "latent_channels": 4,
        "norm_num_groups": 32,
        "sample_size": 1024,
        "scaling_factor": 0.13025,
        "force_upcast": True,
    },
    text={
        "vocab_size": 49408,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "projection_dim": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "hidden_act": "quick_gelu",
    },
    text_2={
        "vocab_size": 49408,
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "projection_dim": 1280,
        "num_hidden_layers": 32,
        "num_attention_heads": 20,
        "hidden_act": "gelu",
    },
    prompt_tokens=77,
    controlnet_channels=(16, 32, 96, 256),
)

# The same kinds of blocks and layers, as few and as narrow as they may be.
SMALL = Topology(
    unet={
        **SDXL.unet,
        "sample_size": 16,
        "block_out_channels": (16, 32),
        "layers_per_block": 1,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 1),
        "attention_head_dim": (1, 2),
        "norm_num_groups": 8,
        "cross_attention_dim": 64,
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 80,
    },
    vae={
        **SDXL.vae,
        "block_out_channels": (8, 16, 16),
        "down_block_types": ("DownEncoderBlock2D",) * 3,
        "up_block_types": ("UpDecoderBlock2D",) * 3,
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "sample_size": 64,
    },
    text={
        **SDXL.text,
        "hidden_size": 32,
        "intermediate_size": 64,
        "projection_dim": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
    text_2={
        **SDXL.text_2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "projection_dim": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
    prompt_tokens=24,
    controlnet_channels=(16, 32, 64),
)
