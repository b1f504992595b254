"""Every field of the UNet's, the VAE's and the text encoders' configurations: pictures equal stock's, or it is refused.

Each case changes one field of a tiny model in the published layout. Where the rules allow the value, the engine draws
what stock Diffusers draws; elsewhere the rules name the field. A field that a new version of a library adds fails the
first tests until it has a rule and a case.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLInpaintPipeline,
    UNet2DConditionModel,
)
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection
from transformers.activations import ACT2FN

from bottega.addons.controlnets.engine import base_layout
from bottega.addons.edits.engine.masked.backbone import MaskedBackbone
from bottega.addons.edits.engine.masked.checks import unsupported
from bottega.addons.edits.engine.masked.work import blocks_of
from bottega.addons.edits.engine.sparse.maps import SparseMaps
from bottega.engine.denoiser import Denoiser
from bottega.engine.encode import LatentPreview, encode_prompts
from bottega.engine.forward import Network, stack
from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.spec import ResolvedSpec
from bottega.errors import ConfigError, FieldNotServed
from bottega.model.backbones.unet import UNetBackbone
from bottega.model.model import Model
from bottega.model.rows import Embeds, Row
from bottega.model.vae import VaeSettings, make_decoder
from bottega.model_files.configuration_rules import ACTIVATIONS, TEXT_ENCODER_RULES, check_configurations, filled_config
from bottega.model_files.family_names import SDXL, class_of
from bottega.model_files.field_rules import FieldRule
from bottega.model_files.folder_check import check_model_folder
from bottega.model_files.tensor_check import text_encoder_tensors, unet_tensors, vae_tensors
from bottega.model_files.unet_rules import UNET_RULES
from bottega.model_files.vae_rules import VAE_RULES
from tests.samples import published_configs as published
from tests.samples.edits import box_mask, edit_order, template
from tests.samples.masked_networks import LATENT as SIDE
from tests.samples.masked_networks import StepInMemory, box, masked, plain_row, recording
from tests.samples.published import published_model
from tests.samples.published_configs import TINY
from tests.support.engines import make_engine
from tests.support.manual_engine import ManualEngine, load
from tests.support.stock import (
    Pixels,
    assert_close,
    edit_options,
    latent_of,
    load_stock,
    pixels_of,
    said,
    variant,
)

Configs = dict[str, dict[str, Any]]

PARTS = ("unet", "vae", "text_encoder", "text_encoder_2")
SPEC = ResolvedSpec(
    prompt="a big red star on the left", num_inference_steps=2, width=32, height=32, seed=3, guidance_scale=4.0
)
CPU = torch.device("cpu")
IMAGE, MASK = template(32, 32), box_mask((4, 8, 20, 28), 32, 32)
# Fields of the UNet's that pipelines read, too; with others the network alone is another one.
OF_PIPELINES = {
    "addition_embed_type",
    "addition_time_embed_dim",
    "cross_attention_dim",
    "in_channels",
    "out_channels",
    "projection_class_embeddings_input_dim",
    "sample_size",
    "time_cond_proj_dim",
}
# Fields of the VAE's that count when latents are put back; in an edit others do what they do in a redrawn image.
OF_EDITS = {"block_out_channels", "latents_mean", "latents_std", "sample_size", "scaling_factor", "shift_factor"}


class Slow(NamedTuple):
    """A value that goes the way of another one of its field, which is drawn with in every run."""

    value: Any


# By part, for each field: values other than the published ones. A list is one value.
UNET: dict[str, tuple[Any, ...]] = {
    "sample_size": (4, Slow(5), None, [8, 8], 8.0, 0),
    "in_channels": (8, 9, None),
    "out_channels": (8, None),
    "center_input_sample": (True, Slow(None)),
    "flip_sin_to_cos": (False, Slow(None)),
    "freq_shift": (1, 2, None),
    "down_block_types": (
        ["CrossAttnDownBlock2D"] * 3,
        ["DownBlock2D"] * 3,
        ["ResnetDownsampleBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        ["DownBlock2D", "SimpleCrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        ["AttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        ["KDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        ["UNetResDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        ["DownBlock2D", "CrossAttnDownBlock2D"],
        None,
    ),
    "mid_block_type": (None, "UNetMidBlock2D", "UNetMidBlock2DSimpleCrossAttn"),
    "up_block_types": (
        ["CrossAttnUpBlock2D"] * 3,
        ["UpBlock2D"] * 3,
        ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "ResnetUpsampleBlock2D"],
        ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "AttnUpBlock2D"],
        ["CrossAttnUpBlock2D", "UpBlock2D"],
    ),
    "only_cross_attention": (True, [False, True, False], [True], None),
    "block_out_channels": ([32, 64, 64], [32, 64], [32, 48, 96], [2, 64, 96], 32),
    "layers_per_block": (1, [1, 2, 1], [1, 2], 0, None),
    "downsample_padding": (0, 2, None),
    "mid_block_scale_factor": (2, Slow(0.5), 0, None),
    "dropout": (0.5, 2.0, None),
    "act_fn": ("gelu", Slow("mish"), Slow("relu"), Slow("swish"), "tanh", None),
    "norm_num_groups": (16, 5, None),
    "norm_eps": (1e-2, Slow(0), -1, None),
    "cross_attention_dim": (64, [96, 96, 96], None),
    "transformer_layers_per_block": (1, 0, [1, 0, 2], Slow([0, 1, 1]), [1, [1, 1], 2], [1, 1], None),
    "reverse_transformer_layers_per_block": ([1, 2, 1], [[1, 2, 1], 1, 1], [[1, 2], 1, 1], [1, 1], 1),
    "encoder_hid_dim": (96, 64),
    "encoder_hid_dim_type": ("text_proj", "text_image_proj", "image_proj", "ip_image_proj"),
    "attention_head_dim": (2, Slow(8), [1, 3, 5], [1, 2], [1, 2, 97], 0, None),
    "num_attention_heads": (2, [1, 2, 3]),
    "dual_cross_attention": (True, Slow(None)),
    "use_linear_projection": (False, Slow(None)),
    "class_embed_type": ("timestep", "identity", "projection", "simple_projection"),
    "addition_embed_type": (None, "text", "text_image", "image", "image_hint"),
    "addition_time_embed_dim": (16, None),
    "num_class_embeds": (10,),
    "upcast_attention": (True, Slow(False)),
    "resnet_time_scale_shift": ("scale_shift", "ada_group", "spatial", None),
    "resnet_skip_time_act": (True, Slow(None)),
    "resnet_out_scale_factor": (2.0, Slow(0), Slow(None)),
    "time_embedding_type": ("fourier", None),
    "time_embedding_dim": (64, Slow(0)),
    "time_embedding_act_fn": ("silu", Slow("gelu"), "tanh"),
    "timestep_post_act": ("silu", Slow("mish"), "tanh"),
    "time_cond_proj_dim": (32, Slow(256)),
    "conv_in_kernel": (1, Slow(5), 4, [3, 3], None),
    "conv_out_kernel": (1, 5, 4, [3, 3], None),
    "projection_class_embeddings_input_dim": (64, None),
    "attention_type": ("gated", "gated-text-image", Slow(None)),
    "class_embeddings_concat": (True, Slow(None)),
    "mid_block_only_cross_attention": (True, Slow(False)),
    "cross_attention_norm": ("layer_norm", "group_norm"),
    "addition_embed_type_num_heads": (8, Slow(None)),
}
VAE: dict[str, tuple[Any, ...]] = {
    "in_channels": (1, 4),
    "out_channels": (1, 4),
    "down_block_types": (
        ["AttnDownEncoderBlock2D"] * 4,
        ["DownEncoderBlock2D"] * 3,
        ["DownBlock2D"] * 4,
    ),
    "up_block_types": (
        ["AttnUpDecoderBlock2D"] * 4,
        ["UpDecoderBlock2D"] * 3,
        ["UpBlock2D"] * 4,
    ),
    "block_out_channels": ([32, 32, 32, 32], [32, 64, 64], [32, 48, 64, 64], 32),
    "layers_per_block": (1, Slow(3), 0, [2, 2, 2, 2]),
    "act_fn": ("gelu", Slow("mish"), Slow("relu"), Slow("swish"), "tanh"),
    "latent_channels": (8,),
    "norm_num_groups": (16, 7, None),
    "sample_size": (32, Slow(1024), 4, [64, 64], None),
    "scaling_factor": (Slow(1.0), 0.18215, 0, None),
    "shift_factor": (0, 0.1159),
    "latents_mean": ([0.5, -1.0, 0.25, 2.0], [0.5]),
    "latents_std": (Slow([0.5, 1.0, 2.0, 4.0]), [0.5], [0, 1, 1, 1]),
    "force_upcast": (False, Slow(None)),
    "use_quant_conv": (False,),
    "use_post_quant_conv": (False,),
    "mid_block_add_attention": (False,),
}
# Fields that count for the second text encoder otherwise than for the first: it projects, and pools by the last token.
OF_EACH_ENCODER = {"architectures", "eos_token_id", "hidden_size", "num_hidden_layers", "projection_dim", "vocab_size"}
TEXT_ENCODER: dict[str, tuple[Any, ...]] = {
    "vocab_size": (700, 0),
    "hidden_size": (48, None),
    "intermediate_size": (64, None),
    "projection_dim": (48, None),
    "num_hidden_layers": (1, 2, 0),
    "num_attention_heads": (1, 3, 0),
    "max_position_embeddings": (100, 32),
    "hidden_act": (*ACTIVATIONS, "nonsense", None),
    "layer_norm_eps": (1e-2, None),
    "attention_dropout": (0.5, None),
    "initializer_range": (0.5,),
    "initializer_factor": (0.5, None),
    "pad_token_id": (3, None),
    "bos_token_id": (7, None),
    "eos_token_id": (2, 662, 5, None, [662, 2]),
    "dtype": ("float16", "bfloat16"),
    "return_dict": (False, None),
    "output_hidden_states": (True, None),
    "chunk_size_feed_forward": (4,),
    "is_encoder_decoder": (True,),
    "transformers_version": ("4.32.0.dev0",),
    "architectures": (["CLIPModel"], None),
    "id2label": ({"0": "one", "1": "two"},),
    "label2id": ({"one": 0},),
    "problem_type": ("regression",),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One value of one field, and what else must be changed for a model that is whole."""

    part: str
    name: str
    value: Any
    more: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    is_slow: bool = False

    def __str__(self) -> str:
        return f"{self.part}.{self.name}={json.dumps(self.value)[:40]}{' with others' if self.more else ''}"

    @property
    def configs(self) -> Configs:
        configs = tiny_configs()
        for part, changes in self.more.items():
            configs[part].update(changes)
        configs[self.part][self.name] = self.value
        return configs


