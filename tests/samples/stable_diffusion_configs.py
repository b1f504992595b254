"""The configuration files of published folders of Stable Diffusion and Flux.1, with each key that is read.

The values are those of stable-diffusion-v1-5/stable-diffusion-v1-5, stabilityai/stable-diffusion-2-1 (768 pixels, with
velocity), and lllyasviel/sd-controlnet-canny. Each function returns a new dictionary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.samples.published_configs import scheduler, text_encoder, tokenizer, vae

Config = dict[str, Any]


def sd15() -> Mapping[str, Config]:
    """Return the configurations of Stable Diffusion 1.5 by part; `index` is model_index.json."""
    return {
        "index": _index("PNDMScheduler", "0.6.0"),
        "unet": {
            "_class_name": "UNet2DConditionModel",
            "_diffusers_version": "0.6.0",
            "act_fn": "silu",
            "attention_head_dim": 8,
            "block_out_channels": [320, 640, 1280, 1280],
            "center_input_sample": False,
            "cross_attention_dim": 768,
            "down_block_types": ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"],
            "downsample_padding": 1,
            "flip_sin_to_cos": True,
            "freq_shift": 0,
            "in_channels": 4,
            "layers_per_block": 2,
            "mid_block_scale_factor": 1,
            "norm_eps": 1e-05,
            "norm_num_groups": 32,
            "out_channels": 4,
            "sample_size": 64,
            "up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3,
        },
        "vae": _vae("0.6.0", 512),
        "text_encoder": text_encoder()
        | {
            "_name_or_path": "openai/clip-vit-large-patch14",
            "torch_dtype": "float32",
            "transformers_version": "4.22.0.dev0",
        },
        "scheduler": _scheduler("PNDMScheduler"),
        "tokenizer": tokenizer("<|endoftext|>")["tokenizer_config.json"],
    }


def sd21() -> Mapping[str, Config]:
    """Return the configurations of Stable Diffusion 2.1 by part; `index` is model_index.json."""
    return {
        "index": {**_index("DDIMScheduler", "0.8.0"), "requires_safety_checker": False, "safety_checker": [None, None]},
        "unet": sd15()["unet"]
        | {
            "_diffusers_version": "0.10.0.dev0",
            "attention_head_dim": [5, 10, 20, 20],
            "cross_attention_dim": 1024,
            "dual_cross_attention": False,
            "num_class_embeds": None,
            "only_cross_attention": False,
            "sample_size": 96,
            "upcast_attention": True,
            "use_linear_projection": True,
        },
        "vae": _vae("0.10.0.dev0", 768),
        "text_encoder": text_encoder()
        | {
            "_name_or_path": "hf-models/stable-diffusion-v2-768x768/text_encoder",
            "hidden_act": "gelu",
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "num_hidden_layers": 23,
            "projection_dim": 512,
            "torch_dtype": "float32",
            "transformers_version": "4.25.0.dev0",
        },
        "scheduler": {**_scheduler("DDIMScheduler"), "prediction_type": "v_prediction"},
        "tokenizer": tokenizer("!")["tokenizer_config.json"],
    }


def sd35_transformer() -> Config:
    """Return transformer/config.json of stabilityai/stable-diffusion-3.5-medium."""
    return {
        "_class_name": "SD3Transformer2DModel",
        "attention_head_dim": 64,
        "caption_projection_dim": 1536,
        "dual_attention_layers": list(range(13)),
        "in_channels": 16,
        "joint_attention_dim": 4096,
        "num_attention_heads": 24,
        "num_layers": 24,
        "out_channels": 16,
        "patch_size": 2,
        "pooled_projection_dim": 2048,
        "pos_embed_max_size": 384,
        "qk_norm": "rms_norm",
        "sample_size": 128,
    }


def sd35_vae() -> Config:
    """Return vae/config.json of stabilityai/stable-diffusion-3.5-medium."""
    return _vae("0.31.0", 1024) | {
        "force_upcast": True,
        "latent_channels": 16,
        "mid_block_add_attention": True,
        "scaling_factor": 1.5305,
        "shift_factor": 0.0609,
        "use_post_quant_conv": False,
        "use_quant_conv": False,
    }


def flux_transformer() -> Config:
    """Return transformer/config.json of black-forest-labs/FLUX.1-dev."""
    return {
        "_class_name": "FluxTransformer2DModel",
        "attention_head_dim": 128,
        "guidance_embeds": True,
        "in_channels": 64,
        "joint_attention_dim": 4096,
        "num_attention_heads": 24,
        "num_layers": 19,
        "num_single_layers": 38,
        "patch_size": 1,
        "pooled_projection_dim": 768,
    }


def flux_vae() -> Config:
    """Return vae/config.json of black-forest-labs/FLUX.1-dev."""
    return sd35_vae() | {"scaling_factor": 0.3611, "shift_factor": 0.1159}


def t5_xxl() -> Config:
    """Return text_encoder_2/config.json of black-forest-labs/FLUX.1-dev."""
    return {
        "architectures": ["T5EncoderModel"],
        "d_ff": 10240,
        "d_kv": 64,
        "d_model": 4096,
        "dense_act_fn": "gelu_new",
        "dropout_rate": 0.1,
        "feed_forward_proj": "gated-gelu",
        "is_gated_act": True,
        "layer_norm_epsilon": 1e-06,
        "model_type": "t5",
        "num_heads": 64,
        "num_layers": 24,
        "relative_attention_max_distance": 128,
        "relative_attention_num_buckets": 32,
        "vocab_size": 32128,
    }


def _index(scheduler: str, version: str) -> Config:
    return {
        "_class_name": "StableDiffusionPipeline",
        "_diffusers_version": version,
        "feature_extractor": ["transformers", "CLIPImageProcessor"],
        "safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"],
        "scheduler": ["diffusers", scheduler],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }


def _vae(version: str, size: int) -> Config:
    """Return what SDXL's VAE says, but for what earlier ones leave to the defaults."""
    later = {"_name_or_path", "force_upcast", "scaling_factor"}
    fields = {name: value for name, value in vae().items() if name not in later}
    return fields | {"_diffusers_version": version, "sample_size": size}


def _scheduler(name: str) -> Config:
    later = {"interpolation_type", "prediction_type", "sample_max_value", "timestep_spacing", "use_karras_sigmas"}
    fields = {name: value for name, value in scheduler().items() if name not in later}
    return fields | {"_class_name": name, "_diffusers_version": "0.8.0"}
