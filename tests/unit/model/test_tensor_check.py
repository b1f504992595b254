"""The tensors that the checker expects of a configuration are those of the networks that it builds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from bottega.model_files.tensor_check import text_encoder_tensors, unet_tensors, vae_tensors
from tests.samples import published_configs as configs
from tests.samples.published_configs import TINY

_ATTENTIVE = ["CrossAttnDownBlock2D"] * 3, ["CrossAttnUpBlock2D"] * 3


def _shapes(network: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="SDXL's kind"),
        pytest.param({"layers_per_block": 1}, id="one layer"),
        pytest.param({"layers_per_block": [1, 2, 3]}, id="layers by level"),
        pytest.param({"transformer_layers_per_block": 2}, id="one depth"),
        pytest.param({"transformer_layers_per_block": [0, 0, 3]}, id="no transformers in a level"),
        pytest.param(
            {
                "transformer_layers_per_block": [[1], [1, 2], [2, 1]],
                "reverse_transformer_layers_per_block": [[1, 2, 0], [3, 1, 1], 2],
            },
            id="depth by layer",
        ),
        pytest.param({"attention_head_dim": 3}, id="heads that do not divide the channels"),
        pytest.param({"use_linear_projection": False}, id="convolutions around transformers"),
        pytest.param({"only_cross_attention": True}, id="attention to the prompt alone"),
        pytest.param({"only_cross_attention": [True, False, True]}, id="attention to the prompt alone by level"),
        pytest.param({"mid_block_type": None}, id="no middle"),
        pytest.param({"mid_block_type": "UNetMidBlock2D"}, id="a middle without attention"),
        pytest.param({"down_block_types": _ATTENTIVE[0], "up_block_types": _ATTENTIVE[1]}, id="attention everywhere"),
        pytest.param({"resnet_time_scale_shift": "scale_shift"}, id="scale and shift"),
        pytest.param({"time_embedding_dim": 48}, id="width of the time's embedding"),
        pytest.param({"conv_in_kernel": 1, "conv_out_kernel": 5}, id="kernels"),
        pytest.param({"in_channels": 9, "out_channels": 8}, id="channels"),
        pytest.param({"cross_attention_dim": 40}, id="width of the prompt"),
    ],
)
def test_of_a_unet_every_name_and_shape_is_known(changes: dict[str, Any]) -> None:
    with torch.device("meta"):
        network: Any = UNet2DConditionModel.from_config(configs.unet() | TINY["unet"] | changes)
    assert dict(unet_tensors({**network.config, **_lists(network.config)})) == _shapes(network)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="SDXL's kind"),
        pytest.param({"layers_per_block": 1, "latent_channels": 8}, id="fewer layers, more channels"),
        pytest.param({"mid_block_add_attention": False}, id="no attention"),
        pytest.param({"use_quant_conv": False, "use_post_quant_conv": False}, id="no convolutions of the latent"),
        pytest.param(
            {"down_block_types": ["AttnDownEncoderBlock2D"] * 4, "up_block_types": ["AttnUpDecoderBlock2D"] * 4},
            id="attention everywhere",
        ),
    ],
)
def test_of_a_vae_every_name_and_shape_is_known(changes: dict[str, Any]) -> None:
    with torch.device("meta"):
        network: Any = AutoencoderKL.from_config(configs.vae() | TINY["vae"] | changes)
    assert dict(vae_tensors({**network.config, **_lists(network.config)})) == _shapes(network)


@pytest.mark.parametrize("projects", [False, True])
def test_of_a_text_encoder_every_name_and_shape_is_known(projects: bool) -> None:
    part, kind = ("text_encoder_2", CLIPTextModelWithProjection) if projects else ("text_encoder", CLIPTextModel)
    config = getattr(configs, part)() | TINY[part]
    with torch.device("meta"):
        network = kind(CLIPTextConfig(**config))
    shapes = {name.removeprefix("text_model."): shape for name, shape in _shapes(network).items()}
    assert dict(text_encoder_tensors(config, projects=projects)) == shapes


def _lists(config: Any) -> dict[str, Any]:
    """Return the fields that Diffusers keeps as tuples as the lists that they are in JSON."""
    return {name: list(value) for name, value in config.items() if isinstance(value, tuple)}