def unwrapped(value: Any) -> Any:
    return value.value if isinstance(value, Slow) else value


def cases() -> list[Case]:
    tables = {"unet": UNET, "vae": VAE, "text_encoder": TEXT_ENCODER, "text_encoder_2": TEXT_ENCODER}
    return [
        Case(part=part, name=name, value=unwrapped(value), is_slow=isinstance(value, Slow))
        for part, table in tables.items()
        for name, values in table.items()
        for value in values
    ] + [Case(part=part, name=name, value=value, more=more) for part, name, value, more in WITH_OTHERS]


# Fields of the index that change nothing of a picture; each by itself is tried slowly.
_IGNORED: dict[str, Any] = {
    "add_watermarker": False,
    "requires_aesthetics_score": False,
    "image_encoder": ["transformers", "CLIPVisionModelWithProjection"],
    "feature_extractor": ["transformers", "CLIPImageProcessor"],
    "safety_checker": [None, None],
}
# By file and field, values of what model_index.json and the tokenizers say; ... takes the field away.
FILES: dict[str, dict[str, tuple[Any, ...]]] = {
    "model_index.json": {
        "force_zeros_for_empty_prompt": (False, Slow(None), ...),
        "add_watermarker": (Slow(False), True, Slow(...)),
        "requires_aesthetics_score": (Slow(False), Slow(None), True),
        "image_encoder": (Slow([None, None]), Slow(None), Slow(_IGNORED["image_encoder"])),
        "feature_extractor": (Slow([None, None]), Slow(None), Slow(_IGNORED["feature_extractor"])),
        "safety_checker": (Slow([None, None]),),
        "unet": (["diffusers", "UNet3DConditionModel"], [None, None], None, ...),
        "vae": (["diffusers", "AutoencoderTiny"], ["diffusers", "ConsistencyDecoderVAE"]),
        "text_encoder": ([None, None], ["transformers", "CLIPTextModelWithProjection"]),
        "text_encoder_2": ([None, None], ["transformers", "T5EncoderModel"], ["transformers", "CLIPTextModel"]),
        "tokenizer": (["transformers", "CLIPTokenizerFast"], ["transformers", "T5Tokenizer"], [None, None]),
        "tokenizer_2": (["my_library", "CLIPTokenizer"],),
    },
    "tokenizer/tokenizer_config.json": {
        "model_max_length": (20, 78, "77", 0, None, 1e30, ...),
        "pad_token": ("!",),
        "padding_side": ("left",),
        "do_lower_case": (False,),
        "unk_token": ("!",),
    },
    "tokenizer_2/tokenizer_config.json": {"pad_token": ("<|endoftext|>",), "model_max_length": (20, ...)},
}
# Values that need others beside them, and these, by part.
_EIGHT_CHANNELS = {"in_channels": 8, "out_channels": 8}
_LEVELS = {"down_block_types": ["DownEncoderBlock2D"] * 3, "up_block_types": ["UpDecoderBlock2D"] * 3}
_MIRRORED = {"reverse_transformer_layers_per_block": [[1, 2, 1], [1, 1, 2], 1]}
_WITHOUT_MIDDLE = {"mid_block_type": None, "transformer_layers_per_block": [1, 1, 1]}
_STATISTICS = {"latents_std": [1.0] * 8, "latent_channels": 8}
WITH_OTHERS: tuple[tuple[str, str, Any, dict[str, dict[str, Any]]], ...] = (
    ("unet", "in_channels", 8, {"unet": {"out_channels": 8}, "vae": {"latent_channels": 8}}),
    ("unet", "transformer_layers_per_block", [0, [1, 2], [2, 1]], {"unet": _MIRRORED}),
    ("unet", "reverse_transformer_layers_per_block", [[1, 1, 2], 1, 1], {"unet": _WITHOUT_MIDDLE}),
    ("unet", "class_embeddings_concat", True, {"unet": {"class_embed_type": "timestep"}}),
    ("unet", "encoder_hid_dim", 96, {"unet": {"encoder_hid_dim_type": "text_proj"}}),
    ("unet", "projection_class_embeddings_input_dim", 64 + 6 * 16, {"unet": {"addition_time_embed_dim": 16}}),
    ("text_encoder", "hidden_size", 64, {"unet": {"cross_attention_dim": 128}}),
    ("text_encoder_2", "projection_dim", 32, {"unet": {"projection_class_embeddings_input_dim": 32 + 6 * 32}}),
    ("vae", "latents_mean", [0.5, -1.0, 0.25, 2.0], {"vae": {"latents_std": [0.5, 1.0, 2.0, 4.0]}}),
    ("vae", "latents_mean", [0.0] * 8, {"vae": _STATISTICS, "unet": _EIGHT_CHANNELS}),
    ("vae", "block_out_channels", [32, 64, 64], {"vae": _LEVELS}),
)


