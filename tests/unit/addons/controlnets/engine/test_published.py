"""ControlNets as people publish them, and every field of their configuration: as in Diffusers, or refused by name."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ControlNetModel
from torch import Tensor

from bottega.addons.controlnets.engine import ControlLayout, base_layout, find_controlnet, load_controlnet
from bottega.errors import ControlNetUnusable, InvalidRequest
from bottega.model.backbone import Inputs
from bottega.model_files.controlnet_config import NetworkConfig
from bottega.model_files.controlnet_folder import check_controlnet
from tests.samples import published_configs
from tests.samples.published import Layout, write_controlnet

CPU = torch.device("cpu")
SERVED, REFUSED = "served", "refused"
# Smaller than the tiny one, for many of them.
SMALL: Mapping[str, Any] = {
    "addition_time_embed_dim": 4,
    "attention_head_dim": [1, 1, 2],
    "block_out_channels": [8, 8, 16],
    "conditioning_embedding_out_channels": [4, 4, 4, 4],
    "cross_attention_dim": 12,
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "projection_class_embeddings_input_dim": 8 + 6 * 4,
    "transformer_layers_per_block": [1, 1, 1],
}
# By field, values other than that of a published SDXL ControlNet, and what becomes of each. "refused" names the field.
VALUES: Mapping[str, Sequence[tuple[object, str]]] = {
    "in_channels": [(9, REFUSED)],
    "conditioning_channels": [(1, REFUSED), (6, REFUSED)],
    "flip_sin_to_cos": [(False, SERVED), (None, SERVED)],
    "freq_shift": [(1, SERVED)],
    "down_block_types": [
        (["DownBlock2D"] * 3, SERVED),
        (["CrossAttnDownBlock2D"] * 3, SERVED),
        (["AttnDownBlock2D", "DownBlock2D", "DownBlock2D"], REFUSED),
        (["DownBlock2D"] * 2, REFUSED),
    ],
    "mid_block_type": [("UNetMidBlock2D", SERVED), ("UNetMidBlock2DSimpleCrossAttn", REFUSED)],
    "only_cross_attention": [(True, SERVED), ([False, True, False], SERVED)],
    "block_out_channels": [([8, 8, 8], REFUSED), ([8, 16], REFUSED)],
    "layers_per_block": [(2, REFUSED), ([1, 1, 2], REFUSED)],
    "downsample_padding": [(0, SERVED)],
    "mid_block_scale_factor": [(2.0, SERVED)],
    "act_fn": [(name, SERVED) for name in ("gelu", "mish", "relu", "swish")] + [("geglu", REFUSED)],
    "norm_num_groups": [(2, SERVED), (3, REFUSED)],
    "norm_eps": [(0.01, SERVED)],
    "cross_attention_dim": [(16, REFUSED)],
    "transformer_layers_per_block": [(2, SERVED), ([1, 2, 1], SERVED), ([1, [2], 1], SERVED)],
    "encoder_hid_dim": [(12, REFUSED)],
    "encoder_hid_dim_type": [("text_proj", REFUSED)],
    "attention_head_dim": [(2, SERVED), ([1, 2, 4], SERVED)],
    "num_attention_heads": [(2, SERVED), ([1, 2, 4], SERVED)],
    "use_linear_projection": [(False, SERVED), (None, SERVED)],
    "class_embed_type": [("timestep", REFUSED), ("projection", REFUSED), ("identity", REFUSED)],
    "addition_embed_type": [("text", REFUSED), ("text_image", REFUSED)],
    "addition_time_embed_dim": [(8, REFUSED)],
    "num_class_embeds": [(4, REFUSED)],
    "upcast_attention": [(True, SERVED), (False, SERVED)],
    "resnet_time_scale_shift": [("scale_shift", SERVED), ("ada_group", REFUSED)],
    "projection_class_embeddings_input_dim": [(40, REFUSED)],
    "controlnet_conditioning_channel_order": [("bgr", SERVED), ("gbr", REFUSED)],
    "conditioning_embedding_out_channels": [([4, 8, 4, 2], SERVED), ([4, 4, 4], REFUSED)],
    "global_pool_conditions": [(True, REFUSED), (None, SERVED)],
    "addition_embed_type_num_heads": [(8, SERVED), (None, SERVED)],
}
CASES = [(field, value, fate) for field, values in VALUES.items() for value, fate in values]
# What null makes of fields is null in published files, or false, or refused.
NULLS = sorted(set(VALUES) - {field for field, value, _ in CASES if value is None})


@pytest.fixture(scope="module")
def base() -> ControlLayout:
    unet = published_configs.unet() | {name: value for name, value in SMALL.items() if "embedding_out" not in name}
    return base_layout(unet, 8)


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    generator = torch.Generator().manual_seed(5)
    return Inputs(
        sample=torch.randn(2, 4, 8, 8, generator=generator),
        timestep=torch.tensor([481.0, 481.0]),
        prompt_embeds=torch.randn(2, 5, 12, generator=generator),
        added={
            "text_embeds": torch.randn(2, 8, generator=generator),
            "time_ids": torch.tensor([[64.0, 64, 0, 0, 64, 64]] * 2),
        },
    )


@pytest.fixture(scope="module")
def image() -> Tensor:
    return torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(6))


def test_every_field_of_diffusers_controlnet_is_in_the_table() -> None:
    parameters = inspect.signature(ControlNetModel.__init__).parameters
    assert VALUES.keys() == parameters.keys() - {"self"}


def test_a_field_that_is_missing_has_diffusers_default() -> None:
    signature = inspect.signature(ControlNetModel.__init__).parameters
    assert {name: value for name, value in NetworkConfig().fields.items() if value != signature[name].default} == {}


@pytest.mark.parametrize(("field", "value", "fate"), CASES)
def test_a_field_with_another_value_is_as_in_diffusers_or_refused_by_name(
    base: ControlLayout, inputs: Inputs, image: Tensor, tmp_path: Path, field: str, value: object, fate: str
) -> None:
    folder = _written(tmp_path / "net", {field: value})
    if fate == REFUSED:
        assert field in _refusal(folder, base)
    else:
        _assert_stock(folder, base, inputs, image)


@pytest.mark.parametrize("field", NULLS)
def test_null_is_as_in_diffusers_or_refused_by_name(
    base: ControlLayout, inputs: Inputs, image: Tensor, tmp_path: Path, field: str
) -> None:
    folder = _written(tmp_path / "net", {field: None})
    try:
        _assert_stock(folder, base, inputs, image)
    except (ControlNetUnusable, InvalidRequest) as error:
        assert field in error.message  # noqa: PT017 - either is right


def test_unknown_fields_are_passed_over_as_by_diffusers(
    base: ControlLayout, inputs: Inputs, image: Tensor, tmp_path: Path
) -> None:
    folder = _written(tmp_path / "net", {"brand_new_field": 7, "sample_size": 128})
    _assert_stock(folder, base, inputs, image)


LAYOUTS = {
    "fp16 alone": Layout(variants=("fp16",)),
    "shards": Layout(shards=3),
    "shards of both, named as before": Layout(variants=("", "fp16"), shards=2, legacy_shard_names=True),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_published_folder_has_stocks_residuals(
    base: ControlLayout, inputs: Inputs, image: Tensor, tmp_path: Path, name: str
) -> None:
    folder = _written(tmp_path / "net", {}, LAYOUTS[name])
    _assert_stock(folder, base, inputs, image, variant=None if "" in LAYOUTS[name].variants else "fp16")


def _written(folder: Path, changes: Mapping[str, Any], layout: Layout | None = None) -> Path:
    """Write a small ControlNet; where Diffusers builds nothing of its configuration, with the plain one's weights."""
    try:
        return write_controlnet(folder, layout or Layout(), changes={**SMALL, **changes})
    except Exception:  # noqa: BLE001 - whatever Diffusers raises
        write_controlnet(folder, layout or Layout(), changes=dict(SMALL))
        config = {**published_configs.controlnet(), **SMALL, **changes}
        (folder / "config.json").write_text(json.dumps(config))
        return folder


