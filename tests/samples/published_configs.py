"""The configuration files of published SDXL repositories, with each of their keys, and the changes that make them tiny.

The values are those of stabilityai/stable-diffusion-xl-base-1.0, stabilityai/sdxl-turbo (its UNet was saved by a later
Diffusers) and diffusers/controlnet-canny-sdxl-1.0. Each function returns a new dictionary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = dict[str, Any]

START, END = "<|startoftext|>", "<|endoftext|>"

# What makes each part tiny: SDXL's three UNet levels, depths and attention in the same places, and a VAE of factor 8.
# The widths of the two text encoders differ, so that one cannot pass for the other.
TINY: Mapping[str, Config] = {
    "unet": {
        "addition_time_embed_dim": 32,
        "attention_head_dim": [1, 2, 3],
        "block_out_channels": [32, 64, 96],
        "cross_attention_dim": 96,
        "projection_class_embeddings_input_dim": 64 + 6 * 32,
        "sample_size": 8,
        "transformer_layers_per_block": [1, 1, 2],
    },
    "vae": {"block_out_channels": [32, 32, 64, 64], "sample_size": 64},
    "text_encoder": {
        "hidden_size": 32,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_hidden_layers": 3,
        "projection_dim": 32,
        "vocab_size": 663,
    },
    "text_encoder_2": {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "projection_dim": 64,
        "vocab_size": 663,
    },
    "controlnet": {
        "addition_time_embed_dim": 32,
        "attention_head_dim": [1, 2, 3],
        "block_out_channels": [32, 64, 96],
        "cross_attention_dim": 96,
        "projection_class_embeddings_input_dim": 64 + 6 * 32,
        "transformer_layers_per_block": [1, 1, 2],
    },
}


def model_index() -> Config:
    """Return SDXL's model_index.json."""
    return {
        "_class_name": "StableDiffusionXLPipeline",
        "_diffusers_version": "0.19.0.dev0",
        "force_zeros_for_empty_prompt": True,
        "add_watermarker": None,
        "scheduler": ["diffusers", "EulerDiscreteScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "tokenizer_2": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }


def unet() -> Config:
    """Return SDXL Turbo's unet/config.json; SDXL's has no dropout and no reverse_transformer_layers_per_block."""
    return {
        "_class_name": "UNet2DConditionModel",
        "_diffusers_version": "0.24.0.dev0",
        "act_fn": "silu",
        "addition_embed_type": "text_time",
        "addition_embed_type_num_heads": 64,
        "addition_time_embed_dim": 256,
        "attention_head_dim": [5, 10, 20],
        "attention_type": "default",
        "block_out_channels": [320, 640, 1280],
        "center_input_sample": False,
        "class_embed_type": None,
        "class_embeddings_concat": False,
        "conv_in_kernel": 3,
        "conv_out_kernel": 3,
        "cross_attention_dim": 2048,
        "cross_attention_norm": None,
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "downsample_padding": 1,
        "dropout": 0.0,
        "dual_cross_attention": False,
        "encoder_hid_dim": None,
        "encoder_hid_dim_type": None,
        "flip_sin_to_cos": True,
        "freq_shift": 0,
        "in_channels": 4,
        "layers_per_block": 2,
        "mid_block_only_cross_attention": None,
        "mid_block_scale_factor": 1,
        "mid_block_type": "UNetMidBlock2DCrossAttn",
        "norm_eps": 1e-05,
        "norm_num_groups": 32,
        "num_attention_heads": None,
        "num_class_embeds": None,
        "only_cross_attention": False,
        "out_channels": 4,
        "projection_class_embeddings_input_dim": 2816,
        "resnet_out_scale_factor": 1.0,
        "resnet_skip_time_act": False,
        "resnet_time_scale_shift": "default",
        "reverse_transformer_layers_per_block": None,
        "sample_size": 128,
        "time_cond_proj_dim": None,
        "time_embedding_act_fn": None,
        "time_embedding_dim": None,
        "time_embedding_type": "positional",
        "timestep_post_act": None,
        "transformer_layers_per_block": [1, 2, 10],
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "upcast_attention": None,
        "use_linear_projection": True,
    }


def vae() -> Config:
    """Return SDXL's vae/config.json."""
    return {
        "_class_name": "AutoencoderKL",
        "_diffusers_version": "0.20.0.dev0",
        "_name_or_path": "../sdxl-vae/",
        "act_fn": "silu",
        "block_out_channels": [128, 256, 512, 512],
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "force_upcast": True,
        "in_channels": 3,
        "latent_channels": 4,
        "layers_per_block": 2,
        "norm_num_groups": 32,
        "out_channels": 3,
        "sample_size": 1024,
        "scaling_factor": 0.13025,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
    }


def text_encoder() -> Config:
    """Return SDXL's text_encoder/config.json, whose token ids are those of an early transformers."""
    return {
        "architectures": ["CLIPTextModel"],
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "dropout": 0.0,
        "eos_token_id": 2,
        "hidden_act": "quick_gelu",
        "hidden_size": 768,
        "initializer_factor": 1.0,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 77,
        "model_type": "clip_text_model",
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "pad_token_id": 1,
        "projection_dim": 768,
        "torch_dtype": "float16",
        "transformers_version": "4.32.0.dev0",
        "vocab_size": 49408,
    }


def text_encoder_2() -> Config:
    """Return SDXL's text_encoder_2/config.json."""
    return text_encoder() | {
        "architectures": ["CLIPTextModelWithProjection"],
        "hidden_act": "gelu",
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_attention_heads": 20,
        "num_hidden_layers": 32,
        "projection_dim": 1280,
    }


_NOT_OF_CONTROLNETS = {
    *("attention_type", "center_input_sample", "class_embeddings_concat", "conv_in_kernel", "conv_out_kernel"),
    *("cross_attention_norm", "dropout", "dual_cross_attention", "mid_block_only_cross_attention", "out_channels"),
    *("resnet_out_scale_factor", "resnet_skip_time_act", "reverse_transformer_layers_per_block", "sample_size"),
    *("time_cond_proj_dim", "time_embedding_act_fn", "time_embedding_dim", "time_embedding_type"),
    *("timestep_post_act", "up_block_types"),
}


def controlnet() -> Config:
    """Return the config.json of a published SDXL ControlNet, which has most of the UNet's fields."""
    return {name: value for name, value in unet().items() if name not in _NOT_OF_CONTROLNETS} | {
        "_class_name": "ControlNetModel",
        "_diffusers_version": "0.20.0.dev0",
        "_name_or_path": "../controlnet-1-0-canny/checkpoint-20000",
        "conditioning_channels": 3,
        "conditioning_embedding_out_channels": [16, 32, 96, 256],
        "controlnet_conditioning_channel_order": "rgb",
        "global_pool_conditions": False,
    }


def scheduler() -> Config:
    """Return SDXL's scheduler/scheduler_config.json."""
    return {
        "_class_name": "EulerDiscreteScheduler",
        "_diffusers_version": "0.19.0.dev0",
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "beta_start": 0.00085,
        "clip_sample": False,
        "interpolation_type": "linear",
        "num_train_timesteps": 1000,
        "prediction_type": "epsilon",
        "sample_max_value": 1.0,
        "set_alpha_to_one": False,
        "skip_prk_steps": True,
        "steps_offset": 1,
        "timestep_spacing": "leading",
        "trained_betas": None,
        "use_karras_sigmas": False,
    }


def tokenizer(pad_token: str) -> dict[str, Config]:
    """Return the JSON files of a published CLIP tokenizer but its vocabulary, by name.

    Args:
        pad_token: END for the first tokenizer, "!" for the second.
    """
    start, end = (_added_token(text) for text in (START, END))
    return {
        "special_tokens_map.json": {
            "bos_token": start,
            "eos_token": end,
            "pad_token": pad_token,
            "unk_token": end,
        },
        "tokenizer_config.json": {
            "add_prefix_space": False,
            "bos_token": {"__type": "AddedToken", **start},
            "clean_up_tokenization_spaces": True,
            "do_lower_case": True,
            "eos_token": {"__type": "AddedToken", **end},
            "errors": "replace",
            "model_max_length": 77,
            "pad_token": pad_token,
            "tokenizer_class": "CLIPTokenizer",
            "unk_token": {"__type": "AddedToken", **end},
        },
    }


def _added_token(text: str) -> Config:
    return {"content": text, "lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
