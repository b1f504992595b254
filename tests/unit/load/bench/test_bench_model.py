"""The bench model: a folder that the suite and stock Diffusers load, as large as asked, sane and repeatable."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import StableDiffusionXLPipeline

from bottega.model.model import load_model
from bottega.model.samplers import SamplerKind
from load.bench.bench_model import BenchShape, main, write_bench_model

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
    """A small model."""
    path = tmp_path_factory.mktemp("models") / "bench"
    write_bench_model(path, SMALL)
    return path


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> Any:
    """Stock Diffusers with the small model."""
    loaded = StableDiffusionXLPipeline.from_pretrained(
        folder, use_safetensors=True, dtype=torch.float32, add_watermarker=False
    )
    loaded.set_progress_bar_config(disable=True)
    return loaded


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


@pytest.mark.parametrize("sampler", list(SamplerKind), ids=lambda kind: kind.name)
def test_latents_stay_small_through_fifty_steps(pipeline: Any, sampler: SamplerKind) -> None:
    pipeline.scheduler = getattr(diffusers, sampler.value.__name__).from_config(pipeline.scheduler.config)

    latent = pipeline("a red star", num_inference_steps=50, generator=_seeded(), output_type="latent").images

    assert latent.isfinite().all()
    assert 0.3 < latent.std() < 4
    assert latent.abs().max() < 15


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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_out_channels", (16,)),
        ("block_out_channels", (16, 32, 32, 32)),
        ("block_out_channels", (12, 32)),
        ("block_out_channels", (16, 24)),
        ("block_out_channels", (0, 32)),
        ("transformer_layers", ()),
        ("transformer_layers", (1, 1)),
        ("transformer_layers", (0,)),
        ("layers_per_block", 0),
        ("head_channels", 0),
        ("norm_groups", 0),
        ("sample_size", 0),
        ("sample_size", 9),
        ("latent_scale", 16),
        ("vae_channels", 12),
        ("text_width", 18),
        ("dtype", "bfloat16"),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused_by_its_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{field} is "):
        dataclasses.replace(SMALL, **{field: value})  # type: ignore[arg-type]


def test_the_command_takes_every_field_and_names_the_one_that_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        f"--{field.name.replace('_', '-')}={_written(getattr(SMALL, field.name))}"
        for field in dataclasses.fields(BenchShape)
    ]
    monkeypatch.setattr(sys, "argv", ["bench_model", str(tmp_path / "bench"), *options, "--seed=3"])
    main()

    assert capsys.readouterr().out == f"{tmp_path / 'bench'}\n"
    write_bench_model(tmp_path / "same", SMALL, seed=3)
    assert _contents(tmp_path / "bench") == _contents(tmp_path / "same")

    monkeypatch.setattr(sys, "argv", ["bench_model", str(tmp_path / "wrong"), "--transformer-layers=1,0"])
    with pytest.raises(SystemExit, match="2"):
        main()

    assert "error: transformer_layers is (1, 0)" in capsys.readouterr().err
    assert not (tmp_path / "wrong").exists()


def _seeded() -> torch.Generator:
    return torch.Generator("cpu").manual_seed(1)


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _written(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
