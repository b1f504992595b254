"""Stages of the miniature's training: each learns, on the device that it is told, and leaves the rest as it was."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ControlNetModel, UNet2DConditionModel

from bottega.errors import ConfigError
from bottega.miniature import WEIGHTS
from load.miniature.training import stages
from load.miniature.training.controlnet import fresh_controlnet
from load.miniature.training.corpus import Corpus, draw_corpus, encode
from load.miniature.training.descent import PlainAttention, half_precision, pick_device
from load.miniature.training.parts import Parts, load_parts
from load.miniature.training.stages import CHANGED, FRESH, build_stage
from load.miniature.training.train import Training, train
from tests.unit.load.training.conftest import every_stage

STEPS = 20
# Tensors of it have shapes and no values; they refuse to meet those of another device, as a GPU's do.
META = torch.device("meta")


def _worn(name: str) -> Parts:
    """Networks with something to learn for a stage: fresh ones, a worn decoder."""
    torch.manual_seed(0)
    parts = load_parts(WEIGHTS, fresh=tuple(set(FRESH.get(name, ())) - {"vae"}))
    with torch.no_grad():
        for parameter in parts["vae"].decoder.parameters() if name in {"vae", "decoder"} else ():
            parameter.mul_(1.0 + 0.1 * torch.randn_like(parameter))
    return parts


def _weights(parts: Parts) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{key}": kept.clone() for name, net in parts.networks.items() for key, kept in net.state_dict().items()
    }


@pytest.mark.parametrize("name", every_stage({"vision"}))
def test_a_stage_learns_and_changes_nothing_else(name: str, corpus: Corpus, tmp_path: Path) -> None:
    parts = _worn(name)
    before = _weights(parts)
    stage = build_stage(name, parts, corpus, tmp_path, rows=4)

    losses = [stage.step(0, 1.0) for _ in range(STEPS)]  # one batch, again and again: what there is to learn is in it
    stage.finish()

    assert losses[-1] < 0.95 * losses[0]
    after = _weights(parts)
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    learns = ("vae.decoder", "vae.post_quant_conv") if name == "decoder" else CHANGED[name]
    assert not [key for key in changed if not key.startswith(learns)]


def _plain_descent(parameters: Iterable[Any], **_: object) -> torch.optim.Optimizer:
    """The training's own optimizer is fused, which this device does not know."""
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize("name", every_stage({"edges"}))
def test_a_whole_step_stays_on_the_networks_device(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step mixes it with the processor. No GPU is needed to see that."""
    monkeypatch.setattr(torch.optim, "AdamW", _plain_descent)
    corpus = draw_corpus(4, seed=0)
    latents = encode(corpus, load_parts(WEIGHTS), tmp_path)
    monkeypatch.setattr(stages, "encode", lambda *_: latents)  # they have values
    stage = build_stage(name, load_parts(WEIGHTS, device=META), corpus, tmp_path, rows=2)

    # The loss as a number is what a step ends with; all before it has been done.
    with pytest.raises(RuntimeError, match=r"item\(\) cannot be called on meta tensors"):
        stage.step(0, 1.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no CUDA device here"):
        train("unet", Training(folder=tmp_path / "training", device="cuda"))

    assert not (tmp_path / "training").exists()
    assert pick_device("auto") == torch.device("cpu")


def test_plain_attention_is_stock_attention(told: dict[str, Any]) -> None:
    unet: Any = UNet2DConditionModel.from_pretrained(WEIGHTS / "unet", use_safetensors=True).float()

    with torch.no_grad():
        stock = unet(**told).sample
        unet.set_attn_processor(PlainAttention())
        plain = unet(**told).sample

    torch.testing.assert_close(plain, stock, atol=1e-5, rtol=1e-5)


def test_a_fresh_controlnet_is_the_unets_encoder_and_changes_nothing(told: dict[str, Any]) -> None:
    unet = load_parts(WEIGHTS)["unet"]
    torch.manual_seed(0)
    net = fresh_controlnet(unet)

    found = net(**told, controlnet_cond=torch.ones(2, 3, 64, 64))

    assert not any(residual.any() for residual in (*found.down_block_res_samples, found.mid_block_res_sample))
    torch.manual_seed(0)
    stock = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(16, 24, 32)).state_dict()
    assert all(torch.equal(stock[name], tensor) for name, tensor in net.state_dict().items())


@pytest.mark.parametrize("half", [False, True])
def test_half_precision_is_of_processors_that_have_it(monkeypatch: pytest.MonkeyPatch, half: bool) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_f": True, "avx512_bf16": half})

    with half_precision(torch.device("cpu")):
        assert torch.is_autocast_enabled("cpu") is half
