"""Weights are those that stock Diffusers loads, in every layout, in memory and in an element type that fits."""

from __future__ import annotations

import ctypes
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from safetensors.torch import save_file
from torch import nn

from bottega.miniature import WEIGHTS
from bottega.model import weights as dtypes
from bottega.model.loading import load_model
from bottega.model.model import Model
from bottega.model.weights import Placement, ProbeTimes, load_network, pick_dtype
from bottega.model_files.folder_check import check_model_folder
from bottega.model_files.report import ModelReport, PartReport
from tests.samples.published import Layout, published_model
from tests.support.manual_engine import load
from tests.support.slow_cases import in_every_run
from tests.support.stock import load_stock

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
# Layouts, element types, and the variant that stock has to be told of.
LOADS = {
    "plain": (Layout(), torch.bfloat16, ""),
    "old VAE names": (Layout(old_vae_names=True), torch.float16, ""),
    "no prefix, no position ids": (Layout(text_prefix=False, position_ids=False), torch.float32, ""),
    "shards": (Layout(shards=3), torch.float32, ""),
    "old names of shards of fp16": (
        Layout(variants=("fp16",), shards=2, legacy_shard_names=True),
        torch.float32,
        "fp16",
    ),
}


def parts(model: Model) -> dict[str, nn.Module]:
    first, second = model.text_encoders
    return {"unet": model.backbone.network, "vae": model.vae, "text_encoder": first, "text_encoder_2": second}


def assert_same_weights(ours: nn.Module, theirs: nn.Module) -> None:
    """The same values; the VAE's may be in float32, in which stock encodes and decodes with them, too."""
    mine, reference = ours.state_dict(), theirs.state_dict()
    assert mine.keys() == reference.keys()
    for name, tensor in reference.items():
        assert torch.equal(mine[name].double(), tensor.double()), name
    assert [weights.requires_grad for weights in ours.parameters()] == [
        weights.requires_grad for weights in theirs.parameters()
    ]
    assert not ours.training
    assert not any(tensor.is_meta for tensor in (*ours.parameters(), *ours.buffers()))


@pytest.mark.parametrize("name", in_every_run(LOADS, {*LOADS} - {"no prefix, no position ids"}))
def test_the_weights_are_those_of_stock_diffusers(name: str) -> None:
    layout, dtype, variant = LOADS[name]
    folder = published_model(layout)
    assert_loads_as(load_stock(folder, dtype, variant=variant or None), load(folder, dtype=dtype))


def test_where_one_part_has_only_fp16_weights_every_part_that_has_them_takes_them(tmp_path: Path) -> None:
    folder = shutil.copytree(published_model(Layout(variants=("", "fp16"))), tmp_path / "mixed")
    (folder / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    (folder / "vae" / "diffusion_pytorch_model.fp16.safetensors").unlink()
    assert_loads_as(load_stock(folder, variant="fp16"), load(folder))


def test_the_operators_variant_is_that_of_stock_diffusers() -> None:
    folder = published_model(Layout(variants=("", "fp16", "bf16")))
    model = load_model(folder, name="m", device=torch.device("cpu"), dtype=torch.float32, variant="bf16")
    assert_loads_as(load_stock(folder, variant="bf16"), model)


def assert_loads_as(stock: Any, model: Model) -> None:
    for name, part in parts(model).items():
        assert_same_weights(part, getattr(stock, name))


def test_no_weight_lies_in_a_mapped_file() -> None:
    folder = published_model()
    model = load(folder)
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    assert model is not None
    assert not mapped


# Of what reading one tensor takes, and what Python and the allocator do.
_SLACK_BYTES = 48 << 20


def peak_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def test_loading_takes_little_memory_beside_the_weights(tmp_path: Path) -> None:
    """Of a UNet whose files are twice as large as its weights in bfloat16."""
    config = json.loads((published_model() / "unet" / "config.json").read_text())
    config |= {"block_out_channels": [128, 256, 512], "attention_head_dim": [2, 4, 8]}
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    save_file({name: torch.zeros(weights.shape) for name, weights in unet.state_dict().items()}, file)
    part = PartReport(name="unet", folder=tmp_path, class_name="UNet2DConditionModel", files=(file,))
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = peak_bytes()
    target = Placement(device=CPU, dtype=torch.bfloat16, on_read=lambda _: None)
    loaded = load_network(UNet2DConditionModel, part, target)
    weights_bytes, taken_bytes = sum(weights.nbytes for weights in loaded.parameters()), peak_bytes() - before
    assert weights_bytes > 2 * _SLACK_BYTES, "large enough to tell"
    assert weights_bytes - _SLACK_BYTES <= taken_bytes <= 1.15 * weights_bytes + _SLACK_BYTES


BFLOAT16_IS_SLOWER = ProbeTimes(float32_s=1.0, bfloat16_s=7.0)


def half_model() -> Path:
    """A model whose files are float16, as most published ones are."""
    return published_model(Layout(variants=("fp16",)))


def half() -> ModelReport:
    return check_model_folder(half_model())


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the probe says, where it is asked."""
    probe = SimpleNamespace(times=None, asked=0)

    def answer() -> ProbeTimes:
        probe.asked += 1
        assert isinstance(probe.times, ProbeTimes)
        return probe.times

    monkeypatch.setattr(dtypes, "probe_times", answer)
    return probe


@pytest.mark.parametrize(
    ("asked", "model", "device", "times", "wanted"),
    [
        ("auto", published_model, CPU, None, torch.float32),
        ("auto", published_model, GPU, None, torch.float32),
        # Its preset says so, because its files are float16 only to be small.
        ("auto", lambda: WEIGHTS, CPU, None, torch.float32),
        ("bfloat16", lambda: WEIGHTS, GPU, None, torch.bfloat16),
        ("auto", half_model, GPU, None, torch.float16),
        ("auto", half_model, CPU, ProbeTimes(float32_s=1.0, bfloat16_s=0.4), torch.bfloat16),
        ("auto", half_model, CPU, BFLOAT16_IS_SLOWER, torch.float32),
        ("auto", half_model, CPU, ProbeTimes(float32_s=1.0, bfloat16_s=1.1), torch.bfloat16),
    ],
    ids=["float32", "float32 on a GPU", "a preset", "an operator", "float16 on a GPU", "quick", "slow", "alike"],
)
def test_the_element_type_follows_operator_preset_files_and_speed(
    asked: str,
    model: Callable[[], Path],
    device: torch.device,
    times: ProbeTimes | None,
    wanted: torch.dtype,
    measured: SimpleNamespace,
) -> None:
    measured.times = times
    assert pick_dtype(asked, check_model_folder(model()), device) == wanted
    assert measured.asked == (times is not None)


def test_float32_is_not_chosen_where_there_is_no_memory_for_it(
    measured: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured.times = BFLOAT16_IS_SLOWER
    needed = 4 * sum(part.parameters for part in half().parts.values())
    monkeypatch.setattr(dtypes, "available_bytes", lambda: needed)
    assert pick_dtype("auto", half(), CPU) == torch.bfloat16
    assert measured.asked == 0


def test_float16_on_a_cpu_is_taken_where_it_is_said_and_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assert pick_dtype("float16", half(), CPU) == torch.float16
    assert "float16 is many times slower" in caplog.text
    caplog.clear()
    assert pick_dtype("float16", half(), GPU) == torch.float16
    assert pick_dtype("bfloat16", half(), CPU) == torch.bfloat16
    assert not caplog.records