def tiny_configs() -> Configs:
    """Return the configurations of the tiny published model."""
    configs = {part: getattr(published, part)() | TINY[part] for part in PARTS}
    for name, pad_token in (("tokenizer", published.END), ("tokenizer_2", "!")):
        configs[name] = published.tokenizer(pad_token)["tokenizer_config.json"]
    return configs | {"scheduler": published.scheduler()}


class Pair:
    """The tiny model twice, as stock Diffusers and as the engine have it, with parts to replace."""

    def __init__(self) -> None:
        self.stock = load_stock(published_model())
        self.model = load(published_model())

    def with_parts(self, configs: Configs, changed: set[str]) -> tuple[Any, Model]:
        """Return a stock pipeline and a model whose changed parts are built from these configurations."""
        parts = {part: built(part, configs[part]) for part in PARTS if part in changed}
        stock = variant(self.stock, **parts)
        model = self.model
        encoders = stock.text_encoder, stock.text_encoder_2
        model = replace(model, text_encoders=encoders)
        if "unet" in parts:
            model = replace(model, backbone=UNetBackbone(parts["unet"]))
        if "vae" in parts:
            decoder = make_decoder(parts["vae"], device=CPU, dtype=torch.float32, settings=VaeSettings())
            model = replace(model, vae=parts["vae"], decoder=decoder, latent_scale=stock.vae_scale_factor)
        return stock, model


