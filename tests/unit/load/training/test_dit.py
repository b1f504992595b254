"""The transformer's stage: its folder, its inputs, its attention, and looks at what it draws while it learns."""

from __future__ import annotations

import json
from pathlib import Path

import PIL.Image
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from diffusers.models.attention_processor import JointAttnProcessor2_0
from transformers import CLIPTextModel

from bottega.errors import ConfigError
from bottega.miniature import WEIGHTS
from bottega.model_files.folder_check import check_model_folder
from load.bench import miniature
from load.bench.stock import stock_pipeline
from load.miniature.training.corpus import Corpus, Latents
from load.miniature.training.dit import FlowLessons, JointAttention, dit_start, fresh_transformer
from load.miniature.training.parts import Parts, load_parts
from load.miniature.training.train import PROGRESS, SHEET, Training, train

PROMPTS = ["a big red star on the left on a blue background", ""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dit_start(WEIGHTS, tmp_path_factory.mktemp("start"))


@pytest.fixture(scope="module")
def parts(folder: Path) -> Parts:
    return load_parts(folder)


def test_its_inputs_are_those_of_the_stock_pipeline(folder: Path, parts: Parts, corpus: Corpus) -> None:
    pipeline = stock_pipeline(folder, StableDiffusion3Pipeline)
    prompt, _, pooled, _ = pipeline.encode_prompt(PROMPTS, None, None, max_sequence_length=1)
    # Of pictures that are all zeros before the VAE's shift and scale.
    zero = torch.zeros(len(corpus), 4, 16, 16)
    lessons = FlowLessons(parts, corpus, Latents(mean=zero + parts["vae"].config.shift_factor, std=zero))

    told = lessons.told([PROMPTS[0]] * 2, torch.tensor([1.0, 0.0]))
    batch = lessons.draw(4, torch.Generator().manual_seed(0))

    unet_encoder = CLIPTextModel.from_pretrained(WEIGHTS / "text_encoder", dtype=torch.float32)
    with torch.no_grad():
        first = unet_encoder(parts.tokens(PROMPTS), output_hidden_states=True)
    torch.testing.assert_close(told["encoder_hidden_states"][:, :24, :64], first.hidden_states[-2])
    torch.testing.assert_close(told["pooled_projections"][:, :64], first.pooler_output)
    torch.testing.assert_close(told["encoder_hidden_states"], prompt)
    torch.testing.assert_close(told["pooled_projections"], pooled)
    assert pipeline.vae.config.shift_factor != 0.0
    share = batch.times[:, None, None, None] / pipeline.scheduler.config.num_train_timesteps
    torch.testing.assert_close(batch.noisy, share * batch.target)
    assert float(batch.target.std()) == pytest.approx(1.0, abs=0.1)


def test_one_token_counts_as_all_zeros_in_place_of_t5() -> None:
    torch.manual_seed(0)
    network = fresh_transformer()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    sample, text, pooled = torch.randn(2, 4, 16, 16), torch.randn(2, 24, 128), torch.randn(2, 128)

    def flow(zeros: int) -> torch.Tensor:
        context = torch.nn.functional.pad(text, (0, 0, 0, zeros))
        with torch.no_grad():
            predicted: torch.Tensor = network(sample, context, pooled, torch.tensor([500.0, 20.0])).sample
        return predicted

    network.set_attn_processor(JointAttnProcessor2_0())
    stock, one_zero = flow(256), flow(1)
    network.set_attn_processor(JointAttention())

    torch.testing.assert_close(flow(1), stock, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(one_zero, stock, rtol=1e-2, atol=1e-2)


def test_a_stopped_training_leaves_a_model_that_can_be_served_and_looked_at(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("load.miniature.training.train._EACH", 1)
    monkeypatch.setattr(miniature, "STEPS", 1)
    training = Training(folder=training.folder, steps=3, rows=2, pictures=4, look_every=1)

    def write_sheet(*arguments: object) -> None:
        written(*arguments)  # type: ignore[arg-type]
        training.stopped.set()

    written = miniature.write_sheet
    monkeypatch.setattr("load.miniature.training.train.write_sheet", write_sheet)

    assert train("dit", training).steps == 1

    (line,) = (training.folder / PROGRESS).read_text().splitlines()
    progress = json.loads(line)
    assert (progress["stage"], progress["step"]) == ("dit", 1)
    assert {"loss", "one_object", "two_objects"} <= progress.keys()
    with PIL.Image.open(training.folder / SHEET) as sheet:
        assert sheet.width > 2 * 64
    report = check_model_folder(training.folder / "model")
    assert (report.problems, report.default_size) == ((), 64)
    assert report.size_bytes < 12e6
    with pytest.raises(ConfigError, match="has no unet, which text needs"):
        train("text", training)
