"""Configurations that are not served are refused in one exact sentence, which names the field."""

from __future__ import annotations

import dataclasses
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
)
from bottega.model_files.control_layout import base_layout
from bottega.model_files.controlnet_folder import check_controlnet
from bottega.model_files.scheduler_check import check_scheduler_config
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
        check_text_encoder_config,
        published_configs.text_encoder(),
        {"use_attention_mask": True},
        "use_attention_mask must be false or null, not true: prompts are encoded without an attention mask",
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
        {"num_attention_heads": 7},
        "hidden_size must be a multiple of num_attention_heads (7)",
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
        {"scheduler": ["own_code", "MyScheduler"]},
        'scheduler must be ["diffusers", "CLASS"], not ["own_code", "MyScheduler"]',
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
        {"transformer_layers_per_block": "2"},
        (
            "transformer_layers_per_block must be a whole number from 0 to 64 or a list with a whole number, or a list "
            'of them, for each level, not "2"'
        ),
    ),
    (check_vae_config, VAE, {"latents_mean": ["a"]}, 'latents_mean must be null or a list of numbers, not ["a"]'),
)


_CONTINUOUS: dict[str, object] = {"timestep_type": "continuous", "prediction_type": "v_prediction"}
_NO_PICTURE: dict[str, object] = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing", "clip_sample": False}
_TO_SIGMA_MIN: dict[str, object] = {"final_sigmas_type": "sigma_min"}
_FLOW: dict[str, object] = {"prediction_type": "flow_prediction"}
# Class, what is changed, and what must be; the sentence goes on with the reason.
SCHEDULERS: tuple[tuple[str, dict[str, object], str], ...] = (
    ("EulerDiscrete", {"beta_start": 2}, "beta_start must be a number between 0 and 1, not 2"),
    ("EulerDiscrete", {"steps_offset": -1}, "steps_offset must be a whole number from 0, not -1"),
    (
        "EulerDiscrete",
        {"num_train_timesteps": 10**6},
        "num_train_timesteps must be a whole number from 1 to 100000, not 1000000",
    ),
    ("EulerDiscrete", {"timestep_type": "odd"}, 'timestep_type must be "discrete" or "continuous", not "odd"'),
    (
        "EulerDiscrete",
        _CONTINUOUS | {"interpolation_type": "log_linear"},
        'interpolation_type must be "linear" with continuous timesteps',
    ),
    (
        "EulerDiscrete",
        {"use_karras_sigmas": True, "use_beta_sigmas": True},
        "use_beta_sigmas must be false with use_karras_sigmas",
    ),
    ("DPMSolverMultistep", {"solver_order": 4}, "solver_order must be 1, 2 or 3, not 4"),
    ("DPMSolverMultistep", {"sample_max_value": 0}, "sample_max_value must be a number above 0, not 0"),
    (
        "DPMSolverMultistep",
        {"algorithm_type": "dpmsolver", **_TO_SIGMA_MIN, **_FLOW},
        'prediction_type must not be "flow_prediction" with algorithm_type "dpmsolver"',
    ),
    (
        "DPMSolverMultistep",
        {"use_flow_sigmas": True, "use_karras_sigmas": True},
        "use_flow_sigmas must be false with use_karras_sigmas",
    ),
    (
        "UniPCMultistep",
        {"disable_corrector": [-1]},
        "disable_corrector must be [] or a list of whole numbers from 0, not [-1]",
    ),
    ("DDIM", {"steps_offset": 1000}, "steps_offset must be below 1000, num_train_timesteps, not 1000"),
    (
        "DDIM",
        _NO_PICTURE,
        'rescale_betas_zero_snr must be false with prediction_type "epsilon" and timestep_spacing "trailing"',
    ),
    (
        "DPMSolverMultistep",
        {"algorithm_type": "sde-dpmsolver", **_TO_SIGMA_MIN, "solver_order": 3},
        'solver_order must be 1 or 2 with algorithm_type "sde-dpmsolver", not 3',
    ),
)


@pytest.mark.parametrize(("name", "change", "rule"), SCHEDULERS)
def test_a_field_of_a_scheduler_that_is_not_served_is_refused(name: str, change: dict[str, object], rule: str) -> None:
    (sentence,) = check_scheduler_config({"_class_name": f"{name}Scheduler", **change})
    assert sentence.partition(": ")[0] == rule


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
            'cannot be served: config.json: _class_name must be "ControlNetModel", "ControlNetUnionModel", '
            '"SD3ControlNetModel" or "FluxControlNetModel", not "ControlNetXSAdapter": it is another kind of network'
        ),
    ),
    (
        {"conditioning_channels": 1},
        "cannot be served: config.json: conditioning_channels must be 3, not 1: its control images are not RGB",
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


def test_the_layout_of_z_image_names_its_family() -> None:
    fields = {"in_channels": 16, "cap_feat_dim": 2560, "dim": 3840, "n_layers": 30, "all_patch_size": [2]}
    base = base_layout(fields, 8)
    assert base.base == "16/2x2 tokens of z_image 3840"
    of_unet = dataclasses.replace(base, transformer="", patch=0)
    (why,) = of_unet.misfits(base)
    assert why == "it is made for a UNet, and the model is a transformer of Z-Image (_class_name)"