def built(part: str, config: Mapping[str, Any]) -> nn.Module:
    """Return a part with random weights, as stock builds it from a file of this content."""
    values = json.loads(json.dumps(config))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if part == "unet":
            made: Any = UNet2DConditionModel.from_config(values)
        elif part == "vae":
            made = AutoencoderKL.from_config(values)
            nn.init.normal_(made.decoder.conv_out.weight, std=0.03)
        else:
            kind = CLIPTextModel if part == "text_encoder" else CLIPTextModelWithProjection
            made = kind(CLIPTextConfig(**values))
    network: nn.Module = made.float().eval()
    return network


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair()


def quick_and_slow() -> list[Any]:
    """Return all cases. Fields in which the text encoders do not differ are tried with the first one, else slowly."""
    slow = [
        case.is_slow or (case.part == "text_encoder_2" and case.name not in OF_EACH_ENCODER and not case.more)
        for case in cases()
    ]
    return [
        pytest.param(case, id=str(case), marks=[pytest.mark.slow] if is_slow else [])
        for case, is_slow in zip(cases(), slow, strict=True)
    ]


@pytest.mark.parametrize("case", quick_and_slow())
def test_a_value_draws_what_stock_draws_or_its_field_is_refused(case: Case, pair: Pair) -> None:
    configs = case.configs
    problems = check_configurations(published.model_index(), configs)
    if problems:
        assert any(case.name in problem for problem in problems), problems
        return
    stock, model = pair.with_parts(configs, {case.part, *case.more})
    assert_tensors_are_known(case.part, configs[case.part], getattr(stock, case.part))
    if case.part == "unet":
        # A network that reads a mask draws only edits; tests/unit/engine/test_families.py compares those.
        if (case.name in OF_PIPELINES or case.more) and not model.image_channels:
            assert_draws_as_stock(stock, model)
        predicted = assert_predicts_as_stock(model.backbone.network)
        assert_masks_as_plain(model, predicted)
        assert_controlled_as_it_is(model)
    elif case.part == "vae":
        assert_redraws_as_stock(stock, model)
        if case.name in OF_EDITS:
            assert_edits_as_stock(stock, model)
    else:
        assert_encodes_as_stock(stock, model, "a circle")