def _refusal(folder: Path, base: ControlLayout) -> str:
    with pytest.raises((ControlNetUnusable, InvalidRequest)) as refusal:
        find_controlnet("net", folder, base=base, dtype=torch.float32)
    assert check_controlnet("net", folder, base) == refusal.value.message
    return refusal.value.message


def _assert_stock(folder: Path, base: ControlLayout, inputs: Inputs, image: Tensor, variant: str | None = None) -> None:
    ours = load_controlnet(find_controlnet("net", folder, base=base, dtype=torch.float32), CPU)
    assert check_controlnet("net", folder, base) == "", "the checker knows every tensor without building the network"
    residuals = dict(ours.residuals(inputs, [ours.embed(image, rows=2).expand(2, -1, -1, -1)]))
    stock = ControlNetModel.from_pretrained(folder, use_safetensors=True, variant=variant, torch_dtype=torch.float32)
    with torch.inference_mode():
        skips, middle = stock(
            inputs.sample,
            inputs.timestep,
            encoder_hidden_states=inputs.prompt_embeds,
            controlnet_cond=image.expand(2, -1, -1, -1),
            added_cond_kwargs=dict(inputs.added),
            return_dict=False,
        )
    assert float(middle.abs().max()) > 0
    assert len(residuals) == len(skips) + 1
    for point, theirs in enumerate([*skips, middle]):
        assert torch.equal(residuals[point], theirs)
