"""Stable Diffusion 3: its transformer in blocks, the check of its folders, its schedules, and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from bottega.device.heartbeat import call_after_blocks
from bottega.engine.encode import LatentPreview, encode_image, to_latent
from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits, check_drawable
from bottega.engine.spec import EmbeddingSpec, ResolvedSpec
from bottega.errors import InvalidRequest
from bottega.model.backbone import POOLED, Inputs
from bottega.model.backbones.stable_diffusion_3 import Sd3Backbone
from bottega.model.model import Model
from bottega.model.sampler_choices import ModelSamplers, SamplerChoice
from bottega.model.schedulers import SamplerKind
from bottega.model_files.folder_check import check_model_folder
from bottega.schedules import Schedule
from tests.samples.family_models import SIZE, family_model
from tests.support.engines import make_engine
from tests.support.manual_engine import ManualEngine, load

FLOW = SamplerKind.FLOW_MATCH_EULER
SPEC = ResolvedSpec(prompt="a star", num_inference_steps=2, width=SIZE, height=SIZE, sampler=FLOW)
CONFIG: Mapping[str, Any] = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}


@pytest.fixture(scope="module")
def model() -> Model:
    return load(family_model("SD 3.5"))


@pytest.mark.parametrize("height", [8, 12])
@torch.inference_mode()
def test_blocks_compute_the_bits_of_the_whole_transformer(model: Model, height: int) -> None:
    network: SD3Transformer2DModel = model.backbone.network
    torch.manual_seed(0)
    sample, prompt, pooled = torch.randn(3, 16, height, 8), torch.randn(3, 20, 96), torch.randn(3, 64)
    timestep, residuals = torch.tensor([900.0, 500.0, 20.0]), [torch.randn(3, height * 2, 32) for _ in range(2)]
    arguments = {"hidden_states": sample, "encoder_hidden_states": prompt, "pooled_projections": pooled}
    theirs = network(**arguments, timestep=timestep, return_dict=False)[0]
    inputs = Inputs(sample=sample, timestep=timestep, prompt_embeds=prompt, added={POOLED: pooled})
    assert torch.equal(_run(Sd3Backbone(network), inputs, []), theirs)
    controlled = network(
        **arguments, timestep=timestep, block_controlnet_hidden_states=[*residuals, residuals[-1]], return_dict=False
    )[0]
    assert torch.equal(_run(Sd3Backbone(network), inputs, residuals), controlled)
    assert not torch.equal(controlled, theirs)


def _run(backbone: Sd3Backbone, inputs: Inputs, residuals: list[Tensor]) -> Tensor:
    """Run the blocks, and add the residuals of a ControlNet at their points."""
    state = backbone.begin(inputs)
    for block in backbone.blocks:
        for point in block.needs if residuals else ():
            state.points[point] += residuals[point]
        block.run(state)
    return backbone.finish(state)


def copied(family: str, folder: Path) -> Path:
    """Return a copy of a model's folder, for changes."""
    copy: Path = shutil.copytree(family_model(family), folder / "model")
    return copy


def change(file: Path, **changes: Any) -> None:
    """Set fields of a JSON file."""
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | changes))


@pytest.mark.parametrize("family", ["SD 3", "SD 3.5", "SD 3 no T5"])
def test_a_folder_of_it_can_be_served(family: str) -> None:
    report = check_model_folder(family_model(family))
    assert (report.problems, report.family, report.default_size) == ((), "sd3", SIZE)
    assert ("text_encoder_3" in report.parts) is (family != "SD 3 no T5")