def assert_tensors_are_known(part: str, config: Mapping[str, Any], network: nn.Module) -> None:
    """The checker of folders asks for the tensors that the configuration builds, and for no others."""
    filled = filled_config(class_of(part, SDXL), config)
    built_shapes = {name.removeprefix("text_model."): tuple(each.shape) for name, each in network.state_dict().items()}
    match part:
        case "unet":
            expected = unet_tensors(filled)
        case "vae":
            expected = vae_tensors(filled)
        case _:
            expected = text_encoder_tensors(filled, projects=part == "text_encoder_2")
    assert dict(expected) == built_shapes


def engine_of(model: Model) -> ManualEngine:
    """Return an engine without a fitted preview, which would take longer than the picture and is not asked for."""
    with patch.object(LatentPreview, "fit", lambda _: LatentPreview(torch.zeros(1, 3))):
        return ManualEngine(make_engine(model, EngineLimits()))


def assert_draws_as_stock(stock: Any, model: Model) -> None:
    drawing = engine_of(model).draw(EngineOrder(key="it", spec=SPEC))
    assert_close(drawing.latents[0], latent_of(stock, SPEC, width=SPEC.width, height=SPEC.height))


@torch.inference_mode()
def assert_predicts_as_stock(unet: UNet2DConditionModel) -> Tensor:
    """The engine's blocks, one after the other, predict what the network's own forward does. Return that."""
    row = some_row(unet)
    (ours,) = noise_of(UNetBackbone(unet), None, row)
    theirs = unet(
        row.sample[None],
        row.timestep,
        encoder_hidden_states=row.embeds.prompt[None],
        added_cond_kwargs={name: tensor[None] for name, tensor in row.embeds.added.items()},
    ).sample
    assert_close(ours, theirs[0])
    return ours


