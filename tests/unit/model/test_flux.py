"""Flux.1: its transformer in blocks, the check of its folders, its defaults and schedules, and what it refuses."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from torch import Tensor

from bottega.engine.encode import encode_prompts
from bottega.engine.limits import EngineLimits, check_drawable
from bottega.engine.request import Request
from bottega.engine.spec import ControlSpec, EmbeddingSpec, ResolvedSpec
from bottega.errors import InvalidRequest
from bottega.model.backbone import GUIDANCE, POOLED, Inputs
from bottega.model.backbones.flux import FluxBackbone
from bottega.model.family import FAMILIES, family_of
from bottega.model.model import Model
from bottega.model.sampler_choices import ModelSamplers, SamplerChoice
from bottega.model.schedulers import SamplerKind
from bottega.model_files.folder_check import check_model_folder
from bottega.v1.engine_pb2 import EngineStart
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.worker_pb2 import RunAttemptRequest
from bottega.worker.engine.messages import model_message
from bottega.worker.engine.orders import order_of
from bottega.worker.engine.runtime import _has_two_rows
from tests.samples.family_models import SIZE, family_model
from tests.support.manual_engine import load
from tests.unit.model.test_stable_diffusion_3 import change, copied

FLOW = SamplerKind.FLOW_MATCH_EULER
SPEC = ResolvedSpec(prompt="a star", num_inference_steps=2, width=SIZE, height=SIZE, sampler=FLOW)
TOY, CONTROL = EmbeddingSpec(name="toy", digest="d", token="<toy>"), ControlSpec(name="x", image_digest="")
KINDS = ("Flux dev", "Flux schnell", "Flux Fill")


@pytest.fixture(scope="module")
def models() -> Mapping[str, Model]:
    return {kind: load(family_model(kind)) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_blocks_compute_the_bits_of_the_whole_transformer(models: Mapping[str, Model], kind: str) -> None:
    network: FluxTransformer2DModel = models[kind].backbone.network
    torch.manual_seed(0)
    height, width, channels = 12, 8, network.config.in_channels // 4
    latent, prompt, pooled = torch.randn(3, 16, height, width), torch.randn(3, 20, 96), torch.randn(3, 32)
    mask, image = torch.randn(3, channels - 32 if channels > 16 else 0, height, width), torch.randn_like(latent)
    timestep, guidance = torch.tensor([900.0, 500.0, 20.0]), torch.tensor([3.5, 1.0, 30.0])
    read = [latent, image, mask] if channels > 16 else [latent]
    embeds = kind != "Flux schnell"
    theirs = network(
        hidden_states=torch.cat([_packed(each) for each in read], dim=2),
        timestep=timestep / 1000,
        guidance=guidance if embeds else None,
        pooled_projections=pooled,
        encoder_hidden_states=prompt,
        txt_ids=torch.zeros(20, 3),
        img_ids=FluxPipeline._prepare_latent_image_ids(3, height // 2, width // 2, "cpu", torch.float32),
        return_dict=False,
    )[0]
    inputs = Inputs(
        # The engine's rows have the mask before the masked image.
        sample=torch.cat([latent, mask, image] if channels > 16 else [latent], dim=1),
        timestep=timestep,
        prompt_embeds=prompt,
        added={POOLED: pooled, **({GUIDANCE: guidance[:, None]} if embeds else {})},
    )
    backbone = FluxBackbone(network)
    state = backbone.begin(inputs)
    for block in backbone.blocks:
        block.run(state)
    assert torch.equal(backbone.finish(state), FluxPipeline._unpack_latents(theirs, 4 * height, 4 * width, 4))
    assert [block.name for block in backbone.blocks][1:3] == ["transformer_blocks.1", "single_transformer_blocks.0"]


def _packed(latent: Tensor) -> Tensor:
    packed: Tensor = FluxPipeline._pack_latents(latent, *latent.shape)
    return packed


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_it_can_be_served(kind: str) -> None:
    report = check_model_folder(family_model(kind))
    assert (report.problems, report.family, report.default_size) == ((), "flux", 4 * 128)


@pytest.mark.parametrize(
    ("kind", "file", "changes", "problem"),
    [
        ("dev", "transformer/config.json", {"patch_size": 2}, "patch_size must be 1, not 2"),
        ("dev", "transformer/config.json", {"axes_dims_rope": [2, 6]}, "axes_dims_rope must be a list of 3 even"),
        ("dev", "transformer/config.json", {"axes_dims_rope": [2, 3, 3]}, "axes_dims_rope must be a list of 3 even"),
        ("dev", "transformer/config.json", {"axes_dims_rope": [2, 2, 2]}, "attention_head_dim must be 6, the sum of"),
        ("dev", "transformer/config.json", {"in_channels": 128}, "in_channels must be 64, or 192 where a mask is read"),
        ("dev", "transformer/config.json", {"out_channels": 32}, "out_channels must be 64, by the VAE's 16"),
        ("Fill", "transformer/config.json", {"out_channels": None}, "out_channels must be 64, by the VAE's 16"),
        ("dev", "transformer/config.json", {"guidance_embeds": False}, "tensors have no place in the network"),
        ("schnell", "transformer/config.json", {"guidance_embeds": True}, "tensors are missing, such as time_text"),
        ("dev", "transformer/config.json", {"num_single_layers": 3}, "such as single_transformer_blocks.2"),
        ("dev", "transformer/config.json", {"pooled_projection_dim": 31}, "must be 32, hidden_size of text_encoder,"),
        ("dev", "text_encoder_2/config.json", {"d_model": 64}, "joint_attention_dim must be 64, d_model of text_enc"),
        ("dev", "text_encoder_2/config.json", {"vocab_size": 20}, "it has 30 tokens and the text encoder knows 20"),
        ("dev", "tokenizer/tokenizer_config.json", {"model_max_length": 99}, "must be at most 24, max_position"),
        ("dev", "vae/config.json", {"shift_factor": "0.1"}, "shift_factor must be"),
        ("dev", "model_index.json", {"_class_name": "FluxKontextPipeline"}, "only FluxPipeline, FluxImg2ImgPipeline"),
        ("dev", "model_index.json", {"_class_name": "Flux2Pipeline"}, "this is a FLUX.2 model"),
        ("dev", "model_index.json", {"text_encoder_2": [None, None]}, 'text_encoder_2 must be ["transformers", "T5E'),
        ("dev", "model_index.json", {"scheduler": ["diffusers", "DDIMScheduler"]}, "were trained with flow matching"),
    ],
)
def test_a_folder_that_differs_is_refused(
    tmp_path: Path, kind: str, file: str, changes: Mapping[str, Any], problem: str
) -> None:
    folder = copied(f"Flux {kind}", tmp_path)
    change(folder / file, **changes)
    assert any(problem in found for found in check_model_folder(folder).problems), check_model_folder(folder).problems


def test_defaults_are_those_of_dev_schnell_and_fill(models: Mapping[str, Model], tmp_path: Path) -> None:
    defaults = {kind: model.defaults for kind, model in models.items()}
    assert {
        kind: (each.num_inference_steps, each.guidance_scale, each.edit_guidance_scale, each.strength)
        for kind, each in defaults.items()
    } == {
        "Flux dev": (28, 3.5, 7.0, 0.6),
        "Flux schnell": (4, 0.0, 0.0, 0.6),
        "Flux Fill": (50, 30.0, 30.0, 0.6),
    }
    assert [each.edit_strength for each in defaults.values()] == [0.6, 0.6, 1.0]
    assert [model.family.prompt_tokens["text_encoder_2"] for model in models.values()] == [512, 256, 512]
    # A model made from dev without its guidance embedding, which needs as many steps.
    folder = copied("Flux schnell", tmp_path)
    change(folder / "scheduler/scheduler_config.json", use_dynamic_shifting=True)
    family = family_of(check_model_folder(folder))
    assert (family.num_inference_steps, family.prompt_tokens["text_encoder_2"]) == (28, 512)


def test_only_true_cfg_makes_a_second_row(models: Mapping[str, Model]) -> None:
    model = models["Flux dev"]
    for spec, rows in (
        (replace(SPEC, guidance_scale=7.5, negative_prompt="a circle"), 1),
        (replace(SPEC, true_cfg_scale=1.0, negative_prompt="a circle"), 1),
        (replace(SPEC, true_cfg_scale=1.1, negative_prompt=""), 2),
    ):
        request = Request(model, spec, encode_prompts(model, spec))
        assert (request.row_count, len(request.rows())) == (rows, rows)
        assert all(row.embeds.added[GUIDANCE].tolist() == [spec.guidance_scale] for row in request.rows())


def test_a_worker_says_and_takes_what_concerns_true_cfg(models: Mapping[str, Model]) -> None:
    said = [model_message(model, max_pixels=1) for model in models.values()]
    assert [(each.embeds_guidance, each.takes_true_cfg) for each in said] == [(True, True), (True, True), (True, False)]
    sent = GenerationSpec(prompt="a star", negative_prompt="", true_cfg_scale=2.5)
    assert order_of(EngineStart(request=RunAttemptRequest(spec=sent)), models["Flux dev"]).spec.true_cfg_scale == 2.5


def test_a_worker_says_what_a_pair_brings(models: Mapping[str, Model], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert [_has_two_rows(model) for model in models.values()] == [True, True, False]
    texts = [record.getMessage() for record in caplog.records]
    assert ["only requests with a true_cfg_scale above 1" in text for text in texts] == [True, True, False]
    assert texts[-1].startswith("engine.peer is not used: a pair shares the two rows of a guided request")


@pytest.mark.parametrize("shifts", [True, False])
def test_sigmas_are_even_before_their_shift(shifts: bool) -> None:
    config = {
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "shift": 3.0,
        "use_dynamic_shifting": shifts,
        "base_image_seq_len": 16,
        "max_image_seq_len": 64,
    }
    samplers = ModelSamplers(config, steps=4, sigmas=FAMILIES["flux"].sigmas)
    for steps in (4, 1):
        stock = FlowMatchEulerDiscreteScheduler.from_config(config)
        stock.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=0.825)
        ours = samplers.open(SamplerChoice(kind=FLOW), steps=steps, tokens=40)
        assert [float(ours.timestep(step)) for step in range(steps)] == pytest.approx(stock.timesteps.tolist())
        assert samplers.refusal(SamplerChoice(kind=FLOW), steps) == ""


@pytest.mark.parametrize(
    ("kind", "changes", "problem"),
    [
        ("dev", {"width": 36}, "must be a multiple of 8 with this model"),
        ("dev", {"weighted": True}, "must be plain: Flux.1 reads no weighted prompts"),
        ("dev", {"clip_skip": 1}, "must be 0 with this model, which reads no text encoder's states between layers"),
        ("dev", {"embeddings": (TOY,)}, "must have no embedding (toy): none are served with Flux.1; use a LoRA"),
        (
            "Fill",
            {"controlnets": (CONTROL,)},
            "must be empty: this kind of model (Flux.1) is served without ControlNets",
        ),
        ("dev", {"cfg_normalization": 1.0}, "must be 0, which is off: only models of Z-Image take it"),
        ("dev", {"cfg_truncation": 0.5}, "must be 1, which is off: only models of Z-Image take it"),
        ("dev", {"sampler": SamplerKind.DDIM}, "it is for models that predict noise"),
        ("dev", {"true_cfg_scale": 2.0}, "needs negative_prompt, which may be empty"),
        (
            "Fill",
            {"true_cfg_scale": 2.0, "negative_prompt": "x"},
            "only models of Flux.1 take it, and Flux.1 Fill does",
        ),
        ("Fill", {}, "must be set: this is an inpainting model, which only edits pictures"),
    ],
)
def test_what_it_cannot_draw_is_refused(
    models: Mapping[str, Model], kind: str, changes: Mapping[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        check_drawable(replace(SPEC, **changes), EngineLimits(max_pixels=1 << 20), models[f"Flux {kind}"])
    assert any(problem in violation.description for violation in raised.value.violations)
