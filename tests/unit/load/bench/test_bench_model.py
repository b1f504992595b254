"""The bench model: a folder that the suite and stock Diffusers load, repeatable byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bottega.model.model import load_model
from bottega.model.schedulers import SamplerKind
from load.bench.bench_model import BenchShape, write_bench_model

SMALL = BenchShape(
    block_out_channels=(16, 32),
    transformer_layers=(1,),
    layers_per_block=1,
    head_channels=16,
    norm_groups=8,
    sample_size=8,
    latent_scale=4,
    vae_channels=8,
    text_width=16,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "bench"
    write_bench_model(path, SMALL)
    return path


def test_the_engine_loads_it(folder: Path) -> None:
    model = load_model(folder, name="bench", device=torch.device("cpu"), dtype=torch.float32)

    assert (model.latent_scale, model.defaults.width, model.defaults.sampler) == (4, 32, SamplerKind.EULER)
    assert [block.name for block in model.backbone.blocks] == [
        "down_blocks.0",
        "down_blocks.1",
        "mid_block",
        "up_blocks.0",
        "up_blocks.1",
    ]


def test_a_seed_repeats_every_byte_and_another_seed_does_not(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    write_bench_model(tmp_path / "same", SMALL)
    assert torch.equal(torch.rand(4), expected), "the global generator stands where it stood"
    write_bench_model(tmp_path / "other", SMALL, seed=1)

    assert _contents(tmp_path / "same") == _contents(folder)
    unet = "unet/diffusion_pytorch_model.safetensors"
    assert _contents(tmp_path / "other")[unet] != _contents(folder)[unet]


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