def assert_redraws_as_stock(stock: Any, model: Model) -> None:
    spec = replace(SPEC, strength=0.5)
    order = EngineOrder(key="it", spec=spec, image=torch.from_numpy(np.array(IMAGE)))
    drawing = engine_of(model).draw(order)
    pipeline = variant(stock, StableDiffusionXLImg2ImgPipeline)
    generator = torch.Generator().manual_seed(spec.seed)
    theirs = pipeline(**said(spec), image=IMAGE, strength=spec.strength, generator=generator)
    assert_within_a_level(drawing.pixels[0], pixels_of(theirs.images[0]))


def assert_edits_as_stock(stock: Any, model: Model) -> None:
    """An edit ends as the inpainting pipeline does; a VAE with statistics of its latents is refused for edits."""
    spec = replace(SPEC, strength=0.5)
    drawing = engine_of(model).draw(edit_order(spec, IMAGE, MASK))
    if model.vae.config.latents_mean is not None and model.vae.config.latents_std is not None:
        assert isinstance(drawing.error, FieldNotServed)
        assert "its VAE has latents_mean and latents_std" in drawing.error.message
        return
    pipeline = variant(stock, StableDiffusionXLInpaintPipeline)
    generator = torch.Generator().manual_seed(spec.seed)
    theirs = pipeline(**said(spec), **edit_options(spec, IMAGE, MASK), generator=generator)
    assert_within_a_level(drawing.pixels[0], pixels_of(theirs.images[0]))


def assert_encodes_as_stock(stock: Any, model: Model, negative: str | None) -> None:
    """Both halves' embeddings are stock's to the last bit."""
    spec = replace(SPEC, negative_prompt=negative)
    conditions = encode_prompts(model, spec)
    with torch.inference_mode():
        theirs = stock.encode_prompt(spec.prompt, device="cpu", negative_prompt=spec.negative_prompt)
    assert conditions.unconditional is not None
    ours = [
        embeds
        for half in (conditions.conditional, conditions.unconditional)
        for embeds in (half.prompt, half.added["text_embeds"])
    ]
    prompt, negative, pooled, negative_pooled = theirs
    for mine, reference in zip(ours, (prompt, pooled, negative, negative_pooled), strict=True):
        assert torch.equal(mine, reference[0])


