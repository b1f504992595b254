"""Z-Image: its transformer in blocks, the check of its folders, how it reads prompts, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ZImageTransformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bottega.device.heartbeat import call_after_blocks
from bottega.engine.acceleration.graphs import GraphedBackbone, RecordedForwards
from bottega.engine.denoiser import Denoiser
from bottega.engine.encode import encode_prompts, sample_conditions
from bottega.engine.forward import Network
from bottega.engine.limits import EngineLimits, check_drawable, check_fixed_rows
from bottega.engine.prompt_chunks import chat_chunk
from bottega.engine.request import Request
from bottega.engine.spec import ControlSpec, EmbeddingSpec, ResolvedSpec
from bottega.errors import InvalidRequest
from bottega.model.backbone import Backbone, Inputs
from bottega.model.backbones.z_image import ZImageBackbone
from bottega.model.loading import load_model
from bottega.model.model import Model
from bottega.model.packed import mixed_backbone
from bottega.model.rows import Embeds, Half, Row, condition_parts, read_conditions
from bottega.model.schedulers import SamplerKind
from bottega.model.step_cache import StepCache
from bottega.model_files.digest import model_digest
from bottega.model_files.folder_check import check_model_folder
from bottega.model_files.presets import propose_preset
from tests.samples.family_models import SIZE, Z_IMAGE, chat_tokenizer, family_model
from tests.support.manual_engine import load
from tests.support.replayed_capture import ReplayedCapture
from tests.unit.model.test_stable_diffusion_3 import change, copied

FLOW = SamplerKind.FLOW_MATCH_EULER
SPEC = ResolvedSpec(prompt="a star", num_inference_steps=2, width=SIZE, height=SIZE, sampler=FLOW)
EMBEDDING, CONTROL = EmbeddingSpec(name="x", digest="d", token="<x>"), ControlSpec(name="x", image_digest="")
TEMPLATE = "tokenizer/chat_template.jinja"


@pytest.fixture(scope="module")
def model() -> Model:
    return load(family_model(Z_IMAGE))


@pytest.mark.parametrize("lengths", [(20, 20, 20), (64, 64, 64), (5, 40, 70)])
@torch.inference_mode()
def test_blocks_compute_the_bits_of_the_whole_transformer(model: Model, lengths: Sequence[int]) -> None:
    network: ZImageTransformer2DModel = model.backbone.network
    torch.manual_seed(0)
    latent, prompts = torch.randn(3, 16, 12, 8), [torch.randn(length, 32) for length in lengths]
    timestep = torch.tensor([900.0, 500.0, 20.0])
    theirs = network(list(latent.unsqueeze(2).unbind()), (1000 - timestep) / 1000, prompts, return_dict=False)[0]
    inputs = Inputs(
        sample=latent,
        timestep=timestep,
        prompt_embeds=pad_sequence(prompts, batch_first=True),
        prompt_lengths=lengths if len(set(lengths)) > 1 else (),
    )
    backbone = ZImageBackbone(network)
    assert torch.equal(_run(backbone, inputs), -torch.stack(theirs).squeeze(2))
    # Rows that have left a forward change nothing for the others.
    state = backbone.begin(inputs)
    state.select([0, 2], torch.tensor([0, 2]))
    for block in backbone.blocks:
        block.run(state)
    assert torch.allclose(backbone.finish(state), _run(backbone, inputs)[[0, 2]], atol=1e-5)


def _rows(model: Model, sizes: Sequence[tuple[int, int, int]], **options: Any) -> list[Row]:
    """Return a row for each height, width and number of tokens of a prompt."""
    chance = torch.Generator().manual_seed(0)
    return [
        Row(
            owner=owner,
            step=0,
            half=Half.CONDITIONAL,
            sample=torch.randn(16, height, width, generator=chance),
            timestep=torch.tensor(900.0 - 100 * owner),
            embeds=Embeds(prompt=torch.randn(tokens, 32, generator=chance), any_length=True),
            **options,
        )
        for owner, (height, width, tokens) in enumerate(sizes)
    ]


@torch.inference_mode()
def test_the_padding_of_rows_of_several_sizes_changes_none(model: Model) -> None:
    """Also where some reuse a step, which neither other rows nor their padding decide."""
    rows = _rows(model, [(8, 8, 5), (12, 8, 70), (8, 8, 40), (20, 12, 5)])
    denoiser = Denoiser(Network(backbone=model.backbone, packed=mixed_backbone(model.backbone)))
    alone = [denoiser.forward([row]).noise[row] for row in rows]
    caches = (StepCache(), None, None, StepCache())
    rows = [replace(row, step_cache=cache) for row, cache in zip(rows, caches, strict=True)]
    for company, reused in ((rows, 0), ([rows[0], rows[2]], 1), (rows[::-1], 2)):
        prediction = denoiser.forward(company)
        assert len(prediction.reused) == reused
        for row in company:
            assert torch.allclose(prediction.noise[row], alone[rows.index(row)], atol=1e-5)


@torch.inference_mode()
def test_graphs_are_recorded_for_prompts_of_one_length(model: Model) -> None:
    plain, capture = ZImageBackbone(model.backbone.network), ReplayedCapture()
    graphed = GraphedBackbone(plain, RecordedForwards(budget_bytes=1 << 30), capture)
    torch.manual_seed(0)
    for _ in range(4):
        for lengths in ((40, 40), (20, 20), (40, 20), (20, 40)):
            inputs = Inputs(
                sample=torch.randn(2, 16, 12, 8),
                timestep=torch.tensor([900.0, 500.0]),
                prompt_embeds=pad_sequence([torch.randn(length, 32) for length in lengths], batch_first=True),
                prompt_lengths=lengths,
            )
            assert torch.allclose(_run(graphed, inputs), _run(plain, inputs), atol=1e-5)
    assert (capture.recorded, capture.launched) == (2, 4)


def _run(backbone: Backbone, inputs: Inputs) -> Tensor:
    state = backbone.begin(inputs)
    for block in backbone.blocks:
        block.run(state)
    return backbone.finish(state)


def test_a_folder_of_it_can_be_served(model: Model) -> None:
    report = check_model_folder(family_model(Z_IMAGE))
    assert (report.problems, report.family, report.default_size) == ((), "z_image", 4 * 128)
    assert (model.size_multiple, model.max_side, model.max_clip_skip) == (8, 64 * 2 * 4, 0)


def test_names_of_published_text_encoders_are_read(tmp_path: Path) -> None:
    folder = copied(Z_IMAGE, tmp_path)
    file = folder / "text_encoder/model.safetensors"
    tensors = load_file(file)
    save_file(
        {"lm_head.weight": tensors["embed_tokens.weight"].clone()}
        | {f"model.{name}": tensor for name, tensor in tensors.items()},
        file,
        metadata={"format": "pt"},
    )
    assert not check_model_folder(folder).problems
    (encoder,) = load(folder).text_encoders
    assert torch.equal(encoder.get_input_embeddings().weight, tensors["embed_tokens.weight"])


@pytest.mark.parametrize(
    ("file", "changes", "problem"),
    [
        ("transformer/config.json", {"all_patch_size": [2, 4]}, "all_patch_size must be [2], not [2, 4]"),
        ("transformer/config.json", {"siglip_feat_dim": 8}, "transformers that read pictures beside the prompt"),
        ("transformer/config.json", {"axes_dims": [4, 2, 1]}, "axes_dims must be a list of 3 even numbers"),
        ("transformer/config.json", {"axes_dims": [4, 2]}, "axes_dims must be a list of 3 even numbers"),
        ("transformer/config.json", {"axes_dims": [4, 4, 4]}, "dim must be 48, the sum of axes_dims times n_heads"),
        ("transformer/config.json", {"axes_lens": [512, 64, 64]}, "axes_lens must begin with at least 514"),
        ("transformer/config.json", {"n_layers": 4}, "tensors are missing, such as layers.3"),
        ("transformer/config.json", {"n_refiner_layers": 2}, "tensors are missing, such as noise_refiner.1"),
        ("transformer/config.json", {"qk_norm": False}, "tensors have no place in the network"),
        ("transformer/config.json", {"cap_feat_dim": 64}, "must be 32, hidden_size of text_encoder, not 64"),
        ("transformer/config.json", {"in_channels": 4}, "in_channels must be 16, latent_channels of vae, not 4"),
        ("text_encoder/config.json", {"model_type": "qwen2"}, 'model_type must be "qwen3"'),
        ("text_encoder/config.json", {"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads (3)"),
        ("text_encoder/config.json", {"num_key_value_heads": None}, "layers.0.self_attn.k_proj.weight has the shape"),
        ("text_encoder/config.json", {"attention_bias": True}, "such as layers.0.self_attn.q_proj.bias"),
        ("text_encoder/config.json", {"vocab_size": 200}, "and the text encoder knows 200 tokens (vocab_size)"),
        ("model_index.json", {"_class_name": "ZImageOmniPipeline"}, "only ZImagePipeline, ZImageImg2ImgPipeline"),
        ("model_index.json", {"tokenizer": ["transformers", "CLIPTokenizer"]}, 'tokenizer must be ["transformers", "Q'),
        ("model_index.json", {"scheduler": ["diffusers", "DDIMScheduler"]}, "were trained with flow matching"),
        (TEMPLATE, {}, "chat_template.jinja is missing, and tokenizer_config.json has no chat_template"),
    ],
)
def test_a_folder_that_differs_is_refused(tmp_path: Path, file: str, changes: Mapping[str, Any], problem: str) -> None:
    folder = copied(Z_IMAGE, tmp_path)
    if file == TEMPLATE:
        (folder / file).unlink()
    else:
        change(folder / file, **changes)
    assert any(problem in found for found in check_model_folder(folder).problems), check_model_folder(folder).problems


def test_a_template_in_the_tokenizers_configuration_suffices(tmp_path: Path) -> None:
    folder = copied(Z_IMAGE, tmp_path)
    change(folder / "tokenizer/tokenizer_config.json", chat_template=(folder / TEMPLATE).read_text())
    (folder / TEMPLATE).unlink()
    assert not check_model_folder(folder).problems


def test_turbo_is_proposed_eight_steps_without_guidance() -> None:
    flow = json.loads((family_model(Z_IMAGE) / "scheduler/scheduler_config.json").read_text())
    for family, steps in (("z_image", 8), ("sd3", 4)):
        proposal = propose_preset("Z-Image-Turbo", flow, family)
        assert proposal is not None
        assert (proposal.preset.num_inference_steps, proposal.preset.guidance_scale) == (steps, 0.0)


@pytest.mark.parametrize(
    ("prompt", "tokens", "lost"),
    [
        ("a star", 512, ""),
        ("", 512, ""),
        ("a star and a circle", 12, "and a circle"),
        ("a star", 14, ""),  # Only what the template writes behind the prompt is cut.
        ("", 3, ""),
    ],
)
def test_a_prompt_is_a_message_at_its_own_length(model: Model, prompt: str, tokens: int, lost: str) -> None:
    tokenizer = chat_tokenizer()
    chunk, cut = chat_chunk(prompt, tokenizer, tokens)
    whole = tokenizer(f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n").input_ids
    length = min(len(whole), tokens)
    assert (len(chunk.ids), chunk.ids[:length], sum(chunk.mask)) == (tokens, tuple(whole[:length]), length)
    assert cut == lost
    spec = replace(SPEC, prompt=prompt, max_sequence_length=tokens)
    assert len(encode_prompts(model, spec).conditional.prompt) == length


def test_a_guidance_scale_of_0_makes_one_row(model: Model) -> None:
    for scale, rows in ((0.0, 1), (0.1, 2), (1.0, 2)):
        spec = replace(SPEC, guidance_scale=scale)
        request = Request(model, spec, encode_prompts(model, spec))
        assert (request.row_count, request.key.tokens) == (rows, 0)
        assert len({row.size for row in request.rows()}) == 1


def test_truncated_guidance_leaves_out_a_row(model: Model) -> None:
    spec = replace(SPEC, num_inference_steps=4, cfg_truncation=0.3)
    request = Request(model, spec, encode_prompts(model, spec))
    counts = []
    while not request.done:
        rows = request.rows()
        counts.append(request.row_count)
        assert len(rows) == request.row_count
        request.advance({row.half: torch.zeros_like(row.sample) for row in rows})
    # With a shift of 3, the times are 0, .1, .25 and .5.
    assert counts == [2, 2, 2, 1]


def test_conditions_of_any_length_are_sent_and_received() -> None:
    sent = {
        half: Embeds(prompt=torch.randn(length, 4), any_length=True)
        for half, length in ((Half.CONDITIONAL, 7), (Half.UNCONDITIONAL, 3))
    }
    parts = condition_parts(list(sent.values()))
    received = read_conditions(parts, list(sent))
    for half, embeds in sent.items():
        assert torch.equal(received[half].prompt, embeds.prompt)
        assert received[half].any_length
    for lengths in ([7], [7, 8], [0, 7], [7.0, 3.0]):
        with pytest.raises(ValueError, match="must have prompt_lengths of 1 to 7 tokens for each half"):
            read_conditions({**parts, "prompt_lengths": torch.tensor(lengths)}, list(sent))


def test_rows_are_sampled_without_the_text_encoder() -> None:
    folder, cpu = family_model(Z_IMAGE), torch.device("cpu")
    model = load_model(folder, name="m", device=cpu, dtype=torch.float32, roles={"denoise", "decode"})
    conditions = sample_conditions(model, SPEC)
    assert conditions.conditional.prompt.shape[1:] == (32,)
    assert conditions.conditional.any_length


def test_the_text_encoder_gives_signs_of_life(model: Model) -> None:
    (encoder,), beats = model.text_encoders, list[int]()
    call_after_blocks([encoder], lambda: beats.append(1))
    encoder(torch.tensor([[1, 2, 3]]))
    assert len(beats) == encoder.config.num_hidden_layers


def test_latents_are_float32_between_steps_in_half_precision() -> None:
    """As in Diffusers, whose noise and sums of steps therefore have more bits than the network's predictions."""
    model = load(family_model(Z_IMAGE), dtype=torch.bfloat16)
    request = Request(model, SPEC, encode_prompts(model, SPEC))
    noise = torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(SPEC.seed))
    assert torch.equal(request.latent, noise)
    assert {row.sample.dtype for row in request.rows()} == {torch.bfloat16}
    request.advance({row.half: torch.full_like(row.sample, 0.3) for row in request.rows()})
    assert request.latent.dtype == torch.float32
    resumed = Request(model, SPEC, encode_prompts(model, SPEC), resume=request.state())
    assert torch.equal(resumed.latent, request.latent)


