"""The networks that are measured, as configurations of Diffusers and transformers: SDXL-base's own, and small ones.

Numbers alone: it imports neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tests.samples import published_configs

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


# Of files, their authors and tokens, of which a tokenizer knows more.
_NOT_OF_NETWORKS = {
    *("_class_name", "_diffusers_version", "_name_or_path", "architectures", "model_type", "transformers_version"),
    *("torch_dtype", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"),
}


def _network(config: Config) -> Config:
    """Return the fields of a published configuration that describe the network."""
    return {name: value for name, value in config.items() if name not in _NOT_OF_NETWORKS}


SDXL = Topology(
    unet=_network(published_configs.unet()),
    vae=_network(published_configs.vae()),
    text=_network(published_configs.text_encoder()),
    text_2=_network(published_configs.text_encoder_2()),
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