def assert_controlled_as_it_is(model: Model) -> None:
    """The shapes that a ControlNet must have, as its configuration says, are those of the network's residual points."""
    unet = model.backbone.network
    activations = model.backbone.begin(stack([some_row(unet)]))
    for block in model.backbone.blocks[: len(unet.down_blocks) + 1]:
        block.run(activations)
    shapes = [tuple(activations.points[point].shape[1:]) for point in sorted(activations.points)]
    assert base_layout(unet.config, model.latent_scale).shapes(*SIDE) == shapes


def assert_within_a_level(ours: Pixels, theirs: Pixels) -> None:
    """No value is off by more than 1. Of so small a picture, a few values that are rounded up are a large share."""
    assert ours.shape == theirs.shape
    assert np.abs(ours.astype(int) - theirs.astype(int)).max() <= 1


def assert_masks_as_plain(model: Model, plain: Tensor) -> None:
    """An edit that takes what is unmasked from a recording of its own inputs predicts what the plain network does."""
    unet = model.backbone.network
    if unsupported(unet):
        return  # edits of such a model are computed by the plain network
    row, recorded = some_row(unet), StepInMemory()
    masking = MaskedBackbone(unet, maps=SparseMaps())
    (recording_,) = noise_of(masking, masking, recording(row, recorded))
    (edited,) = noise_of(masking, masking, masked(row, recorded, box(5, 6, 4, 7)))
    assert {name for block in blocks_of(unet, SIDE) for name in block.names} == recorded.outputs.keys()
    scale = max(1.0, float(plain.abs().max()))
    assert float((recording_ - plain).abs().max()) <= 1e-5 * scale
    assert float((edited - plain).abs().max()) <= 5e-3 * scale  # recordings have 11 bits


def noise_of(backbone: UNetBackbone, masks: MaskedBackbone | None, row: Row) -> list[Tensor]:
    strategies = () if masks is None else (masks,)
    return list(Denoiser(Network(backbone=backbone, strategies=strategies)).predict([row]).noise.values())


def some_row(unet: UNet2DConditionModel) -> Row:
    """A row with random inputs for a network of any widths."""
    config, generator = unet.config, torch.Generator().manual_seed(5)
    pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    embeds = Embeds(
        prompt=torch.randn(7, config.cross_attention_dim, generator=generator),
        added={"text_embeds": torch.randn(pooled, generator=generator), "time_ids": torch.full((6,), 32.0)},
    )
    sample = torch.randn(config.in_channels, *SIDE, generator=generator)
    return plain_row(5, embeds=embeds, sample=sample)


def defaults_of(signature: inspect.Signature) -> dict[str, object]:
    """Return the defaults of an initializer's parameters, as JSON writes them."""
    return {
        name: json.loads(json.dumps(parameter.default))
        for name, parameter in signature.parameters.items()
        if name != "self"
    }


@pytest.mark.parametrize(
    ("rules", "table", "defaults"),
    [
        (UNET_RULES, UNET, defaults_of(inspect.signature(UNet2DConditionModel.__init__))),
        (VAE_RULES, VAE, defaults_of(inspect.signature(AutoencoderKL.__init__))),
        (
            TEXT_ENCODER_RULES,
            TEXT_ENCODER,
            {each.name: each.default for each in dataclasses.fields(CLIPTextConfig)},
        ),
    ],
    ids=["UNet", "VAE", "text encoder"],
)
def test_every_field_has_a_rule_with_its_default_and_a_case(
    rules: tuple[FieldRule, ...], table: Mapping[str, object], defaults: Mapping[str, object]
) -> None:
    ruled = {rule.name: rule.default for rule in rules}
    assert {name: ruled.get(name, "no rule") for name in defaults} == dict(defaults)
    assert table.keys() == defaults.keys()
    # No initializer names these; the libraries read them from the files.
    read_from_files = {"_class_name", "model_type", "quantization_config", "use_attention_mask"}
    assert ruled.keys() - defaults.keys() <= read_from_files