@pytest.mark.parametrize(
    ("file", "changes", "problem"),
    [
        ("transformer/config.json", {"qk_norm": "layer_norm"}, "qk_norm must be null or"),
        ("transformer/config.json", {"caption_projection_dim": 48}, "caption_projection_dim must be 32, attention"),
        ("transformer/config.json", {"pos_embed_max_size": 3}, "pos_embed_max_size must be at least 4"),
        ("transformer/config.json", {"dual_attention_layers": [3]}, "must be below num_layers (3), not [3]"),
        ("transformer/config.json", {"num_layers": 4}, "tensors are missing, such as transformer_blocks"),
        ("transformer/config.json", {"pooled_projection_dim": 63}, "pooled_projection_dim must be 64"),
        ("text_encoder_3/config.json", {"d_model": 64}, "joint_attention_dim must be 64, d_model of text_encoder_3"),
        ("text_encoder_3/config.json", {"vocab_size": 20}, "it has 30 tokens and the text encoder knows 20"),
        ("text_encoder_3/config.json", {"feed_forward_proj": "gelu"}, "feed_forward_proj must be"),
        ("tokenizer_3/tokenizer.json", {"model": {"type": "BPE"}}, "it is no Unigram tokenizer"),
        ("tokenizer_3/tokenizer_config.json", {"pad_token": "<none>"}, "the vocabulary lacks <none>, the pad_token"),
        ("text_encoder_3/config.json", {"is_decoder": True}, "is_decoder must be false"),
        ("text_encoder_3/config.json", {"return_dict": False}, "return_dict must be true"),
        (
            "text_encoder_3/config.json",
            {"dense_act_fn": "relu"},
            'dense_act_fn must be "gelu_new" with feed_forward_proj',
        ),
        ("tokenizer_3/tokenizer.json", {"added_tokens": [{"content": ["x"]}]}, "added_tokens have no content"),
        ("scheduler/scheduler_config.json", {"stochastic_sampling": True}, "stochastic_sampling must be false"),
        ("scheduler/scheduler_config.json", {"invert_sigmas": True}, "invert_sigmas must be false or null"),
        ("model_index.json", {"scheduler": ["diffusers", "DDIMScheduler"]}, "were trained with flow matching"),
        ("model_index.json", {"tokenizer_3": [None, None]}, "must both be there, or both be [null, null]"),
        ("model_index.json", {"transformer": ["diffusers", "X"]}, 'transformer must be ["diffusers", "SD3Trans'),
    ],
)
def test_a_folder_that_differs_is_refused(tmp_path: Path, file: str, changes: Mapping[str, Any], problem: str) -> None:
    folder = copied("SD 3", tmp_path)
    change(folder / file, **changes)
    assert any(problem in found for found in check_model_folder(folder).problems), check_model_folder(folder).problems


def test_a_copy_of_the_token_embeddings_of_t5_is_accepted(tmp_path: Path) -> None:
    folder = copied("SD 3", tmp_path)
    file = folder / "text_encoder_3" / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "encoder.embed_tokens.weight": tensors["shared.weight"].clone()}, file)
    assert not check_model_folder(folder).problems


def test_dynamic_shifts_depend_on_the_size_of_the_picture() -> None:
    config = {**CONFIG, "use_dynamic_shifting": True, "base_image_seq_len": 16, "max_image_seq_len": 64}
    samplers = ModelSamplers(config, steps=4)
    for tokens, mu in ((16, 0.5), (64, 1.15), (40, 0.825)):
        stock = FlowMatchEulerDiscreteScheduler.from_config(config)
        stock.set_timesteps(4, mu=mu)
        ours = samplers.open(SamplerChoice(kind=FLOW), steps=4, tokens=tokens)
        assert [float(ours.timestep(step)) for step in range(4)] == pytest.approx(stock.timesteps.tolist())


@pytest.mark.parametrize("kind", ["use_karras_sigmas", "use_exponential_sigmas"])
def test_schedules_are_those_of_diffusers(kind: str) -> None:
    config = {**CONFIG, kind: True}
    stock, ours = FlowMatchEulerDiscreteScheduler.from_config(config), ModelSamplers(config, steps=3)
    stock.set_timesteps(3)
    theirs = mine = torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(1))
    karras = kind == "use_karras_sigmas"
    schedule = Schedule(use_exponential_sigmas=True) if kind == "use_exponential_sigmas" else Schedule()
    sampler = ours.open(SamplerChoice(kind=FLOW, karras=karras, schedule=schedule), steps=3)
    for step, timestep in enumerate(stock.timesteps):
        theirs = stock.step(torch.tanh(theirs), timestep, theirs, return_dict=False)[0]
        mine, _ = sampler.step(torch.tanh(sampler.model_input(mine, step)), step, mine, None)
    assert torch.equal(mine, theirs)


