"""Configurations that are not served are refused in one exact sentence, which names the field."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bottega.miniature import WEIGHTS
from bottega.model_files.configuration_rules import (
    check_index,
    check_parts_together,
    check_text_encoder_config,
    check_tokenizer_config,
)
from bottega.model_files.controlnet_folder import base_layout, check_controlnet
from bottega.model_files.scheduler_check import check_scheduler_config
from bottega.model_files.scheduler_rules import SCHEDULER_RULES
from bottega.model_files.unet_rules import check_unet_config
from bottega.model_files.vae_rules import check_vae_config
from tests.samples import published_configs
from tests.samples.wrong_folders import replace, tensors_of, write_zeros

_Check = Callable[[Mapping[str, object]], Iterable[str]]
UNET, VAE = published_configs.unet(), published_configs.vae()
FIELDS: tuple[tuple[_Check, Mapping[str, Any], dict[str, object], str], ...] = (
    (
        check_unet_config,
        UNET,
        {"attention_type": "gated"},
        (
            'attention_type must be "default" or null, not "gated": UNets that take boxes with the prompt (GLIGEN) '
            "are not served"
        ),
    ),
    (
        check_unet_config,
        UNET,
        {"class_embed_type": "timestep"},
        'class_embed_type must be null, not "timestep": UNets that take class labels are not served',
    ),
    (
        check_unet_config,
        UNET,
        {"dual_cross_attention": True},
        (
            "dual_cross_attention must be false or null, not true: UNets with two transformers in place of one are not "
            "served"
        ),
    ),
    (
        check_unet_config,
        UNET,
        {"encoder_hid_dim": 1024},
        "encoder_hid_dim must be null, not 1024: UNets that project prompt embeddings are not served",
    ),
    (
        check_unet_config,
        UNET,
        {"encoder_hid_dim_type": "ip_image_proj"},
        (
            'encoder_hid_dim_type must be null, not "ip_image_proj": UNets that project prompt or image embeddings '
            "are not served"
        ),
    ),
    (
        check_unet_config,
        UNET,
        {"time_embedding_type": "fourier"},
        'time_embedding_type must be "positional", not "fourier": Fourier embeddings of the timestep are not served',
    ),
    (
        check_unet_config,
        UNET,
        {"addition_embed_type": "image"},
        'addition_embed_type must be "text_time", not "image": only UNets of SDXL\'s kind of conditioning are served',
    ),
    (
        check_unet_config,
        UNET,
        {"conv_out_kernel": 1},
        "conv_out_kernel must be 3, not 1: edits compute this convolution around their masks alone",
    ),
    (
        check_unet_config,
        UNET,
        {"freq_shift": 2},
        "freq_shift must be 0 or 1, not 2: published UNets have no other",
    ),
    (
        check_vae_config,
        VAE,
        {"out_channels": 1},
        "out_channels must be 3, not 1: pictures are RGB",
    ),
    (
        check_vae_config,
        VAE,
        {"shift_factor": 0.1},
        "shift_factor must be null or 0, not 0.1: SDXL's pipeline applies none, so that colours shift",
    ),
    (
        check_text_encoder_config,
        published_configs.text_encoder(),
        {"use_attention_mask": True},
        "use_attention_mask must be false or null, not true: prompts are encoded without an attention mask",
    ),
    (
        check_tokenizer_config,
        {"model_max_length": 77},
        {"model_max_length": 0},
        "model_max_length must be a whole number from 1, not 0",
    ),
    (
        check_index,
        published_configs.model_index(),
        {"image_encoder": "clip"},
        (
            'image_encoder must be the library and the class of a part, or [null, null], not "clip": only IP-Adapters '
            "use it: it is not loaded"
        ),
    ),
    (
        check_text_encoder_config,
        published_configs.text_encoder(),
        {"hidden_act": "sine"},
        (
            'hidden_act must be "quick_gelu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "silu", '
            '"swish" or "tanh", not "sine": published text encoders have no other'
        ),
    ),
    (
        check_text_encoder_config,
        published_configs.text_encoder(),
        {"attention_dropout": 2},
        "attention_dropout must be a number from 0 to 1 or null, not 2",
    ),
    (
        check_text_encoder_config,
        published_configs.text_encoder(),
        {"num_attention_heads": 7},
        "hidden_size must be a multiple of num_attention_heads (7)",
    ),
    (
        check_unet_config,
        UNET,
        {"attention_head_dim": 4096},
        "attention_head_dim must be at most the channels of its level, not 4096",
    ),
    (
        partial(check_unet_config, added_conditions=False),
        UNET | {"addition_embed_type": None},
        {"addition_embed_type": "text_time"},
        'addition_embed_type must be null, not "text_time": Stable Diffusion 1 and 2 have no added conditions',
    ),
    (
        check_index,
        published_configs.model_index(),
        {"add_watermarker": True},
        (
            "add_watermarker must be false or null, not true: Diffusers would draw a watermark into every picture, "
            "and the suite draws none"
        ),
    ),
    (
        check_index,
        published_configs.model_index(),
        {"scheduler": ["own_code", "MyScheduler"]},
        'scheduler must be ["diffusers", "CLASS"], not ["own_code", "MyScheduler"]',
    ),
    (
        check_unet_config,
        UNET,
        {"down_block_types": ["AttnDownBlock2D"]},
        (
            'down_block_types must be a list of DownBlock2D and CrossAttnDownBlock2D, not ["AttnDownBlock2D"]: the '
            "forward of other blocks is not implemented"
        ),
    ),
    (
        check_unet_config,
        UNET,
        {"block_out_channels": [2]},
        "block_out_channels must be a list of whole numbers from 4 to 8192, one for each level, not [2]",
    ),
    (
        check_unet_config,
        UNET,
        {"mid_block_scale_factor": 0},
        "mid_block_scale_factor must be a number other than 0, not 0",
    ),
    (check_unet_config, UNET, {"norm_eps": -1}, "norm_eps must be a number from 0, not -1"),
    (
        check_unet_config,
        UNET,
        {"cross_attention_dim": [64, 64]},
        (
            "cross_attention_dim must be a whole number from 1, not [64, 64]: all levels attend to the same prompt "
            "embeddings"
        ),
    ),
    (
        check_unet_config,
        UNET,
        {"transformer_layers_per_block": "2"},
        (
            "transformer_layers_per_block must be a whole number from 0 to 64 or a list with a whole number, or a list "
            'of them, for each level, not "2"'
        ),
    ),
    (
        check_unet_config,
        UNET,
        {"reverse_transformer_layers_per_block": 3},
        "reverse_transformer_layers_per_block must be null or a list with an entry for each level, not 3",
    ),
    (check_unet_config, UNET, {"norm_num_groups": 7}, "block_out_channels must be multiples of norm_num_groups (7)"),
    (
        check_vae_config,
        VAE,
        {"down_block_types": ["DownBlock2D"]},
        (
            'down_block_types must be a list of DownEncoderBlock2D and AttnDownEncoderBlock2D, not ["DownBlock2D"]: '
            "VAEs of other blocks are not served"
        ),
    ),
    (
        check_vae_config,
        VAE,
        {"block_out_channels": [0]},
        "block_out_channels must be a list of whole numbers, one for each level, not [0]",
    ),
    (
        check_vae_config,
        VAE,
        {"sample_size": 0},
        (
            "sample_size must be a whole number from 1, not 0: it gives the size of the tiles in which large pictures "
            "may be decoded"
        ),
    ),
    (
        check_vae_config,
        VAE,
        {"sample_size": 1},
        "sample_size must be at least 8, the pixels of one latent element, not 1",
    ),
    (check_vae_config, VAE, {"scaling_factor": 0}, "scaling_factor must be a number other than 0, not 0"),
    (check_vae_config, VAE, {"latents_mean": ["a"]}, 'latents_mean must be null or a list of numbers, not ["a"]'),
    (check_vae_config, VAE, {"latents_std": [0, 1, 1, 1]}, "latents_std must have no 0"),
    (check_vae_config, VAE, {"norm_num_groups": 7}, "block_out_channels must be multiples of norm_num_groups (7)"),
)


SCHEDULERS: tuple[tuple[str, dict[str, object], str], ...] = (
    ("Euler", {"beta_start": 2}, "beta_start must be a number between 0 and 1, not 2"),
    ("Euler", {"trained_betas": [2]}, "trained_betas must be null or a list of numbers between 0 and 1, not [2]"),
    (
        "Euler",
        {"trained_betas": [0.1]},
        "trained_betas must have 1000 numbers, as num_train_timesteps says, not 1",
    ),
    (
        "Euler",
        {"steps_offset": -1},
        "steps_offset must be a whole number from 0, not -1: timesteps are those of training",
    ),
    (
        "Euler",
        {"num_train_timesteps": 10**6},
        (
            "num_train_timesteps must be a whole number from 1 to 100000, not 1000000: each of them takes memory; "
            "published models have 1000"
        ),
    ),
    (
        "Euler",
        {"timestep_type": "odd"},
        'timestep_type must be "discrete" or "continuous", not "odd": Diffusers takes all others for discrete',
    ),
    (
        "Euler",
        {"timestep_type": "continuous", "prediction_type": "v_prediction", "interpolation_type": "log_linear"},
        (
            'interpolation_type must be "linear" with continuous timesteps: with "log_linear" Diffusers makes one step '
            "more than asked"
        ),
    ),
    (
        "Euler",
        {"use_karras_sigmas": True, "use_beta_sigmas": True},
        (
            "use_beta_sigmas must be false with use_karras_sigmas: Diffusers takes one of use_karras_sigmas, "
            "use_exponential_sigmas, use_beta_sigmas"
        ),
    ),
    (
        "DPMSolverMultistep",
        {"variance_type": "learned"},
        'variance_type must be null, not "learned": models that predict a variance beside the noise are not served',
    ),
    (
        "DPMSolverMultistep",
        {"solver_order": 4},
        "solver_order must be 1, 2 or 3, not 4: Diffusers has no other solvers",
    ),
    (
        "DPMSolverMultistep",
        {"sample_max_value": 0},
        "sample_max_value must be a number above 0, not 0: at 0 every value of the picture would be clipped to 0",
    ),
    (
        "DPMSolverMultistep",
        {"lambda_min_clipped": "low"},
        'lambda_min_clipped must be a number or -Infinity, not "low"',
    ),
    (
        "DPMSolverMultistep",
        {"algorithm_type": "dpmsolver", "final_sigmas_type": "sigma_min", "prediction_type": "flow_prediction"},
        'prediction_type must not be "flow_prediction" with algorithm_type "dpmsolver"',
    ),
    (
        "DPMSolverMultistep",
        {"use_flow_sigmas": True, "use_karras_sigmas": True},
        "use_flow_sigmas must be false with use_karras_sigmas: there the noise is more than all of a latent",
    ),
    (
        "UniPCMultistep",
        {"solver_order": 3, "lower_order_final": False},
        'lower_order_final must be true with solver_order 3 and final_sigmas_type "zero"',
    ),
    ("UniPCMultistep", {"predict_x0": False}, 'predict_x0 must be true with final_sigmas_type "zero"'),
    ("UniPCMultistep", {"solver_type": "bh1"}, 'solver_type must be "bh2" with final_sigmas_type "zero", not "bh1"'),
    (
        "UniPCMultistep",
        {"disable_corrector": [-1]},
        "disable_corrector must be [] or a list of whole numbers from 0, not [-1]",
    ),
    (
        "UniPCMultistep",
        {"solver_p": "x"},
        'solver_p must be null, not "x": another solver inside this one is not served',
    ),
    (
        "UniPCMultistep",
        {"use_dynamic_shifting": True},
        "use_dynamic_shifting must be false or null, not true: Diffusers' pipelines do not support it",
    ),
    ("DDIM", {"steps_offset": 1000}, "steps_offset must be below 1000, num_train_timesteps, not 1000"),
    (
        "DDIM",
        {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing", "clip_sample": False},
        (
            'rescale_betas_zero_snr must be false with prediction_type "epsilon" and timestep_spacing "trailing": '
            "Diffusers divides by zero at the last timestep"
        ),
    ),
    (
        "DPMSolverMultistep",
        {"algorithm_type": "sde-dpmsolver", "final_sigmas_type": "sigma_min", "solver_order": 3},
        'solver_order must be 1 or 2 with algorithm_type "sde-dpmsolver", not 3',
    ),
    ("UniPCMultistep", {"shift_terminal": 0.1}, "shift_terminal must be null, not 0.1: it is for flow matching"),
)


@pytest.mark.parametrize(("name", "change", "sentence"), SCHEDULERS)
def test_a_field_of_a_scheduler_that_is_not_served_is_refused(
    name: str, change: dict[str, object], sentence: str
) -> None:
    kind = "EulerDiscreteScheduler" if name == "Euler" else f"{name}Scheduler"
    assert list(check_scheduler_config({"_class_name": kind, **change})) == [sentence]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("CosineDPMSolverMultistepScheduler", "it is for models of sound"),
        ("DPMSolverSDEScheduler", "it needs torchsde, which is not installed with the suite"),
        ("FlowMatchEulerDiscreteScheduler", "it is for models that were trained with flow matching"),
        ("MyScheduler", "this class is not known"),
    ],
)
def test_a_class_that_is_not_served_is_refused_with_the_list_of_those_that_are(name: str, why: str) -> None:
    (sentence,) = check_scheduler_config({"_class_name": name})
    *others, last = SCHEDULER_RULES
    assert sentence == f'_class_name must be {", ".join(others)} or {last}, not "{name}": {why}'


@pytest.mark.parametrize(
    ("check", "config", "change", "sentence"), FIELDS, ids=[next(iter(change)) for _, _, change, _ in FIELDS]
)
def test_a_field_that_is_not_served_is_refused(
    check: _Check, config: Mapping[str, Any], change: dict[str, object], sentence: str
) -> None:
    assert list(check(config)) == []
    assert list(check({**config, **change})) == [sentence]


CONTROLNETS = (
    (
        {"_class_name": "ControlNetXSAdapter"},
        (
            'cannot be served: config.json: _class_name must be "ControlNetModel" or "ControlNetUnionModel", not '
            '"ControlNetXSAdapter": it is another kind of network'
        ),
    ),
    (
        {"conditioning_channels": 1},
        "cannot be served: config.json: conditioning_channels must be 3, not 1: its control images are not RGB",
    ),
    (
        {"num_class_embeds": 4},
        "cannot be served: config.json: num_class_embeds must be null, not 4: it needs class labels",
    ),
    (
        {"encoder_hid_dim": 12},
        "cannot be served: config.json: encoder_hid_dim must be null, not 12: it projects the prompt's embeddings",
    ),
    (
        {"global_pool_conditions": True},
        (
            "cannot be served: config.json: global_pool_conditions must be false or null, not true: it averages its "
            "residuals over the picture"
        ),
    ),
    (
        {"transformer_layers_per_block": [64, 64, 64]},
        "cannot be used: config.json: transformer_layers_per_block: must come to at most 256 in all layers, not 512",
    ),
    (
        {"attention_head_dim": 1024},
        "cannot be used: config.json: attention_head_dim: must be at most the channels of its level",
    ),
    (
        {"norm_num_groups": 7},
        "cannot be used: config.json: norm_num_groups: must divide every entry of block_out_channels, also 320",
    ),
    (
        {"addition_time_embed_dim": None},
        "cannot be used: config.json: addition_time_embed_dim: must be there with addition_embed_type text_time",
    ),
    (
        {"projection_class_embeddings_input_dim": 1},
        (
            "cannot be used: config.json: projection_class_embeddings_input_dim: must be at least 6 times "
            "addition_time_embed_dim"
        ),
    ),
)


@pytest.mark.parametrize(("change", "sentence"), CONTROLNETS, ids=[next(iter(change)) for change, _ in CONTROLNETS])
def test_a_controlnet_that_is_not_served_is_refused(change: dict[str, object], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**published_configs.controlnet(), **change}))
    assert check_controlnet("net", tmp_path, None) == f"ControlNet net {sentence}"


_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0a\nsize 9\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[]", "ControlNet net cannot be used: config.json: is no configuration"),
        (
            _POINTER,
            (
                "ControlNet net cannot be used: config.json is a Git LFS pointer in place of the file; run `git "
                "lfs pull` in its folder"
            ),
        ),
    ],
    ids=["a list", "a pointer"],
)
def test_a_controlnets_configuration_that_is_none_is_refused(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert check_controlnet("net", tmp_path, None) == sentence


_NET = "diffusion_pytorch_model.safetensors"


def _change_net(folder: Path, **tensors: tuple[str, tuple[int, ...]]) -> None:
    changed = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    write_zeros(folder / _NET, tensors_of(folder / _NET) | changed)


def _shard_net(folder: Path, count: int) -> None:
    """Make shards that all have the same tensors."""
    shards = [f"diffusion_pytorch_model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    for shard in shards:
        write_zeros(folder / shard, {"conv_in.bias": ("F16", (48,))})
    index = {"metadata": {}, "weight_map": {f"tensor{number}": shard for number, shard in enumerate(shards)}}
    replace(folder / f"{_NET}.index.json", json.dumps(index))


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (
            lambda folder: (folder / "config.json").unlink(),
            "config.json: there is no such file; download the ControlNet again, with all of its files",
        ),
        (
            lambda folder: (folder / _NET).unlink(),
            f"net has no {_NET}; download the model again, with all of its files",
        ),
        (
            lambda folder: (folder / _NET).rename(folder / "diffusion_pytorch_model.bin"),
            (
                "net has only pickled weights (diffusion_pytorch_model.bin), which are never opened because they may "
                f"run code; download net/{_NET}, or save the model again with safe_serialization=True"
            ),
        ),
        (
            lambda folder: replace(folder / _NET, _POINTER),
            f"{_NET} is a Git LFS pointer in place of the file; run `git lfs pull` in its folder",
        ),
        (
            lambda folder: replace(folder / _NET, bytes(4)),
            (f"{_NET}: it is damaged or cut off (it is shorter than the length of a header); download the file again"),
        ),
        (
            lambda folder: _change_net(folder, conv_in__bias=("I8", (48,))),
            (
                f"{_NET}: the tensor conv_in.bias has elements of I8; quantized weights are not served, download "
                "float32, float16 or bfloat16 ones"
            ),
        ),
        (
            lambda folder: _change_net(folder, conv_in__bias=("F16", (47,)), more=("F16", (1,))),
            (
                "its weights are not those of its config.json: conv_in.bias is [47] and should be [48]; nothing takes "
                "more; download both from one ControlNet"
            ),
        ),
        (
            lambda folder: _shard_net(folder, 2),
            "two of its weight files have tensors of one name; download the ControlNet again",
        ),
        (
            lambda folder: _shard_net(folder, 65),
            "its weights are in 65 files; save the ControlNet in at most 64 shards",
        ),
    ],
)
def test_a_controlnets_folder_that_cannot_be_used_is_refused(
    spoil: Callable[[Path], object], sentence: str, tmp_path: Path
) -> None:
    shutil.copytree(WEIGHTS / "controlnets" / "edges", tmp_path / "net")
    assert check_controlnet("net", tmp_path / "net", None) == ""
    spoil(tmp_path / "net")
    assert check_controlnet("net", tmp_path / "net", None) == f"ControlNet net cannot be used: {sentence}"


def test_a_controlnet_of_another_model_is_refused_with_the_fields_that_differ() -> None:
    base = base_layout({**UNET, "block_out_channels": [320], "addition_embed_type": None}, 8)
    assert check_controlnet("net", WEIGHTS / "controlnets" / "edges", base) == (
        "ControlNet net does not fit the model: its context_width is 128, the model's 2048 (cross_attention_dim); its "
        "pooled_width is 64, the model's 0 (addition_embed_type, addition_time_embed_dim and "
        "projection_class_embeddings_input_dim); its latent_scale is 4, the model's 8 "
        "(conditioning_embedding_out_channels); its residual points are 48/1 48/1 48/1 48/2 96/2 96/2 96/2, the "
        "model's 320/1 320/1 320/1 320/1 (block_out_channels, layers_per_block)"
    )


def test_a_controlnets_single_file_in_place_of_its_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "net.safetensors").touch()
    assert check_controlnet("net", tmp_path / "net.safetensors", None) == (
        "ControlNet net cannot be used: it is a single file; `bottega models import FILE` makes a folder of a "
        ".safetensors file"
    )


@pytest.mark.parametrize(
    ("part", "change", "sentence"),
    [
        (
            "text_encoder_2",
            {"projection_dim": None},
            "text_encoder_2/config.json: projection_dim must be a whole number from 1, not null",
        ),
        (
            "vae",
            {"block_out_channels": [32, 32]},
            "unet/config.json: sample_size must give pictures whose sides are multiples of 8 pixels, not 6",
        ),
    ],
)
def test_parts_that_do_not_fit_each_other_are_refused(part: str, change: dict[str, object], sentence: str) -> None:
    configs = {
        "unet": UNET | {"sample_size": 3},
        "vae": VAE,
        "text_encoder": published_configs.text_encoder(),
        "text_encoder_2": published_configs.text_encoder_2(),
        "tokenizer": {"model_max_length": 77},
        "tokenizer_2": {"model_max_length": 77},
    }
    assert list(check_parts_together(configs)) == []
    assert list(check_parts_together(configs | {part: configs[part] | change})) == [sentence]