def test_the_template_of_the_chat_is_part_of_the_models_hash(tmp_path: Path) -> None:
    folder = copied(Z_IMAGE, tmp_path)
    before = model_digest(check_model_folder(folder))
    (folder / TEMPLATE).write_text((folder / TEMPLATE).read_text() + " ")
    assert model_digest(check_model_folder(folder)) != before


def test_fixed_rows_are_refused(model: Model) -> None:
    check_fixed_rows(0, model)
    with pytest.raises(ValueError, match="depend on the lengths of the prompts in its batch; set fixed_rows to 0"):
        check_fixed_rows(8, model)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"width": 36}, "must be a multiple of 8 with this model"),
        ({"width": 520}, "must be at most 512 with this model"),
        ({"weighted": True}, "must be plain: Z-Image reads no weighted prompts"),
        ({"prompt_2": "a heart"}, "must be empty: Z-Image has one text encoder"),
        ({"clip_skip": 1}, "must be 0 with this model, which reads no text encoder's states between layers"),
        ({"max_sequence_length": 513}, "must be 1 to 512 with this model"),
        ({"true_cfg_scale": 2.0, "negative_prompt": "x"}, "only models of Flux.1 take it"),
        ({"embeddings": (EMBEDDING,)}, "must have no embedding (x): none are served with Z-Image; use a LoRA"),
        ({"controlnets": (CONTROL,)}, "this kind of model (Z-Image) is served without ControlNets"),
        ({"sampler": SamplerKind.DDIM}, "it is for models that predict noise"),
    ],
)
def test_what_it_cannot_draw_is_refused(model: Model, changes: Mapping[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        check_drawable(replace(SPEC, **changes), EngineLimits(max_pixels=1 << 20), model)
    assert any(problem in violation.description for violation in raised.value.violations)