def test_samplers_fit_how_a_model_was_trained() -> None:
    flows = ModelSamplers(CONFIG, steps=4)
    assert flows.refusal(SamplerChoice(kind=FLOW), 4) == ""
    why = flows.refusal(SamplerChoice(kind=SamplerKind.EULER), 4)
    assert why == "it is for models that predict noise, and this one was trained with flow matching"
    diffuses = ModelSamplers({"_class_name": "EulerDiscreteScheduler"}, steps=4)
    assert diffuses.refusal(SamplerChoice(kind=FLOW), 4) == "it is for models that were trained with flow matching"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"width": 12 * 8 + 8}, "must be at most 96 with this model"),
        ({"width": 36}, "must be a multiple of 8 with this model"),
        ({"weighted": True}, "must be plain: Stable Diffusion 3 reads no weighted prompts"),
        ({"clip_skip": 2}, "must be 0 to 1 with this model"),
        ({"max_sequence_length": 513}, "must be 1 to 512 with this model"),
        (
            {"embeddings": (EmbeddingSpec(name="toy", digest="d", token="<toy>"),)},
            "must have no embedding (toy): none are served with Stable Diffusion 3; use a LoRA",
        ),
        ({"sampler": SamplerKind.DDIM}, "it is for models that predict noise"),
    ],
)
def test_what_it_cannot_draw_is_refused(model: Model, changes: Mapping[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        check_drawable(replace(SPEC, **changes), EngineLimits(max_pixels=1 << 20), model)
    assert any(problem in violation.description for violation in raised.value.violations)


def test_text_encoders_give_signs_of_life(model: Model) -> None:
    for part, encoder in zip(model.family.text_encoders, model.text_encoders, strict=True):
        beats: list[int] = []
        call_after_blocks([encoder], lambda beats=beats: beats.append(1))  # type: ignore[misc]
        encoder(torch.tensor([[1, 2, 3]]))
        assert len(beats) >= encoder.config.num_hidden_layers, part


def test_a_shift_of_the_last_step_needs_two(model: Model) -> None:
    samplers = ModelSamplers({**CONFIG, "shift_terminal": 0.1}, steps=4)
    (steps,) = samplers.refused_steps(SamplerChoice(kind=FLOW))
    assert steps == 1
    assert samplers.refusal(SamplerChoice(kind=FLOW), 1)
    assert not samplers.refusal(SamplerChoice(kind=FLOW), 2)


def test_previews_are_the_same_whatever_shift_the_latents_have(model: Model) -> None:
    pixels = torch.randint(0, 256, (32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    own, previews = model.vae.config.shift_factor, list[Tensor]()
    assert own
    for shift in (None, 3.0, own):
        model.vae.register_to_config(shift_factor=shift)
        with torch.inference_mode():
            latent = to_latent(model, encode_image(model, pixels).mean)
        previews.append(LatentPreview.fit(model).draw(latent).int())
    assert previews[0].float().std() > 1
    assert all((preview - previews[0]).abs().max() <= 1 for preview in previews)


def test_t5_reads_more_of_a_long_prompt_than_clip(model: Model) -> None:
    words = " ".join(["star"] * 100)
    drawing = ManualEngine(make_engine(model, EngineLimits())).draw(
        EngineOrder(key="it", spec=replace(SPEC, prompt=words))
    )
    cuts = drawing.record.provenance.truncations
    assert {encoder for cut in cuts for encoder in cut.encoders} == {
        "text_encoder",
        "text_encoder_2",
        "text_encoder_3",
    }
    lost = {encoder: len(cut.text) for cut in cuts for encoder in cut.encoders}
    assert lost["text_encoder_3"] < lost["text_encoder"]
    assert np.isfinite(drawing.pixels[0]).all()