def test_every_activation_of_a_text_encoder_is_one_of_transformers() -> None:
    assert set(ACTIVATIONS) <= set(ACT2FN)


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        pytest.param(
            file,
            name,
            unwrapped(value),
            id=f"{file}: {name}={'absent' if unwrapped(value) is ... else json.dumps(unwrapped(value))}",
            marks=[pytest.mark.slow] if isinstance(value, Slow) else [],
        )
        for file, fields in FILES.items()
        for name, values in fields.items()
        for value in values
    ],
)
def test_of_index_and_tokenizers_a_value_draws_what_stock_draws_or_is_refused(
    tmp_path: Path, pair: Pair, file: str, name: str, value: Any
) -> None:
    folder = changed(tmp_path / "model", file, name, value)
    problems = check_model_folder(folder).problems
    if problems:
        assert any(name in problem or "SDXL's refiner" in problem for problem in problems), problems
        with pytest.raises(ConfigError, match=re.escape(problems[0])):
            load(folder)
        return
    # Only IP-Adapters use the first two, which are not written here, and prompts need no UNet and no VAE.
    parts: dict[str, Any] = {"image_encoder": None, "feature_extractor": None}
    parts |= {name: getattr(pair.stock, name) for name in PARTS}
    stock, model = load_stock(folder, **parts), load(folder)
    for negative in (None, "", "a circle"):
        assert_encodes_as_stock(stock, model, negative)


def test_an_index_with_all_fields_that_change_no_picture_encodes_as_stock(tmp_path: Path, pair: Pair) -> None:
    for name, value in _IGNORED.items():
        folder = changed(tmp_path / "model", "model_index.json", name, value)
    assert check_model_folder(folder).problems == ()
    parts: dict[str, Any] = {"image_encoder": None, "feature_extractor": None}
    parts |= {name: getattr(pair.stock, name) for name in PARTS}
    assert_encodes_as_stock(load_stock(folder, **parts), load(folder), "a circle")


def test_two_tokenizers_of_another_length_encode_as_stock(tmp_path: Path) -> None:
    folder = changed(tmp_path / "model", "tokenizer/tokenizer_config.json", "model_max_length", 20)
    folder = changed(folder, "tokenizer_2/tokenizer_config.json", "model_max_length", 20)
    assert check_model_folder(folder).problems == ()
    assert_encodes_as_stock(load_stock(folder), load(folder), "a circle")


def changed(folder: Path, file: str, name: str, value: Any) -> Path:
    """Return the folder, made as a copy of the tiny model's where it is not there, with another value in a file."""
    if not folder.exists():
        source = published_model()
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("controlnets"), copy_function=os.link)
    fields = json.loads((folder / file).read_text()) | {name: value}
    if value is ...:
        del fields[name]
    (folder / file).unlink()  # a link to the tiny model's own
    (folder / file).write_text(json.dumps(fields))
    return folder


def test_a_word_with_several_embeddings_encodes_as_stock(pair: Pair) -> None:
    """As a textual inversion of three vectors that was saved with the model: Diffusers writes them all for the word."""
    tokenizers, encoders = copy.deepcopy(pair.model.tokenizers), copy.deepcopy(pair.model.text_encoders)
    for tokenizer, encoder in zip(tokenizers, encoders, strict=True):
        tokenizer.add_tokens(["<cat>", "<cat>_1", "<cat>_2", "<dog>"])
        encoder.resize_token_embeddings(len(tokenizer))
    model = replace(pair.model, tokenizers=tokenizers, text_encoders=encoders)
    named = ("tokenizer", "tokenizer_2", "text_encoder", "text_encoder_2")
    stock = variant(pair.stock, **dict(zip(named, (*tokenizers, *encoders), strict=True)))
    for prompt in ("a <cat> on the left", "a <dog> and a <cat>"):
        assert_encodes_as_stock(stock, model, prompt)
